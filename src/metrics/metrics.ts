// The metrics of both services: names, labels, buckets, what counts them, and the port that shows them. Every name is there
// from the start, with zeros for all labels that can be listed; what only the other service counts stays zero. No label says
// anything about a tenant. In one file, since it is one table of metrics and what they are counted with.
import { Counter, Gauge, Histogram, Registry } from "prom-client";
import type { CallEnd } from "../core/call.ts";
import type { Log } from "../core/log.ts";
import {
  type GaugeSources,
  type Meters,
  PAYMENT_OUTCOMES,
  type PaymentOutcome,
  type QueueSize,
  type RequestMeter,
  SETTLEMENT_OUTCOMES,
  type SettlementOutcome,
} from "../core/meters.ts";
import { COMMIT, VERSION } from "../core/startup.ts";
import { ERROR_CLASSES, MODES, POLICY_ACTIONS, type PolicyAction } from "../core/states.ts";
import { systemClock } from "../core/time.ts";
import { pathPattern, routes } from "../http/elysia.ts";
import { hostPart } from "../http/listener.ts";
import { listenPlain } from "../http/plain-listener.ts";
import { text } from "../http/responses.ts";
import { createGuardedEdge } from "../http/server.ts";
import { createGathering } from "../kernel/batch.ts";
import { type LimitName, MAX } from "../kernel/limits.ts";
import { endsWithin } from "../kernel/wait.ts";

/** Up to the usual deadline of an upstream call. */
const UPSTREAM_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300];
/** A polled call answers within milliseconds, `Prefer: wait` within a minute, and a streamed head in its deadline. */
const HTTP_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300];
/** Blocks come every two seconds, and 15 to 20 s are waited for them. */
const SETTLEMENT_SECONDS = [0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 20, 30, 60];

/** Of an end without an error class. */
const NO_CLASS = "none";

/** @param endpoints how many nodes of the chain a facilitator has; null for a gateway */
export function createMeters(registry: Registry, endpoints: number | null): Meters {
  const registers = [registry];
  const sources: { -readonly [S in keyof GaugeSources]: GaugeSources[S] } = {};
  new Gauge({
    name: "tollgate_build_info",
    help: "1, with the version and the commit of this process.",
    labelNames: ["version", "commit"],
    registers,
  }).set({ version: VERSION, commit: COMMIT ?? "unknown" }, 1);
  registerGauges(registers, sources, endpoints === null ? null : NO_QUEUE);
  const lag = createLoopLag();
  new Gauge({
    name: "tollgate_event_loop_lag_seconds",
    help: "The longest pause of the main thread's event loop in the last 30 to 60 seconds, of this replica.",
    registers,
    collect() {
      this.set(lag.longest() / 1000);
    },
  });
  const rpcErrors = new Counter({
    name: "tollgate_rpc_errors_total",
    help: "Questions to a node of the chain without a usable answer, by its place in TOLLGATE_RPC_URLS, from 0. Facilitator.",
    labelNames: ["endpoint"],
    registers,
  });
  for (let endpoint = 0; endpoint < (endpoints ?? 0); endpoint++) rpcErrors.inc({ endpoint }, 0);
  return {
    ...createCallMeters(registers),
    ...createPaymentMeters(registers),
    rpcFailed: (endpoint) => rpcErrors.inc({ endpoint }),
    loopLate: lag.late,
    requestsTo: createRequestMeters(registers),
    gauges: (more) => void Object.assign(sources, more),
  };
}

function createCallMeters(registers: Registry[]): Pick<Meters, "accepted" | "ended" | "policyDecided"> {
  const accepted = new Counter({
    name: "tollgate_accepted_total",
    help: "New calls that were answered 202, or begun on the streaming path. Repetitions of a call are not counted.",
    registers,
  });
  const ended = new Counter({
    name: "tollgate_invocations_ended_total",
    help: "Ends of calls, each counted by the replica that recorded it.",
    labelNames: ["mode", "status", "error_class"],
    registers,
  });
  for (const mode of MODES) {
    ended.inc({ mode, status: "succeeded", error_class: NO_CLASS }, 0);
    for (const error_class of [NO_CLASS, ...ERROR_CLASSES]) ended.inc({ mode, status: "failed", error_class }, 0);
  }
  const upstream = new Histogram({
    name: "tollgate_upstream_duration_seconds",
    help: "Upstream calls of ended calls, from the first dial to the last byte, retries included.",
    buckets: UPSTREAM_SECONDS,
    registers,
  });
  const decisions = new Counter({
    name: "tollgate_policy_decisions_total",
    help: "Recorded decisions of policies.",
    labelNames: ["action"],
    registers,
  });
  for (const action of POLICY_ACTIONS) decisions.inc({ action }, 0);
  return {
    accepted: () => accepted.inc(),
    ended({ mode, status, error_class, latency_ms }: CallEnd): void {
      ended.inc({ mode, status, error_class: error_class ?? NO_CLASS });
      if (latency_ms !== null) upstream.observe(latency_ms / 1000);
    },
    policyDecided: (action: PolicyAction) => decisions.inc({ action }),
  };
}

