// One attempt to settle a recorded payment: the request to the facilitator, a look at the chain if needed, and the record of
// the outcome, with the call's state, in one write. A failure anywhere leaves the payment open and leased for another try.
import type { Log, LogFields } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import { formatDateTime, type TimeBounds } from "../../core/time.ts";
import type { NewSpan, Span, Tracer } from "../../core/tracing.ts";
import { MAX } from "../../kernel/limits.ts";
import { withDeadline } from "../../kernel/wait.ts";
import { unavailable, untilStored } from "../../storage/failures.ts";
import type { StoreTools, Tx } from "../../storage/store.ts";
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
import type { SettlementVerdict, SettleOutcome } from "./outcome.ts";
import { askedMs, isUnsent, needsLook, outcomeBy, pauseAfter, settledRecord, verdictOf } from "./outcome.ts";
import type { OpenPayment } from "./store.ts";
import { closeCollected, closeRefused, confirmPayment, isConfirming, markSending, postpone } from "./store.ts";

/** Nodes are asked until so long after an authorization expires: a minute longer than their blocks need for a proof. */
const ASKED_SECONDS = PROOF_SECONDS + 60;
/** Longest pause between tries to store the outcome, since a caller may be waiting for it. */
const STORE_PAUSE_MS_MAX = 1_000;

export interface AttemptOptions extends StoreTools {
  readonly network: Network;
  /** Decides whether an authorization has expired. Expiry is final, so this time must never be ahead. */
  readonly time: Pick<TimeBounds, "earliest">;
  readonly meters: Pick<Meters, "settlement" | "settlementTook">;
  readonly client: FacilitatorClient;
  /** Left out where the gateway has no nodes. */
  readonly look?: ChainLook | undefined;
  /** Left out where traces are off. */
  readonly traces?: {
    readonly tracer: Tracer;
    /** The trace headers with which a call was accepted; null for a call that has ended. */
    callHeaders(key: InvocationKey): Promise<NewSpan["parent"]>;
  } | null;
  /** Called with the agent of a call that is paid for and may be made now. */
  paid(tenant: string, agentId: string): void;
}

/**
 * Makes one attempt, and resolves when its outcome is recorded, with whether the facilitator answered in time. Null when it got no
 * request: a delay on the tenant's own side, such as a slow secrets store, says nothing about a facilitator that others use too.
 * @param stop aborts the attempt, with its outcome unknown
 * @throws Fault `unavailable` when the attempt was aborted and the store does not take the outcome
 */
export async function attemptSettlement(options: AttemptOptions, open: OpenPayment, stop: AbortSignal) {
  if (isConfirming(open)) return confirm(options, open, stop);
  const { network, store, clock, time, log, meters, client } = options;
  const authorization = authorizationOf(open);
  const expected = expectedOf(network, authorization);
  const askedAt = time.earliest();
  const mark = () => store.write((tx) => markSending(tx, open, clock.now()));
  const span = await beginAttemptSpan(options, open);
  const startedAt = performance.now();
  const answer = await client.settle({ ...open, expected, span, markSending: mark }, stop);
  const onChain = needsLook(answer, open, askedAt) ? await options.look?.(authorization) : undefined;
  const outcome = outcomeBy(answer, onChain, open);
  meters.settlementTook(performance.now() - startedAt);
  span?.end({ outcome: outcome.kind, ...(outcome.kind !== "collected" && { errorType: outcome.kind }) });
  const now = clock.now();
  // Judged by the time of the request, since the answer may have taken long.
  const verdict = verdictOf(outcome, { ...open, asked_ms: askedMs(open, now) }, askedAt);
  const next = {
    now,
    outcome: outcome.kind,
    at: now + pauseAfter(open.attempts, Math.random()),
    finalInMs: options.look === undefined ? null : MAX.settlementFinalMs,
    amount: expected.amount,
  };
  // Wait for a store that is away. Settling again would be worse: many facilitators then decline what they have collected.
  const { isPaid, isClosed } = await untilStored(
    () => store.write((tx) => record(tx, open, verdict, next)),
    () => stop.aborted,
    STORE_PAUSE_MS_MAX,
  );
  // Of two replicas that learn the same outcome, the one that closes the payment counts it.
  const shownAs = shownVerdict(verdict, isUnsent(outcome));
  if (isClosed || verdict.kind === "open") meters.settlement(shownAs);
  const why = outcome.kind === "collected" ? { transaction: outcome.transaction } : { why: outcome.why };
  LOG_VERDICT[shownAs](log, { ...paymentLogFields(open), attempts: open.attempts, outcome: outcome.kind, ...why });
  if (isPaid) options.paid(open.tenant, open.agent_id);
  return wasHeard(answer);
}

const wasHeard = (answer: SettleOutcome) => (answer.kind === "unsent" ? null : !("isSilent" in answer));

