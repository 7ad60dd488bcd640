// The Prometheus metrics of both services: their names, labels and buckets, what counts them, and the port that serves them.
// Every metric exists from the start, with zeros for all label values that are known beforehand; those of the other service
// stay zero. No label names a tenant.
import { Counter, Gauge, Histogram, Registry } from "prom-client";
import {
  type GaugeSources,
  type Meters,
  PAYMENT_OUTCOMES,
  type QueueSize,
  SETTLEMENT_OUTCOMES,
} from "../core/meters.ts";
import { COMMIT, VERSION } from "../core/startup.ts";
import { ERROR_CLASSES, MODES, POLICY_ACTIONS } from "../core/states.ts";
import { systemClock } from "../core/time.ts";
import { pathPattern, routes } from "../http/elysia.ts";
import { hostPart } from "../http/listener.ts";
import { listenPlain, type PlainListenerOptions } from "../http/plain-listener.ts";
import { text } from "../http/responses.ts";
import { createGuardedEdge } from "../http/server.ts";
import { createBatcher } from "../kernel/batch.ts";
import { type LimitName, MAX } from "../kernel/limits.ts";
import { endsWithin } from "../kernel/wait.ts";

/** Up to the default deadline of an upstream call. */
const UPSTREAM_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300];
/** A polled call is answered within milliseconds, `Prefer: wait` within a minute, a streamed call's head by its deadline. */
const HTTP_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300];
/** Blocks come every two seconds, and a settlement waits 15 to 20 s for them. */
const SETTLEMENT_SECONDS = [0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 20, 30, 60];

/** The label of an end without an error class. */
const NO_CLASS = "none";

type MetricMakers = ReturnType<typeof metricsIn>;

function metricsIn(registry: Registry) {
  const registers = [registry];
  return {
    counter: <L extends string>(name: string, help: string, ...labelNames: L[]) =>
      new Counter({ name, help, labelNames, registers }),
    histogram: <L extends string>(name: string, buckets: number[], help: string, ...labelNames: L[]) =>
      new Histogram({ name, help, labelNames, buckets, registers }),
    /** @param fill called at each scrape */
    gauge<L extends string>(name: string, help: string, labelNames: L[], fill: (gauge: Gauge<L>) => unknown): void {
      const collect = async () => void (await fill(gauge));
      const gauge: Gauge<L> = new Gauge({ name, help, labelNames, registers, collect });
    },
    /** A gauge without labels. It has no sample while its value is unknown: an old value misleads, a missing one can alert. */
    value(name: string, help: string, read: () => number | undefined | Promise<number | undefined>): void {
      this.gauge(name, help, [], async (gauge) => {
        const value = await read();
        if (value === undefined) gauge.remove();
        else gauge.set(value);
      });
    },
  };
}

/** @param endpoints how many nodes of the chain a facilitator has; null for a gateway */
export function createMeters(registry: Registry, endpoints: number | null): Meters {
  const metrics = metricsIn(registry);
  const sources: { -readonly [S in keyof GaugeSources]: GaugeSources[S] } = {};
  metrics.gauge(
    "tollgate_build_info",
    "1, with the version and the commit of this process.",
    ["version", "commit"],
    (info) => info.set({ version: VERSION, commit: COMMIT ?? "unknown" }, 1),
  );
  registerGauges(metrics, sources, endpoints === null ? null : NO_QUEUE);
  const lag = createLoopLag();
  metrics.value(
    "tollgate_event_loop_lag_seconds",
    "The longest pause of the main thread's event loop in the last 30 to 60 seconds, of this replica.",
    () => lag.longest() / 1000,
  );
  const rpcErrors = metrics.counter(
    "tollgate_rpc_errors_total",
    "Requests to a node of the chain without a usable response, by its index in TOLLGATE_RPC_URLS, from 0. Facilitator.",
    "endpoint",
  );
  for (let endpoint = 0; endpoint < (endpoints ?? 0); endpoint++) rpcErrors.inc({ endpoint }, 0);
  return {
    ...createCallMeters(metrics),
    ...createPaymentMeters(metrics),
    rpcFailed: (endpoint) => rpcErrors.inc({ endpoint }),
    loopLate: lag.late,
    requestsTo: createRequestMeters(metrics),
    gauges: (more) => void Object.assign(sources, more),
  };
}

