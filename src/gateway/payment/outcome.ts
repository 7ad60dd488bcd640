// Interprets a facilitator's answer to `/settle`, and decides what becomes of the payment. Pure. One rule governs both: an
// unknown outcome is never reported as a failure, since the money may have moved or may still move.
import type { JsonAnswer } from "../../http/client/outbound.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex } from "../../x402/types.ts";

export type SettleOutcome =
  | {
      readonly kind: "collected";
      readonly transaction: Hex;
      /** Smallest units; null when the facilitator states none, or an impossible one. */
      readonly fee: bigint | null;
      /** How long a reorganisation may still change the transaction. Left out where the facilitator does not say. */
      readonly finalInMs?: number;
    }
  | {
      readonly kind: "declined";
      /** The answer is about the payment and not about this request, so it holds for earlier attempts too. */
      readonly definite: boolean;
      /** The answer would be the same if an earlier attempt had collected the payment. */
      readonly mayHaveLanded?: boolean;
      /** Proven by the chain: the authorization can't be used any more, even before its expiry. */
      readonly isFinal?: true;
      readonly why: string;
    }
  /**
   * `deferred`: the facilitator asks to try later, and did nothing in this attempt. `unsent`: certainly no byte of the
   * payment left the gateway in this attempt. `isInDoubt`: the chain was asked and shows no result yet.
   */
  | { readonly kind: "deferred" | "unsent"; readonly why: string; readonly isInDoubt?: true }
  // `why` is for the log, and never the facilitator's text. `isPending`: the facilitator reports the payment as pending.
  // `isSilent`: the facilitator got the payment, and did not answer in time.
  | { readonly kind: "unknown"; readonly why: string; readonly isPending?: true; readonly isSilent?: true };

export interface Expected {
  readonly network: Network;
  /** Lower case. */
  readonly payer: Hex;
  readonly amount: bigint;
}

type AnswerBody = Readonly<Record<string, unknown>>;

const TRANSACTION = /^0x[0-9a-fA-F]{64}$/;
const DIGITS = /^[0-9]{1,78}$/;

const unknown = (why: string): SettleOutcome => ({ kind: "unknown", why });

/** Statuses that decline a first attempt, each with its usual reasons. They say nothing about earlier attempts. */
const REFUSALS: ReadonlyMap<number, string> = new Map([
  [400, "usually because it is not a facilitator, or takes other requests"],
  [403, "usually because the tenant's certificate belongs to no account that is enabled"],
  [429, "usually because the amount is above a limit of the account, or below the facilitator's minimum"],
]);

/** An `errorReason`, in any letter case, that means: the transfer has been broadcast. */
const PENDING = /pending/i;
/** An `errorReason`, in any letter case, that means: the authorization is used, perhaps by an earlier attempt. */
const USED = /already_used|invalid_transaction_state|duplicate/i;

/**
 * The one list of final answers: a failure without a transaction, and REFUSALS. If an earlier attempt is in doubt, the failure
 * is final only after the expiry, and REFUSALS never (see verdictOf). Never final: a pending transfer, and a 429 to be retried.
 */
export function outcomeOf({ status, body, retryAfter, finalAfter }: JsonAnswer, expected: Expected): SettleOutcome {
  const isObject = typeof body === "object" && body !== null;
  const answer = isObject ? (body as AnswerBody) : {};
  if (status === 200 && answer["success"] === true) return collected(answer, expected, finalAfter);
  const { transaction, errorReason } = answer;
  const reason = typeof errorReason === "string" ? errorReason : "";
  if (PENDING.test(reason)) return { kind: "unknown", isPending: true, why: "the facilitator says that it is pending" };
  if (!isAbsent(transaction) && transaction !== "") return unknown("a failure that names a transaction");
  const mayHaveLanded = USED.test(reason);
  if (status === 429 && retryAfter !== undefined) return { kind: "deferred", why: "answered 429, to ask again later" };
  const usual = REFUSALS.get(status);
  if (usual !== undefined) {
    return { kind: "declined", definite: false, mayHaveLanded, why: `answered ${status}, ${usual}` };
  }
  if (status !== 200) return unknown(`answered ${status}`);
  if (!isObject) return unknown("the answer is no JSON object");
  if (answer["success"] !== false) return unknown("the answer does not say whether it succeeded");
  return { kind: "declined", definite: true, mayHaveLanded, why: "the facilitator could not collect it" };
}