function createPaymentMeters(registers: Registry[]): Pick<Meters, "payment" | "settlement" | "settlementTook"> {
  const payments = new Counter({
    name: "tollgate_payments_total",
    help: "Priced calls by what their payment came to before it is settled. Repetitions of a call are not counted. Gateway.",
    labelNames: ["outcome"],
    registers,
  });
  for (const outcome of PAYMENT_OUTCOMES) payments.inc({ outcome }, 0);
  const settlements = new Counter({
    name: "tollgate_settlements_total",
    help: "What settling payments came to. Gateway and facilitator each count their own side of one settlement.",
    labelNames: ["outcome"],
    registers,
  });
  for (const outcome of SETTLEMENT_OUTCOMES) settlements.inc({ outcome }, 0);
  const took = new Histogram({
    name: "tollgate_settlement_duration_seconds",
    help: "Gateway: one attempt, until the facilitator's answer. Facilitator: from the request to the block, or to the end of waiting for it.",
    buckets: SETTLEMENT_SECONDS,
    registers,
  });
  return {
    payment: (outcome: PaymentOutcome) => payments.inc({ outcome }),
    settlement: (outcome: SettlementOutcome) => settlements.inc({ outcome }),
    settlementTook: (ms) => took.observe(ms / 1000),
  };
}

function createRequestMeters(registers: Registry[]): Meters["requestsTo"] {
  const requests = new Counter({
    name: "tollgate_http_requests_total",
    help: "Answered requests by the template of their route, or other. A status without a meaning is counted as its class.",
    labelNames: ["route", "status"],
    registers,
  });
  const took = new Histogram({
    name: "tollgate_http_request_duration_seconds",
    help: "From a request's head to its answer's head.",
    labelNames: ["route"],
    buckets: HTTP_SECONDS,
    registers,
  });
  return (routes): RequestMeter => {
    const templates = createRouteTemplates(routes);
    for (const route of templates.all) took.zero({ route });
    return (path, status, ms) => {
      const route = templates.of(path);
      requests.inc({ route, status: statusLabel(status) });
      took.observe({ route }, ms / 1000);
    };
  };
}

/** What is not known now has no sample: an older value would be a lie, and a missing one can be alerted on. */
function registerGauges(registers: Registry[], sources: GaugeSources, noQueue: QueueSize | null): void {
  const queue = staleCache(async () => {
    const size = (await sources.queue?.()) ?? noQueue;
    if (size === null) throw new Error("nobody can tell yet");
    return size;
  });
  const depth: Gauge = new Gauge({
    name: "tollgate_queue_depth",
    help: "Calls that wait to be made, of the whole deployment: each replica tells the same. No sample while the database is away.",
    registers,
    collect: async () => setOrRemove(depth, (await queue())?.calls),
  });
  const age: Gauge = new Gauge({
    name: "tollgate_queue_oldest_age_seconds",
    help: "How long the oldest of them waits; 0 when none does. Of the whole deployment.",
    registers,
    collect: async () => {
      const known = await queue();
      setOrRemove(age, known === null ? undefined : known.oldestMs / 1000);
    },
  });
  new Gauge({
    name: "tollgate_running",
    help: "Calls that this replica makes now.",
    registers,
    collect() {
      this.set(sources.running?.() ?? 0);
    },
  });
  new Gauge({
    name: "tollgate_limit_used_ratio",
    help: "Which part of a bound of this process is in use, from 0 to 1. Gateway.",
    labelNames: ["limit"],
    registers,
    collect() {
      for (const [name, used] of Object.entries(sources.inUse?.() ?? {})) {
        this.set({ limit: snakeCase(name) }, used / MAX[name as LimitName]);
      }
    },
  });
  const balances = staleCache(async () => sources.balances?.() ?? []);
  const wallets: Gauge<"address"> = new Gauge({
    name: "tollgate_wallet_balance_wei",
    help: "What the wallets that pay for gas hold. No sample while no node answers. Facilitator.",
    labelNames: ["address"],
    registers,
    collect: async () => {
      const known = await balances();
      wallets.reset();
      for (const [address, wei] of known ?? []) wallets.set({ address }, Number(wei));
    },
  });
}

const snakeCase = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

/** Of a service that has none. A gateway that starts has one, and does not know it yet. */
const NO_QUEUE: QueueSize = { calls: 0, oldestMs: 0 };

function setOrRemove(gauge: Gauge, value: number | undefined): void {
  if (value === undefined) gauge.remove();
  else gauge.set(value);
}

/** Of all paths that belong to no route. */
export const OTHER_ROUTE = "other";