function createCallMeters({ counter, histogram }: MetricMakers): Pick<Meters, "accepted" | "ended" | "policyDecided"> {
  const accepted = counter(
    "tollgate_accepted_total",
    "New calls that were answered 202, or begun on the streaming path. Repetitions of a call are not counted.",
  );
  const ended = counter(
    "tollgate_invocations_ended_total",
    "Ends of calls, each counted by the replica that recorded it.",
    "mode",
    "status",
    "error_class",
  );
  for (const mode of MODES) {
    ended.inc({ mode, status: "succeeded", error_class: NO_CLASS }, 0);
    for (const error_class of [NO_CLASS, ...ERROR_CLASSES]) ended.inc({ mode, status: "failed", error_class }, 0);
  }
  const upstream = histogram(
    "tollgate_upstream_duration_seconds",
    UPSTREAM_SECONDS,
    "Upstream calls of ended calls, from the first dial to the last byte, retries included.",
  );
  const decisions = counter("tollgate_policy_decisions_total", "Recorded decisions of policies.", "action");
  for (const action of POLICY_ACTIONS) decisions.inc({ action }, 0);
  return {
    accepted: () => accepted.inc(),
    ended({ mode, status, error_class, latency_ms }): void {
      ended.inc({ mode, status, error_class: error_class ?? NO_CLASS });
      if (latency_ms !== null) upstream.observe(latency_ms / 1000);
    },
    policyDecided: (action) => decisions.inc({ action }),
  };
}

function createPaymentMeters(metrics: MetricMakers): Pick<Meters, "payment" | "settlement" | "settlementTook"> {
  const payments = metrics.counter(
    "tollgate_payments_total",
    "Priced calls by the outcome of their payment before it is settled. Repetitions of a call are not counted. Gateway.",
    "outcome",
  );
  for (const outcome of PAYMENT_OUTCOMES) payments.inc({ outcome }, 0);
  const settlements = metrics.counter(
    "tollgate_settlements_total",
    "Settlements by outcome. Gateway and facilitator each count their own side of a settlement.",
    "outcome",
  );
  for (const outcome of SETTLEMENT_OUTCOMES) settlements.inc({ outcome }, 0);
  const took = metrics.histogram(
    "tollgate_settlement_duration_seconds",
    SETTLEMENT_SECONDS,
    "Gateway: one attempt, until the facilitator's answer. Facilitator: from the request to the block, or to the end of waiting for it.",
  );
  return {
    payment: (outcome) => payments.inc({ outcome }),
    settlement: (outcome) => settlements.inc({ outcome }),
    settlementTook: (ms) => took.observe(ms / 1000),
  };
}

function createRequestMeters({ counter, histogram }: MetricMakers): Meters["requestsTo"] {
  const requests = counter(
    "tollgate_http_requests_total",
    "Answered requests by the template of their route, or other. A status that is not registered is counted as its class.",
    "route",
    "status",
  );
  const took = histogram(
    "tollgate_http_request_duration_seconds",
    HTTP_SECONDS,
    "From the head of a request to the head of its response.",
    "route",
  );
  return (routes) => {
    const templates = createRouteTemplates(routes);
    for (const route of templates.all) took.zero({ route });
    return (path, status, ms) => {
      const route = templates.of(path);
      requests.inc({ route, status: statusLabel(status) });
      took.observe({ route }, ms / 1000);
    };
  };
}

/** @param noQueue the size of the queue if no source is set; null if it is unknown then */
function registerGauges(metrics: MetricMakers, sources: GaugeSources, noQueue: QueueSize | null): void {
  const queue = staleCache(async () => {
    const size = (await sources.queue?.()) ?? noQueue;
    if (size === null) throw new Error("nobody can tell yet");
    return size;
  });
  metrics.value(
    "tollgate_queue_depth",
    "Calls that wait to be made in the whole deployment: each replica shows the same. No sample while the database is away.",
    async () => (await queue())?.calls,
  );
  metrics.value(
    "tollgate_queue_oldest_age_seconds",
    "How long the oldest waiting call of the whole deployment has waited; 0 when none waits.",
    async () => {
      const known = await queue();
      return known === null ? undefined : known.oldestMs / 1000;
    },
  );
  metrics.value("tollgate_running", "Calls that this replica makes now.", () => sources.running?.() ?? 0);
  metrics.gauge(
    "tollgate_limit_used_ratio",
    "How much of a limit of this process is in use, from 0 to 1. Gateway.",
    ["limit"],
    (gauge) => {
      for (const [name, used] of Object.entries(sources.inUse?.() ?? {})) {
        gauge.set({ limit: snakeCase(name) }, used / MAX[name as LimitName]);
      }
    },
  );
  const balances = staleCache(async () => sources.balances?.() ?? []);
  metrics.gauge(
    "tollgate_wallet_balance_wei",
    "Balances of the wallets that pay for gas. No sample while no node answers. Facilitator.",
    ["address"],
    async (gauge) => {
      const known = await balances();
      gauge.reset();
      for (const [address, wei] of known ?? []) gauge.set({ address }, Number(wei));
    },
  );
}

const snakeCase = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

/** For a facilitator, which has no queue. A gateway's is unknown until the gateway has started. */
const NO_QUEUE: QueueSize = { calls: 0, oldestMs: 0 };

export const OTHER_ROUTE = "other";

