// From the start of the process to its first healthy answer, with keys and database there from an earlier start; beside
// the bare server of the floor, whose script Bun has to read.

import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { freePort } from "../support/free-ports.ts";
import { tollgateBinary } from "../support/gateway/binary.ts";
import { temporaryRoot } from "../support/gateway/process.ts";
import { usageOf } from "./cores.ts";
import type { Report } from "./report.ts";
import { type Figures, latency } from "./table.ts";

/** The first of them makes the keys and the database, and does not count. */
const TIMES = 12;
const HEALTHY_MS_MAX = 20_000;

export async function starts(_seconds: number, report: Report): Promise<void> {
  const home = mkdtempSync(join(temporaryRoot(), "starts-"));
  mkdirSync(join(home, "floor"));
  const env = { PATH: "/usr/bin:/bin", TOLLGATE_DATA_DIR: join(home, "data"), TOLLGATE_LOG_FORMAT: "json" };
  const port = freePort();
  const bare = [process.execPath, join(import.meta.dir, "starts-floor.ts"), String(port)];
  const gateway = [tollgateBinary(), "--mode", "gateway", "--port", String(port)];
  const url = `http://127.0.0.1:${port}/healthz`;
  const floor = report.add(
    "start to healthy: bare server, from its source",
    await startOften(bare, url, { home, env }),
  );
  const own = await startOften(gateway, url, { home, env });
  report.add("start to healthy", own, { floor: [floor, "p50_ms"] });
  rmSync(home, { recursive: true });
}

interface Surroundings {
  readonly home: string;
  readonly env: Readonly<Record<string, string>>;
}

async function startOften(command: readonly string[], url: string, { home, env }: Surroundings): Promise<Figures> {
  const waits: number[] = [];
  let cores = 0;
  for (let time = 0; time < TIMES; time++) {
    const startedAt = performance.now();
    const child = Bun.spawn(["setpriv", "--pdeathsig", "KILL", "--", ...command], {
      cwd: home,
      env,
      stdin: "ignore",
      stdout: "ignore",
      stderr: "ignore",
    });
    await healthy(url, startedAt);
    if (time > 0) {
      waits.push(performance.now() - startedAt);
      cores += usageOf(child.pid).whole;
    }
    child.kill("SIGTERM");
    await child.exited;
  }
  return { ...latency(waits), ...(cores > 0 && { cpu_us: (cores * 1e6) / waits.length }) };
}

/** Asks until it answers: a refused connection is told at once, so nothing is lost by asking often. */
async function healthy(url: string, startedAt: number): Promise<void> {
  while (performance.now() - startedAt < HEALTHY_MS_MAX) {
    const answer = await fetch(url).catch(() => null);
    if (answer?.ok === true) return;
    await Bun.sleep(1);
  }
  throw new Error(`${url} has not answered for ${HEALTHY_MS_MAX} ms`);
}
