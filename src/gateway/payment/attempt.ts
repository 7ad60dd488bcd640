// One attempt to settle a recorded payment, from the request to the record of its outcome. The outcome, the state of
// the call and its totals are one write. Any failure on the way leaves the payment open, and leased.
import type { Log, LogFields } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import type { Clock, TimeBounds } from "../../core/time.ts";
import { formatDateTime } from "../../core/time.ts";
import type { NewSpan, Span, Tracer } from "../../core/tracing.ts";
import { MAX } from "../../kernel/limits.ts";
import { withDeadline } from "../../kernel/wait.ts";
import { unavailable, untilStored } from "../../storage/failures.ts";
import type { Store, Tx } from "../../storage/store.ts";
import type { settleRequestJson } from "../../x402/codec.ts";
import type { Network } from "../../x402/network.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import {
  collectSettlement,
  confirmSettlement,
  denyReceipt,
  type InvocationKey,
  invocationByKey,
  noteSettlement,
  refuseSettlement,
} from "../invocations/service.ts";
import { type ChainLook, PROOF_SECONDS } from "./chain-look.ts";
import type { FacilitatorClient } from "./facilitator-client.ts";
import {
  askedMs,
  isUnsent,
  needsLook,
  outcomeBy,
  pauseAfter,
  type SettlementVerdict,
  settledRecord,
  verdictOf,
} from "./outcome.ts";
import {
  closeCollected,
  closeRefused,
  confirmPayment,
  isConfirming,
  mayLeave,
  type OpenPayment,
  postpone,
} from "./store.ts";

/** After the time of an authorization, until nodes are asked no more: a minute more than their blocks need to prove anything. */
const ASKED_SECONDS = PROOF_SECONDS + 60;
/** Longest pause between tries to store the outcome, since a caller may be waiting for it. */
const STORE_PAUSE_MS_MOST = 1_000;

export interface AttemptOptions {
  readonly network: Network;
  readonly store: Store;
  readonly clock: Clock;
  /** For the expiry of authorizations: an expired one counts as final, so the time must not be ahead. */
  readonly time: Pick<TimeBounds, "earliest">;
  readonly log: Log;
  readonly meters: Pick<Meters, "settlement" | "settlementTook">;
  readonly client: FacilitatorClient;
  /** Left out where the gateway has no nodes. */
  readonly look?: ChainLook | undefined;
  /** Left out where traces are off. */
  readonly traces?: {
    readonly tracer: Tracer;
    /** The headers that a call was accepted with; null for one that has ended. */
    callHeaders(key: InvocationKey): Promise<NewSpan["parent"]>;
  } | null;
  /** Called with an agent whose call has been paid for and may be made now. */
  paid(tenant: string, agentId: string): void;
}

/**
 * Tries once, and resolves when the outcome is recorded.
 *
 * @param stop breaks the attempt off, its outcome unknown
 * @throws Fault `unavailable` when it has been broken off and the store does not take the outcome
 */