/** The time until finality that the facilitator states. It is bounded, since tenants choose their facilitators. */
function finality(seconds: string | undefined): { readonly finalInMs?: number } {
  if (seconds === undefined || !/^[0-9]{1,6}$/.test(seconds)) return {};
  return { finalInMs: Math.min(Number(seconds) * 1000, PAUSE_MS_MAX) };
}

function collected(answer: AnswerBody, { network: ours, payer, amount }: Expected, finalAfter?: string): SettleOutcome {
  const { transaction, network, facilitatorFee } = answer;
  if (typeof transaction !== "string" || !TRANSACTION.test(transaction)) {
    return unknown("a success without a transaction hash");
  }
  if (!isAbsent(network) && network !== ours.name && network !== ours.caip2) {
    return unknown("a success on another network");
  }
  const named = answer["payer"];
  if (!isAbsent(named) && (typeof named !== "string" || named.toLowerCase() !== payer)) {
    return unknown("a success of another payer");
  }
  const fee = typeof facilitatorFee === "string" && DIGITS.test(facilitatorFee) ? BigInt(facilitatorFee) : null;
  return {
    kind: "collected",
    transaction: transaction.toLowerCase() as Hex,
    fee: fee !== null && fee <= amount ? fee : null,
    ...finality(finalAfter),
  };
}

const isAbsent = (value: unknown): boolean => value === undefined || value === null;

export type SettlementVerdict =
  | ({ readonly kind: "settled" } & Omit<Extract<SettleOutcome, { kind: "collected" }>, "kind">)
  /** `reason` is shown to the tenant. */
  | { readonly kind: "refused"; readonly reason: "declined" | "expired" | "unknown" }
  | { readonly kind: "open" };

export interface SettlementWindow {
  /** Unix seconds. */
  readonly valid_before: number;
  /** Null when no earlier attempt can have sent anything. */
  readonly sent_at: number | null;
  /** Null when no earlier attempt can have reached the facilitator. */
  readonly unknown_since: number | null;
  /** Milliseconds of asking (see askedMs), with this attempt. Above 0 once the facilitator has, or may have, the payment. */
  readonly asked_ms: number;
}

/**
 * How long we have asked the facilitator about a payment in doubt or expired. Downtime or a clock jump counts 10 minutes at most.
 * @param now milliseconds, as `updated_at` is
 */
export function askedMs(
  { asked_ms, unknown_since, valid_before, updated_at }: Omit<SettlementWindow, "sent_at"> & { updated_at: number },
  now: number,
): number {
  if (unknown_since === null && (asked_ms === 0 || now < valid_before * 1000)) return asked_ms;
  // While the gateway runs, attempts are closer together, unless very many payments wait for one facilitator.
  return asked_ms + Math.min(Math.max(now - updated_at, 0), 600_000);
}

