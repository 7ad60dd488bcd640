// One attempt to settle a recorded payment, from the request to the record of its outcome. The outcome, the state of
// the call and its totals are one write. Any failure on the way leaves the payment open, and leased.
import { and, eq } from "drizzle-orm";
import type { Log } from "../../core/log.ts";
import type { Meters, SettlementOutcome } from "../../core/meters.ts";
import type { Clock, TimeBounds } from "../../core/time.ts";
import { formatDateTime } from "../../core/time.ts";
import type { NewSpan, Span, Tracer } from "../../core/tracing.ts";
import { SETTLEMENT_CONFIRM_MS_MAX, SETTLEMENT_FINAL_MS } from "../../kernel/limits.ts";
import { withDeadline } from "../../kernel/wait.ts";
import { unavailable, untilStored } from "../../storage/failures.ts";
import type { Reader, Store, Tx } from "../../storage/store.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import {
  collectSettlement,
  confirmSettlement,
  denyReceipt,
  type InvocationKey,
  type InvocationRow,
  noteSettlement,
  refuseSettlement,
} from "../invocations/service.ts";
import type { ChainLook } from "./chain-look.ts";
import type { FacilitatorClient } from "./facilitator-client.ts";
import {
  askedMs,
  isUnsent,
  needsLook,
  outcomeBy,
  pauseAfter,
  type SettlementVerdict,
  type SettleOutcome,
  settledRecord,
  verdictOf,
} from "./outcome.ts";
import {
  closeCollected,
  closeConfirmed,
  closeRefused,
  isConfirming,
  mayLeave,
  type OpenPayment,
  postpone,
  postponeConfirming,
} from "./store.ts";

/** Longest pause between tries to store the outcome, since a caller may be waiting for it. */
const STORE_PAUSE_MS_MOST = 1_000;

export interface AttemptOptions {
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
  const { store, clock, time, log, meters, client } = options;
  const askedAt = time.earliest();
  const mark = () => store.write((tx) => mayLeave(tx, open, clock.now()));
  const span = await beginAttemptSpan(options, open);
  const startedAt = performance.now();
  const told = await client.settle({ ...open, expected: expectedOf(open), span, mayLeave: mark }, stop);
  const found = needsLook(told, open, askedAt) ? await options.look?.(authorizationOf(open)) : undefined;
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
    finalInMs: options.look === undefined ? null : SETTLEMENT_FINAL_MS,
  };
  // Wait for a store that is away. Asking again instead is worse: many facilitators answer that they can't collect a
  // payment which they themselves have collected.
  const { call, isClosed } = await untilStored(
    () => store.write((tx) => record(tx, open, verdict, next)),
    () => stop.aborted,
    STORE_PAUSE_MS_MOST,
  );
  // Of two replicas that learn the same outcome, the one that closes the payment counts it.
  if (isClosed || verdict.kind === "open") meters.settlement(shownVerdict(verdict, isUnsent(outcome)));
  tell(log, open, outcome, verdict);
  if (call?.settlement_status === "settled") options.paid(open.tenant, open.agent_id);
}

/**
 * Asks by which transaction a collected payment has been collected in the end, since a reorganisation may have changed it:
 * the nodes, or where there are none the facilitator, which answers once more what it has answered before.
 */
async function confirm(options: AttemptOptions, open: OpenPayment, stop: AbortSignal): Promise<void> {
  const { store, clock, log, client, look } = options;
  const key = { tenant: open.tenant, id: open.invocation_id };
  const before = transactionIn(await outcomeBefore(store.read, key));
  const ask = { ...open, expected: expectedOf(open), span: null, mayLeave: async () => true };
  const outcome = look ? await look(authorizationOf(open), before ?? undefined) : await client.settle(ask, stop);
  const now = clock.now();
  const finalAt = open.final_at ?? now;
  const isCollected = outcome?.kind === "collected";
  const transaction = isCollected ? outcome.transaction : before;
  // Who asks for a receipt early gets what is known by then, and the record may be corrected once more.
  const isEarly = now < finalAt;
  const isOver = isCollected || outcome?.kind === "declined" || now - finalAt >= SETTLEMENT_CONFIRM_MS_MAX;
  const nextAt = isEarly ? finalAt : now + pauseAfter(2, Math.random());
  const isDone = await store.write(async (tx) => {
    const isLast = isOver && !isEarly;
    const isOwn = await (isLast ? closeConfirmed(tx, open, now) : postponeConfirming(tx, open, nextAt, now));
    if (!isOwn || !isOver) return false;
    if (outcome?.kind !== "declined") await confirmSettlement(tx, key, transaction, now);
    else if (isLast) await denyReceipt(tx, key);
    return isLast || isCollected;
  });
  if (!isDone) return;
  if (!isCollected) log.error("settlement_not_confirmed", { ...shown(open), transaction });
  else if (transaction !== before) log.info("settlement_moved", { ...shown(open), transaction, before });
}

