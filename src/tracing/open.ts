// Loads what traces need only where they are switched on: it takes time and memory.
import type { Log } from "../core/log.ts";
import type { TracingOptions } from "../core/tracing.ts";
import type { RunningTracer } from "./tracer.ts";

/** @param service the name of the service, where the operator gives none */
export async function openTracer(
  options: TracingOptions | null,
  service: string,
  log: Log,
): Promise<RunningTracer | null> {
  if (options === null) return null;
  const { createTracer } = await import("./tracer.ts");
  return createTracer(options, service, log);
}