/** Decides what becomes of a payment after an attempt. @param askedAt milliseconds, by a clock that is never ahead */
export function verdictOf(outcome: SettleOutcome, window: SettlementWindow, askedAt: number): SettlementVerdict {
  if (outcome.kind === "collected") return { ...outcome, kind: "settled" };
  const { unknown_since, valid_before, sent_at } = window;
  // A transaction of an earlier attempt can land until the expiry by the chain's time, which may be behind ours.
  const isExpired = askedAt >= valid_before * 1000 + 4_000;
  const isInDoubt = isUnsent(outcome) && outcome.isInDoubt === true;
  if (isUnsent(outcome) && sent_at === null && isExpired && !isInDoubt) return { kind: "refused", reason: "expired" };
  const isCertain = unknown_since === null || (isDecline(outcome) && isExpired);
  if (outcome.kind === "declined" && (isCertain || outcome.isFinal)) return { kind: "refused", reason: "declined" };
  // A facilitator that never gives a certain answer is asked for a day.
  const isGivenUp = (unknown_since !== null || isInDoubt) && window.asked_ms >= 24 * 3_600_000;
  return isGivenUp ? { kind: "refused", reason: "unknown" } : { kind: "open" };
}

/** Whether to look at the chain: the payment seems to have landed, or expired after the facilitator had received it. */
export function needsLook(outcome: SettleOutcome, window: SettlementWindow, askedAt: number): boolean {
  const { unknown_since, valid_before, asked_ms } = window;
  if (outcome.kind === "unknown" && outcome.isPending) return true;
  if (outcome.kind === "collected") return false;
  const isOver = askedAt >= valid_before * 1000;
  if (unknown_since === null)
    return isOver && (outcome.kind === "deferred" || (outcome.kind === "unsent" && asked_ms > 0));
  return isOver || (outcome.kind === "declined" && outcome.mayHaveLanded === true);
}

/**
 * Combines the facilitator's answer with the result of the look at the chain. A payment that was only ever deferred ends when
 * it expires, unless the chain shows a use. While the chain shows no result, a payment ends only by giving up (verdictOf).
 * @param onChain null when the chain shows no result yet; undefined when it was not asked
 */
export function outcomeBy(
  answer: SettleOutcome,
  onChain: SettleOutcome | null | undefined,
  { sent_at }: Pick<SettlementWindow, "sent_at">,
): SettleOutcome {
  if (isUnsent(answer) && sent_at === null) {
    if (onChain === null) return { ...answer, isInDoubt: true };
    return onChain?.kind === "collected" ? onChain : answer;
  }
  // The facilitator left an earlier attempt in doubt, so its answer alone does not end the payment while nodes are asked.
  if (onChain === null && answer.kind === "declined") return unknown("declined, and the chain shows no result yet");
  return onChain ?? answer;
}

/** Whether this attempt can't have moved money: it sent nothing, or the facilitator put it off and did nothing. */
export function isUnsent(outcome: SettleOutcome): outcome is Extract<SettleOutcome, { kind: "deferred" | "unsent" }> {
  return outcome.kind === "unsent" || outcome.kind === "deferred";
}

/** Whether the outcome excludes that any attempt, including earlier ones, has collected the payment or will. */
const isDecline = (outcome: SettleOutcome): boolean =>
  outcome.kind === "declined" && outcome.definite && !outcome.mayHaveLanded;

export const PAUSE_MS_MAX = 60_000;

/** Milliseconds until the next attempt: exponential backoff. @param random jitter, 0 to 1, which spreads many payments */
export function pauseAfter(attempts: number, random: number): number {
  const pause = Math.min(1_000 * 2 ** Math.min(attempts - 1, 16), PAUSE_MS_MAX);
  return Math.round(pause * (0.5 + random / 2));
}

interface Settled extends Pick<Extract<SettleOutcome, { kind: "collected" }>, "transaction" | "fee"> {
  readonly attempts: number;
  readonly amount: bigint;
  /** RFC 3339. */
  readonly settled_at: string;
}

/** The settlement sub-record of a collected payment without its status, as JSON. */
export function settledRecord({ attempts, amount, transaction, fee, settled_at }: Settled): string {
  return JSON.stringify({
    tx_hash: transaction,
    settled_amount: amount.toString(),
    operator_amount: (amount - (fee ?? 0n)).toString(),
    ...(fee !== null && { facilitator_fee: fee.toString() }),
    attempts,
    settled_at,
  });
}