/** Confirms a transaction that a reorganisation may change, by the nodes, or by the facilitator, which repeats its answer. */
async function confirm(options: AttemptOptions, open: OpenPayment, stop: AbortSignal): Promise<boolean | null> {
  const { network, store, clock, log, client, look } = options;
  const key = { tenant: open.tenant, id: open.invocation_id };
  const settlement = JSON.parse((await invocationByKey(store.read, key))?.settlement ?? "{}") as { tx_hash?: Hex };
  const { tx_hash: before } = settlement;
  const authorization = authorizationOf(open);
  const ask = { ...open, expected: expectedOf(network, authorization), span: null, markSending: async () => true };
  const outcome = look ? await look(authorization, before) : await client.settle(ask, stop);
  const heard = look || outcome === null ? null : wasHeard(outcome);
  const now = clock.now();
  const finalAt = open.final_at ?? now;
  const isCollected = outcome?.kind === "collected";
  const transaction = isCollected ? outcome.transaction : before;
  const changed = transaction === before ? null : JSON.stringify({ ...settlement, tx_hash: transaction });
  // A receipt that is requested early shows what is known by then, and the record may be corrected once more.
  const isEarly = now < finalAt;
  const isDeclined = outcome?.kind === "declined" && outcome.definite && outcome.mayHaveLanded !== true;
  // A node can prove that nothing was collected only once the authorization has expired.
  const knownAt = look ? (open.valid_before + ASKED_SECONDS) * 1000 : 0;
  const isOver = isCollected || isDeclined || now >= Math.max(finalAt + MAX.settlementConfirmMs, knownAt);
  const isLast = isOver && !isEarly;
  const nextAt = isEarly ? finalAt : now + pauseAfter(2, Math.random());
  const isDone = await store.write(async (tx) => {
    const isUpdated = await confirmPayment(tx, open, now, isLast ? null : nextAt);
    if (!isUpdated || !isOver) return false;
    if (!isDeclined) await confirmSettlement(tx, key, changed, now);
    else if (isLast) await denyReceipt(tx, key);
    return isLast || isCollected;
  });
  if (!isDone) return heard;
  if (!isCollected) log.error("settlement_not_confirmed", { ...paymentLogFields(open), transaction });
  else if (changed !== null) log.info("settlement_moved", { ...paymentLogFields(open), transaction, before });
  return heard;
}

/** The result of an attempt, as the metrics name it. */
function shownVerdict(verdict: SettlementVerdict, wasUnsent: boolean) {
  if (verdict.kind === "settled") return "settled";
  if (verdict.kind === "open") return wasUnsent ? "unsent" : "unknown";
  return verdict.reason === "unknown" ? "given_up" : verdict.reason;
}

const LOG_VERDICT: Record<ReturnType<typeof shownVerdict>, (log: Log, fields: LogFields) => void> = {
  settled: (log, fields) => log.info("payment_settled", fields),
  unsent: (log, fields) => log.warn("settlement_unknown", fields),
  unknown: (log, fields) => log.warn("settlement_unknown", fields),
  declined: (log, fields) => log.info("payment_declined", fields),
  expired: (log, fields) => log.info("payment_expired_unsent", fields),
  given_up: (log, fields) => log.error("settlement_given_up", fields),
};

/** The span joins the trace of its call. If the call's headers can't be read, the span begins a trace of its own. */
async function beginAttemptSpan({ traces = null }: AttemptOptions, open: OpenPayment): Promise<Span | null> {
  if (traces === null) return null;
  const { tenant, agent_id: agentId, invocation_id: invocationId, attempts: attempt, facilitator_url } = open;
  const reading = traces.callHeaders({ tenant, id: invocationId });
  // An attempt waits at most this long for the trace that it belongs to.
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

export function paymentLogFields({ tenant, agent_id, invocation_id }: OpenPayment) {
  return { tenant, agent_id, invocation_id };
}

/** Trusts the form of the stored settle request, which x402/codec.ts wrote. */
function authorizationOf({ settle_request }: OpenPayment): Authorization {
  const { paymentPayload } = JSON.parse(settle_request) as ReturnType<typeof settleRequestJson>;
  const { value, validAfter, validBefore, ...rest } = paymentPayload.payload.authorization;
  return { ...rest, value: BigInt(value), validAfter: BigInt(validAfter), validBefore: BigInt(validBefore) };
}

const expectedOf = (network: Network, { from, value }: Authorization) => ({ network, payer: from, amount: value });

/**
 * Records the outcome. @returns `isPaid`: the call may be made now, by this write or by one whose answer was lost (reporting
 *   that twice does no harm); `isClosed`: this write closed the payment
 */
async function record(
  tx: Tx,
  open: OpenPayment,
  verdict: SettlementVerdict,
  next: Parameters<typeof postpone>[2] & { readonly finalInMs: number | null; readonly amount: bigint },
) {
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
  // At `repeatable read`, a call that is just moving to the ended ones is in neither table. The write is repeated.
  if (isClosed && call === null) throw unavailable(new Error("the call of a payment is not visible"));
  return { isPaid: call?.settlement_status === "settled", isClosed };
}