/** Maps paths to labels: one per route, so that callers cannot make more of them. */
export function createRouteTemplates(routes: readonly { readonly path: string }[]) {
  const paths = [...new Set(routes.map(({ path }) => path))];
  const all = paths.map((path) => ({
    pattern: pathPattern(path),
    template: path.replaceAll(/:(\w+)/g, "{$1}"),
    slashes: path.endsWith("*") ? -1 : slashesIn(path),
  }));
  const exact = new Set(paths.filter((path) => !/:|\*$/.test(path)));
  /** Routes by the number of slashes in their paths; those that end with `*` are under -1. */
  const byLength = Map.groupBy(all, ({ slashes }) => slashes);

  const among = (length: number, path: string): string | undefined =>
    byLength.get(length)?.find(({ pattern }) => pattern.test(path))?.template;

  return {
    all: [...all.map(({ template }) => template), OTHER_ROUTE],
    of: (path: string): string =>
      exact.has(path) ? path : (among(slashesIn(path), path) ?? among(-1, path) ?? OTHER_ROUTE),
  };
}

const slashesIn = (path: string): number => path.split("/").length - 1;

/** The registered statuses (IANA, RFC 9110). On the streaming path an upstream could make any number of others. */
const ASSIGNED = /^(10[0-3]|20[0-8]|226|30[0-8]|40\d|41[0-7]|42[1-689]|431|451|50[0-8]|51[01])$/;

export const statusLabel = (status: number): string =>
  ASSIGNED.test(`${status}`) ? `${status}` : `${Math.floor(status / 100)}xx`;

const HALF_MS = 30_000;

/** The longest recent pause of an event loop. Reading it does not reset it, so that several scrapers may read it. */
export function createLoopLag(monotonic: () => number = () => performance.now()) {
  let previous = 0;
  let longest = 0;
  let halfEndsAt = monotonic() + HALF_MS;

  function rotate(): void {
    const now = monotonic();
    if (now < halfEndsAt) return;
    previous = now < halfEndsAt + HALF_MS ? longest : 0;
    longest = 0;
    halfEndsAt = now + HALF_MS;
  }

  return {
    late(ms: number): void {
      rotate();
      longest = Math.max(longest, ms);
    },
    /** In milliseconds, over the last 30 to 60 seconds. */
    longest(): number {
      rotate();
      return Math.max(previous, longest);
    },
  };
}

/** A value stays fresh for this many times as long as it took to load, so loads take at most a twentieth of the time. */
const FRESH_PER_LOAD = 20;

/**
 * Caches a value that is costly to load for at least three seconds. A reader of a stale value waits up to a second for a new one, then
 * gets the stale value if loads have been slow before, or else null.
 */
export function staleCache<T>(load: () => Promise<T>): () => Promise<T | null> {
  let known: { readonly value: T; readonly freshUntil: number; readonly usableUntil: number } | null = null;
  let loading: Promise<void> | null = null;

  /** Never rejects. */
  async function refresh(): Promise<void> {
    const startedAt = performance.now();
    try {
      const value = await load();
      const now = performance.now();
      const took = now - startedAt;
      const freshUntil = now + Math.max(3_000, took * FRESH_PER_LOAD);
      // A stale value is dropped when the next load takes more than three times as long as this one.
      known = { value, freshUntil, usableUntil: freshUntil + took * 3 };
    } catch {
      known = null;
    } finally {
      loading = null;
    }
  }

  return async () => {
    if (known === null || performance.now() >= known.freshUntil) {
      loading ??= refresh();
      await endsWithin(1_000, loading);
    }
    return known !== null && performance.now() < known.usableUntil ? known.value : null;
  };
}

/** The usual metrics of a process. The library's own are partly meaningless on Bun, and list all open files, which takes long. */
export function registerProcess(registry: Registry): void {
  const metrics = metricsIn(registry);
  new Counter({
    name: "process_cpu_seconds_total",
    help: "Processor time of this process, all threads.",
    registers: [registry],
    collect() {
      const { user, system } = process.cpuUsage();
      this.reset();
      this.inc((user + system) / 1e6);
    },
  });
  metrics.value("process_resident_memory_bytes", "Resident memory of this process.", () => process.memoryUsage.rss());
  const startedAt = Math.round(systemClock.now() / 1000 - process.uptime());
  metrics.value(
    "process_start_time_seconds",
    "When this process was started, in seconds since the epoch.",
    () => startedAt,
  );
}

type MetricsOptions = Pick<PlainListenerOptions, "host" | "port" | "log"> & { readonly endpoints: number | null };

/** Serves GET /metrics alone. Scrapes at the same time share one rendering. @throws StartupProblem when the port is taken */
export async function startMetrics({ host, port, endpoints, log }: MetricsOptions): Promise<Meters> {
  const registry = new Registry();
  const meters = createMeters(registry, endpoints);
  registerProcess(registry);
  const rendering = createBatcher(async () => {
    const metrics = await registry.metrics();
    return () => metrics;
  });
  const app = routes().get("/metrics", async () => text(await rendering.join("", null), registry.contentType));
  const edge = createGuardedEdge({ app, log, guard: null });
  const at = { host, port, variable: "TOLLGATE_METRICS_PORT" };
  const server = await listenPlain({ ...at, log, answer: (request) => edge.fetch(request) });
  log.info("metrics_listening", { url: `http://${hostPart(host)}:${server.port}/metrics` });
  return meters;
}
