// The metrics of both services: names, labels, buckets, and what counts them. Every name is there from the start, with
// zeros for all labels that can be listed; what only the other service counts stays so. No label says anything of a tenant.
import { Counter, Gauge, Histogram, type Registry } from "prom-client";
import type { CallEnd } from "../core/call-end.ts";
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
import { ERROR_CLASSES, MODES, POLICY_ACTIONS, type PolicyAction } from "../core/states.ts";
import { knownLately } from "./known-lately.ts";
import { createLoopLag } from "./loop-lag.ts";
import { createRouteTemplates } from "./route-templates.ts";
import { statusLabel } from "./status-label.ts";

/** Up to the usual deadline of an upstream call. */
const UPSTREAM_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300];
/** A polled call answers within milliseconds, `Prefer: wait` within a minute, and a streamed head in its deadline. */
const HTTP_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300];
/** Blocks come every two seconds, and 15 to 20 s are waited for them. */
const SETTLEMENT_SECONDS = [0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 20, 30, 60];

/** Of an end without an error class. */
const NO_CLASS = "none";

export interface MetricsOptions {
  readonly registry: Registry;
  readonly version: string;
  /** Null when nothing told it to the build. */
  readonly commit: string | null;
  /** The nodes of the chain that a facilitator has; null for a gateway. */
  readonly endpoints: number | null;
}

export function createMeters({ registry, version, commit, endpoints }: MetricsOptions): Meters {
  const registers = [registry];
  const sources: { -readonly [S in keyof GaugeSources]: GaugeSources[S] } = {};
  new Gauge({
    name: "tollgate_build_info",
    help: "1, with the version and the commit of this process.",
    labelNames: ["version", "commit"],
    registers,
  }).set({ version, commit: commit ?? "unknown" }, 1);
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
  const queue = knownLately(async () => {
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
  const balances = knownLately(async () => sources.balances?.() ?? []);
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

/** Of a service that has none. A gateway that starts has one, and does not know it yet. */
const NO_QUEUE: QueueSize = { calls: 0, oldestMs: 0 };

function setOrRemove(gauge: Gauge, value: number | undefined): void {
  if (value === undefined) gauge.remove();
  else gauge.set(value);
}
