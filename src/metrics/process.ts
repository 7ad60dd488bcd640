// The usual metrics of a process. The library's own set is made for Node.js: on Bun several of its values have no meaning,
// and it counts open descriptors by listing them, which holds the event loop when there are many.
import { Counter, Gauge, type Registry } from "prom-client";
import { systemClock } from "../core/clock.ts";

export function registerProcess(registry: Registry): void {
  const registers = [registry];
  new Counter({
    name: "process_cpu_seconds_total",
    help: "Processor time of this process, all threads.",
    registers,
    collect() {
      const { user, system } = process.cpuUsage();
      this.reset();
      this.inc((user + system) / 1e6);
    },
  });
  new Gauge({
    name: "process_resident_memory_bytes",
    help: "Resident memory of this process.",
    registers,
    collect() {
      this.set(process.memoryUsage.rss());
    },
  });
  new Gauge({
    name: "process_start_time_seconds",
    help: "When this process was started, in seconds since the epoch.",
    registers,
  }).set(Math.round(systemClock.now() / 1000 - process.uptime()));
}
