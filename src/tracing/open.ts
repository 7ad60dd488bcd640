// Opens the tracer. Its libraries are loaded only if tracing is on, since they take time and memory.
import type { Log } from "../core/log.ts";
import type { TracingOptions } from "../core/tracing.ts";
/** @param service the name of the service, unless the operator has configured another one */
export const openTracer = async (options: TracingOptions | null, service: string, log: Log) =>
  options === null ? null : (await import("./tracer.ts")).createTracer(options, service, log);