export async function attemptSettlement(options: AttemptOptions, open: OpenPayment, stop: AbortSignal): Promise<void> {
  if (isConfirming(open)) return confirm(options, open, stop);
  const { network, store, clock, time, log, meters, client } = options;
  const authorization = authorizationOf(open);
  const expected = expectedOf(network, authorization);
  const askedAt = time.earliest();
  const mark = () => store.write((tx) => mayLeave(tx, open, clock.now()));
  const span = await beginAttemptSpan(options, open);
  const startedAt = performance.now();
  const told = await client.settle({ ...open, expected, span, mayLeave: mark }, stop);
  const found = needsLook(told, open, askedAt) ? await options.look?.(authorization) : undefined;
  const outcome = outcomeBy(told, found, open);
  meters.settlementTook(performance.now() - startedAt);
  span?.end({ outcome: outcome.kind, ...(outcome.kind !== "collected" && { errorType: outcome.kind }) });
  const now = clock.now();
  // Judged by the time of the request, since the answer may have been on its way for long.
  const verdict = verdictOf(outcome, { ...open, asked_ms: askedMs(open, now) }, askedAt);
  const next = {
    now,
    outcome: outcome.kind,
    at: now + pauseAfter(open.attempts, Math.random()),
    finalInMs: options.look === undefined ? null : MAX.settlementFinalMs,
    amount: expected.amount,
  };
  // Wait for a store that is away. Asking again instead is worse: many facilitators answer that they can't collect a
  // payment which they themselves have collected.
  const { isPaid, isClosed } = await untilStored(
    () => store.write((tx) => record(tx, open, verdict, next)),
    () => stop.aborted,
    STORE_PAUSE_MS_MOST,
  );
  // Of two replicas that learn the same outcome, the one that closes the payment counts it.
  const shownAs = shownVerdict(verdict, isUnsent(outcome));
  if (isClosed || verdict.kind === "open") meters.settlement(shownAs);
  const why = outcome.kind === "collected" ? { transaction: outcome.transaction } : { why: outcome.why };
  TELL[shownAs](log, { ...shown(open), attempts: open.attempts, outcome: outcome.kind, ...why });
  if (isPaid) options.paid(open.tenant, open.agent_id);
}

/**
 * Asks by which transaction a collected payment has been collected in the end, since a reorganisation may have changed it:
 * the nodes, or where there are none the facilitator, which answers once more what it has answered before.
 */
async function confirm(options: AttemptOptions, open: OpenPayment, stop: AbortSignal): Promise<void> {
  const { network, store, clock, log, client, look } = options;
  const key = { tenant: open.tenant, id: open.invocation_id };
  const settlement = JSON.parse((await invocationByKey(store.read, key))?.settlement ?? "{}") as { tx_hash?: Hex };
  const { tx_hash: before } = settlement;
  const authorization = authorizationOf(open);
  const ask = { ...open, expected: expectedOf(network, authorization), span: null, mayLeave: async () => true };
  const outcome = look ? await look(authorization, before) : await client.settle(ask, stop);
  const now = clock.now();
  const finalAt = open.final_at ?? now;
  const isCollected = outcome?.kind === "collected";
  const transaction = isCollected ? outcome.transaction : before;
  const changed = transaction === before ? null : JSON.stringify({ ...settlement, tx_hash: transaction });
  // Who asks for a receipt early gets what is known by then, and the record may be corrected once more.
  const isEarly = now < finalAt;
  const isDeclined = outcome?.kind === "declined" && outcome.definite && outcome.mayHaveLanded !== true;
  // A node can prove that nothing was collected only once the authorization has expired.
  const knownAt = look ? (open.valid_before + ASKED_SECONDS) * 1000 : 0;
  const isOver = isCollected || isDeclined || now >= Math.max(finalAt + MAX.settlementConfirmMs, knownAt);
  const isLast = isOver && !isEarly;
  const nextAt = isEarly ? finalAt : now + pauseAfter(2, Math.random());
  const isDone = await store.write(async (tx) => {
    const isOwn = await confirmPayment(tx, open, now, isLast ? null : nextAt);
    if (!isOwn || !isOver) return false;
    if (!isDeclined) await confirmSettlement(tx, key, changed, now);
    else if (isLast) await denyReceipt(tx, key);
    return isLast || isCollected;
  });
  if (!isDone) return;
  if (!isCollected) log.error("settlement_not_confirmed", { ...shown(open), transaction });
  else if (changed !== null) log.info("settlement_moved", { ...shown(open), transaction, before });
}

/** What came of an attempt, as the metrics name it. */
function shownVerdict(verdict: SettlementVerdict, wasUnsent: boolean) {
  if (verdict.kind === "settled") return "settled";
  if (verdict.kind === "open") return wasUnsent ? "unsent" : "unknown";
  return verdict.reason === "unknown" ? "given_up" : verdict.reason;
}