const transactionIn = (call: InvocationRow | null) =>
  (JSON.parse(call?.settlement ?? "{}") as { readonly tx_hash?: Hex }).tx_hash ?? null;

function shownVerdict(verdict: SettlementVerdict, wasUnsent: boolean): SettlementOutcome {
  if (verdict.kind === "settled") return "settled";
  if (verdict.kind === "open") return wasUnsent ? "unsent" : "unknown";
  return verdict.reason === "unknown" ? "given_up" : verdict.reason;
}

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

function tell(log: Log, open: OpenPayment, outcome: SettleOutcome, verdict: SettlementVerdict): void {
  const why = outcome.kind === "collected" ? undefined : outcome.why;
  const fields = { ...shown(open), attempts: open.attempts, outcome: outcome.kind, why };
  if (verdict.kind === "settled") {
    log.info("payment_settled", { ...fields, transaction: verdict.transaction });
  } else if (verdict.kind === "open") {
    log.warn("settlement_unknown", fields);
  } else if (verdict.reason === "expired") {
    log.info("payment_expired_unsent", fields);
  } else if (verdict.reason === "unknown") {
    log.error("settlement_given_up", fields);
  } else {
    log.info("payment_declined", fields);
  }
}

/** The fields by which the log names a payment. */
export function shown({ tenant, agent_id, invocation_id }: OpenPayment) {
  return { tenant, agent_id, invocation_id };
}

interface StoredRequest {
  readonly paymentPayload: {
    readonly payload: {
      readonly authorization: Record<"value" | "validAfter" | "validBefore", string> &
        Pick<Authorization, "from" | "to" | "nonce">;
    };
  };
}

/** The settle request was written by x402/codec.ts, so its form is known. */
const storedAuthorization = ({ settle_request }: OpenPayment) =>
  (JSON.parse(settle_request) as StoredRequest).paymentPayload.payload.authorization;

function authorizationOf(open: OpenPayment): Authorization {
  const authorization = storedAuthorization(open);
  const { value, validAfter, validBefore } = authorization;
  return { ...authorization, value: BigInt(value), validAfter: BigInt(validAfter), validBefore: BigInt(validBefore) };
}

const expectedOf = (open: OpenPayment) => ({ payer: open.payer, amount: BigInt(storedAuthorization(open).value) });

/** The outcome may be this attempt's own, if the answer of its commit was lost. Reporting it twice does no harm. */
async function outcomeBefore({ db, tables: { invocations: t } }: Reader, key: InvocationKey) {
  const [row] = await db
    .select()
    .from(t)
    .where(and(eq(t.tenant, key.tenant), eq(t.id, key.id)));
  return row ?? null;
}

/**
 * The call, when its payment has been closed in this very write. One that can't be seen is just being moved to where it
 * outlives its time: at `repeatable read` it is in neither place. The write is undone, and tried again.
 *
 * @throws Fault `unavailable`
 */
async function seen(tx: Tx, key: InvocationKey, moved: InvocationRow | null): Promise<InvocationRow> {
  const call = moved ?? (await outcomeBefore(tx, key));
  if (call === null) throw unavailable(new Error("the call of a payment is not to be seen"));
  return call;
}

interface RecordedOutcome {
  /** The invocation after the record; null when its outcome stays open. */
  readonly call: InvocationRow | null;
  /** Whether it was open until then. */
  readonly isClosed: boolean;
}

async function record(
  tx: Tx,
  open: OpenPayment,
  verdict: SettlementVerdict,
  next: Parameters<typeof postpone>[2] & { readonly finalInMs: number | null },
): Promise<RecordedOutcome> {
  const { now } = next;
  const { tenant, invocation_id: id, attempts } = open;
  const key = { tenant, id };
  if (verdict.kind === "open") {
    if (await postpone(tx, open, next)) await noteSettlement(tx, key, JSON.stringify({ attempts }), now);
    return { call: null, isClosed: false };
  }
  if (verdict.kind === "refused") {
    if (!(await closeRefused(tx, open, now))) return { call: await outcomeBefore(tx, key), isClosed: false };
    const reason = JSON.stringify({ attempts, reason: verdict.reason });
    return { call: await seen(tx, key, await refuseSettlement(tx, key, reason, now)), isClosed: true };
  }
  const finalInMs = verdict.finalInMs ?? next.finalInMs;
  if (!(await closeCollected(tx, open, now, finalInMs))) return { call: await outcomeBefore(tx, key), isClosed: false };
  const { amount } = expectedOf(open);
  const { transaction, fee } = verdict;
  const settled = settledRecord({ attempts, amount, transaction, fee, settled_at: formatDateTime(now) });
  return {
    call: await seen(tx, key, await collectSettlement(tx, key, settled, now, finalInMs === null)),
    isClosed: true,
  };
}
