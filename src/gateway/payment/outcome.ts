// What a facilitator's answer to `/settle` means, and what becomes of the payment. Pure. The rule behind both:
// unknown is never reported as failed, for the money may have moved or may still move.
import { NETWORK, NETWORK_CAIP2 } from "../../x402/kind.ts";
import type { Hex } from "../../x402/types.ts";

export type SettleOutcome =
  | {
      readonly kind: "collected";
      readonly transaction: Hex;
      /** Smallest units; null when the facilitator names none, or none that can be. */
      readonly fee: bigint | null;
    }
  | {
      readonly kind: "declined";
      /** The facilitator judged this very payment; otherwise it only would not deal with us now. */
      readonly definite: boolean;
      readonly why: string;
    }
  /** `why` is for the log, in our own words. */
  | { readonly kind: "unknown"; readonly why: string };

export interface Expected {
  /** Lower case. */
  readonly payer: Hex;
  readonly amount: bigint;
}

const TRANSACTION = /^0x[0-9a-fA-F]{64}$/;
const DIGITS = /^[0-9]{1,78}$/;

function unknown(why: string): SettleOutcome {
  return { kind: "unknown", why };
}

/** @param body the parsed answer; undefined when it is no JSON */
export function outcomeOf(status: number, body: unknown, expected: Expected): SettleOutcome {
  if (status === 400) return { kind: "declined", definite: true, why: "answered 400" };
  if (status === 403 || status === 429) {
    return { kind: "declined", definite: false, why: `answered ${status}` };
  }
  if (status !== 200) return unknown(`answered ${status}`);
  if (typeof body !== "object" || body === null) return unknown("the answer is no JSON object");
  const answer = body as Readonly<Record<string, unknown>>;
  if (answer["success"] === true) return collected(answer, expected);
  if (answer["success"] !== false) return unknown("the answer does not say whether it succeeded");
  const { transaction } = answer;
  if (transaction !== undefined && transaction !== null && transaction !== "") {
    return unknown("a failure that names a transaction");
  }
  return { kind: "declined", definite: true, why: "the facilitator could not collect it" };
}

function collected(answer: Readonly<Record<string, unknown>>, { payer, amount }: Expected): SettleOutcome {
  const { transaction, network, facilitatorFee } = answer;
  if (typeof transaction !== "string" || !TRANSACTION.test(transaction)) {
    return unknown("a success without a transaction hash");
  }
  if (!isAbsent(network) && network !== NETWORK && network !== NETWORK_CAIP2) {
    return unknown("a success on another network");
  }
  const named = answer["payer"];
  if (!isAbsent(named) && (typeof named !== "string" || named.toLowerCase() !== payer)) {
    return unknown("a success of another payer");
  }
  const fee =
    typeof facilitatorFee === "string" && DIGITS.test(facilitatorFee) ? BigInt(facilitatorFee) : null;
  return {
    kind: "collected",
    transaction: transaction.toLowerCase() as Hex,
    fee: fee !== null && fee <= amount ? fee : null,
  };
}

function isAbsent(value: unknown): boolean {
  return value === undefined || value === null;
}

/** How long after its outcome became unknown a payment is given up, when no facilitator tells. */
const GIVEN_UP_AFTER_MS = 24 * 3_600_000;
/** The chain's time may lie behind ours. */
const CHAIN_TIME_MARGIN_MS = 4_000;

export type Verdict =
  | { readonly kind: "settled"; readonly transaction: Hex; readonly fee: bigint | null }
  /** `reason` is shown to the tenant. */
  | { readonly kind: "refused"; readonly reason: "declined" | "unknown" }
  | { readonly kind: "open" };

export interface Course {
  /** Unix seconds. */
  readonly valid_before: number;
  /** Null for the first attempt, when no earlier one can have reached the facilitator. */
  readonly unknown_since: number | null;
}

/** What becomes of a payment after an attempt. @param askedAt when the facilitator was asked, in milliseconds */
export function verdictOf(outcome: SettleOutcome, course: Course, askedAt: number): Verdict {
  if (outcome.kind === "collected") {
    return { kind: "settled", transaction: outcome.transaction, fee: outcome.fee };
  }
  const { unknown_since, valid_before } = course;
  if (unknown_since === null) {
    return outcome.kind === "declined" ? { kind: "refused", reason: "declined" } : { kind: "open" };
  }
  // An earlier attempt may have left a transaction behind, which can land until the authorization expires.
  const expired = askedAt >= valid_before * 1000 + CHAIN_TIME_MARGIN_MS;
  if (outcome.kind === "declined" && outcome.definite && expired) {
    return { kind: "refused", reason: "declined" };
  }
  if (askedAt - unknown_since >= GIVEN_UP_AFTER_MS) return { kind: "refused", reason: "unknown" };
  return { kind: "open" };
}

const PAUSE_MS_FIRST = 1_000;
const PAUSE_MS_MOST = 60_000;

/** Milliseconds until the next attempt. @param random 0 to 1, so that many payments do not come back as one */
export function pauseAfter(attempts: number, random: number): number {
  const whole = Math.min(PAUSE_MS_FIRST * 2 ** Math.min(attempts - 1, 16), PAUSE_MS_MOST);
  return Math.round(whole * (0.5 + random / 2));
}

export interface Settled {
  readonly attempts: number;
  readonly amount: bigint;
  readonly transaction: Hex;
  readonly fee: bigint | null;
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