const TELL: Record<ReturnType<typeof shownVerdict>, (log: Log, fields: LogFields) => void> = {
  settled: (log, fields) => log.info("payment_settled", fields),
  unsent: (log, fields) => log.warn("settlement_unknown", fields),
  unknown: (log, fields) => log.warn("settlement_unknown", fields),
  declined: (log, fields) => log.info("payment_declined", fields),
  expired: (log, fields) => log.info("payment_expired_unsent", fields),
  given_up: (log, fields) => log.error("settlement_given_up", fields),
};

/** The span is a part of the trace of its call. If the headers of the call can't be read, the span begins a trace. */
async function beginAttemptSpan({ traces = null }: AttemptOptions, open: OpenPayment): Promise<Span | null> {
  if (traces === null) return null;
  const { tenant, agent_id: agentId, invocation_id: invocationId, attempts: attempt, facilitator_url } = open;
  const reading = traces.callHeaders({ tenant, id: invocationId });
  // An attempt waits so long to learn what trace it is a part of.
  const parent = await withDeadline(1_000, reading, () => null).catch(() => null);
  const host = URL.parse(facilitator_url)?.hostname;
  return traces.tracer.begin({
    kind: "client",
    name: "POST /settle",
    parent,
    payer: tenant,
    fields: { method: "POST", tenant, agentId, invocationId, attempt, ...(host !== undefined && { host }) },
  });
}

/** The fields by which the log names a payment. */
export function shown({ tenant, agent_id, invocation_id }: OpenPayment) {
  return { tenant, agent_id, invocation_id };
}

/** The settle request was written by x402/codec.ts, so its form is known. */
function authorizationOf({ settle_request }: OpenPayment): Authorization {
  const { paymentPayload } = JSON.parse(settle_request) as ReturnType<typeof settleRequestJson>;
  const { value, validAfter, validBefore, ...rest } = paymentPayload.payload.authorization;
  return { ...rest, value: BigInt(value), validAfter: BigInt(validAfter), validBefore: BigInt(validBefore) };
}

const expectedOf = (network: Network, { from, value }: Authorization) => ({ network, payer: from, amount: value });

interface RecordedOutcome {
  /** The call may be made now: by this write, or by one whose answer was lost. Reporting that twice does no harm. */
  readonly isPaid: boolean;
  /** Whether the payment was open until then. */
  readonly isClosed: boolean;
}

async function record(
  tx: Tx,
  open: OpenPayment,
  verdict: SettlementVerdict,
  next: Parameters<typeof postpone>[2] & { readonly finalInMs: number | null; readonly amount: bigint },
): Promise<RecordedOutcome> {
  const { now, amount } = next;
  const { tenant, invocation_id: id, attempts } = open;
  const key = { tenant, id };
  if (verdict.kind === "open") {
    if (await postpone(tx, open, next)) await noteSettlement(tx, key, JSON.stringify({ attempts }), now);
    return { isPaid: false, isClosed: false };
  }
  let isClosed: boolean;
  if (verdict.kind === "refused") {
    isClosed = await closeRefused(tx, open, now);
    if (isClosed) await refuseSettlement(tx, key, JSON.stringify({ attempts, reason: verdict.reason }), now);
  } else {
    const finalInMs = verdict.finalInMs ?? next.finalInMs;
    const settled = settledRecord({ ...verdict, attempts, amount, settled_at: formatDateTime(now) });
    isClosed = await closeCollected(tx, open, now, finalInMs);
    if (isClosed) await collectSettlement(tx, key, settled, now, finalInMs === null);
  }
  const call = await invocationByKey(tx, key);
  // A call that is just being moved to where it outlives its time is in neither place at `repeatable read`. The write is
  // undone, and tried again.
  if (isClosed && call === null) throw unavailable(new Error("the call of a payment is not to be seen"));
  return { isPaid: call?.settlement_status === "settled", isClosed };
}
