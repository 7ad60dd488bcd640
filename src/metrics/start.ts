// The metrics listener: a port of its own with GET /metrics and nothing else. What many ask for at once is written once.
import { Registry } from "prom-client";
import { createGathering } from "../concurrency/gathered.ts";
import type { Log } from "../core/log.ts";
import type { Meters } from "../core/meters.ts";
import { COMMIT, VERSION } from "../core/version.ts";
import { text } from "../http/answers.ts";
import { routes } from "../http/elysia.ts";
import { hostPart } from "../http/host-part.ts";
import { listenPlain } from "../http/plain-listener.ts";
import { createGuardedEdge } from "../http/server.ts";
import { createMeters } from "./metrics.ts";
import { registerProcess } from "./process.ts";

export interface MetricsListenerOptions {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  /** The nodes of the chain that a facilitator has; null for a gateway. */
  readonly endpoints: number | null;
  readonly log: Log;
}

/** @throws StartupProblem when the port is taken */
export async function startMetrics({ host, port, endpoints, log }: MetricsListenerOptions): Promise<Meters> {
  const registry = new Registry();
  const meters = createMeters({ registry, version: VERSION, commit: COMMIT, endpoints });
  registerProcess(registry);
  const written = createGathering(async () => {
    const metrics = await registry.metrics();
    return () => metrics;
  });
  const app = routes().get("/metrics", async () => text(await written.join("", null), registry.contentType));
  const edge = createGuardedEdge({ app, log, guard: null });
  const server = await listenPlain({
    host,
    port,
    variable: "TOLLGATE_METRICS_PORT",
    log,
    answer: (request) => edge.fetch(request),
  });
  log.info("metrics_listening", { url: `http://${hostPart(host)}:${server.port}/metrics` });
  return meters;
}