/** The label of a path: as many values as there are routes, whatever is asked for. */
export function createRouteTemplates(routes: readonly { readonly path: string }[]) {
  const paths = [...new Set(routes.map(({ path }) => path))];
  const exact = new Map<string, string>();
  /** Those with parameters, by how many segments their paths have; of unknown length below -1. */
  const byLength = new Map<number, { readonly pattern: RegExp; readonly template: string }[]>();
  for (const path of paths) {
    const template = path.replaceAll(/:(\w+)/g, "{$1}");
    if (template === path && !path.endsWith("*")) exact.set(path, path);
    else {
      const length = path.endsWith("*") ? -1 : slashesIn(path);
      byLength.set(length, [...(byLength.get(length) ?? []), { pattern: pathPattern(path), template }]);
    }
  }

  function among(length: number, path: string): string | undefined {
    return byLength.get(length)?.find(({ pattern }) => pattern.test(path))?.template;
  }

  return {
    all: [...paths.map((path) => path.replaceAll(/:(\w+)/g, "{$1}")), OTHER_ROUTE],
    of: (path: string): string => exact.get(path) ?? among(slashesIn(path), path) ?? among(-1, path) ?? OTHER_ROUTE,
  };
}

function slashesIn(path: string): number {
  let count = 0;
  for (let at = path.indexOf("/"); at !== -1; at = path.indexOf("/", at + 1)) count++;
  return count;
}

/** Statuses with a meaning (IANA's registry, RFC 9110). On the streaming path the upstream chooses the status. */
const ASSIGNED: readonly (readonly [from: number, to: number])[] = [
  [100, 103],
  [200, 208],
  [226, 226],
  [300, 308],
  [400, 417],
  [421, 426],
  [428, 429],
  [431, 431],
  [451, 451],
  [500, 508],
  [510, 511],
];

const LABELS = new Map(
  ASSIGNED.flatMap(([from, to]) =>
    Array.from({ length: to - from + 1 }, (_, at) => [from + at, `${from + at}`] as const),
  ),
);

export function statusLabel(status: number): string {
  return LABELS.get(status) ?? `${Math.floor(status / 100)}xx`;
}

const HALF_MS = 30_000;

/**
 * The longest pause of an event loop lately. It does not begin again with each reader, so that several may read it.
 *
 * @param monotonic milliseconds of a clock that never goes back
 */
export function createLoopLag(monotonic: () => number = () => performance.now()) {
  let [before, longest] = [0, 0];
  let halfEndsAt = monotonic() + HALF_MS;

  function move(): void {
    const now = monotonic();
    if (now < halfEndsAt) return;
    before = now < halfEndsAt + HALF_MS ? longest : 0;
    longest = 0;
    halfEndsAt = now + HALF_MS;
  }

  return {
    late(ms: number): void {
      move();
      longest = Math.max(longest, ms);
    },
    /** Milliseconds, of at least the last 30 seconds and at most the last 60. */
    longest(): number {
      move();
      return Math.max(before, longest);
    },
  };
}

/** At most one part in so many of the time goes into finding a value. */
const PART_OF_TIME = 20;

interface StaleValue<T> {
  readonly value: T;
  readonly until: number;
  /** For a reader who can't wait for the new value. */
  readonly usableUntil: number;
}

/**
 * Keeps a value that is dear to find out for some seconds. A later reader waits for a new value, but only for a moment; then the
 * last value serves if the finding has been slow before.
 *
 * @returns null when the value is not known now
 */
export function staleCache<T>(find: () => Promise<T>): () => Promise<T | null> {
  let known: StaleValue<T> | null = null;
  let finding: Promise<void> | null = null;

  /** Never rejects. */
  async function refresh(): Promise<void> {
    const startedAt = performance.now();
    try {
      const value = await find();
      const now = performance.now();
      const took = now - startedAt;
      const until = now + Math.max(3_000, took * PART_OF_TIME);
      // The last value is given up when finding the next one takes three times as long as the last time.
      known = { value, until, usableUntil: until + took * 3 };
    } catch {
      known = null;
    } finally {
      finding = null;
    }
  }

  return async () => {
    if (known === null || performance.now() >= known.until) {
      finding ??= refresh();
      await endsWithin(1_000, finding);
    }
    return known !== null && performance.now() < known.usableUntil ? known.value : null;
  };
}

/**
 * The usual metrics of a process. The library's own set is made for Node.js: on Bun several of its values have no meaning, and it
 * counts open descriptors by listing them, which holds the event loop when there are many.
 */
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

interface MetricsListenerOptions {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  /** The nodes of the chain that a facilitator has; null for a gateway. */
  readonly endpoints: number | null;
  readonly log: Log;
}

/**
 * Opens a port of its own with GET /metrics and nothing else. What several ask for at once is written once.
 *
 * @throws StartupProblem when the port is taken
 */
export async function startMetrics({ host, port, endpoints, log }: MetricsListenerOptions): Promise<Meters> {
  const registry = new Registry();
  const meters = createMeters(registry, endpoints);
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
