// What one `/settle` request came to: one value, whatever the protocol, which a presenter turns into an answer. Here stand
// also the outcomes that a payment's record tells, and the note of each refusal. A caller learns a coarse reason. The exact
// one goes to the log and to the operator's table, where it is only a note: a failure to store it changes no answer.
import { sql } from "drizzle-orm";
import type { TimeSpan } from "../../chain/newest-block.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { MAX } from "../../kernel/limits.ts";
import type { Store } from "../../storage/store.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import { canonicalSignature } from "../../x402/eip3009.ts";
import { type Network, SCHEME } from "../../x402/network.ts";
import type { Hex, Payment, PaymentKey, Requirements } from "../../x402/types.ts";
import { checkWindow, keyOf, type SignedBy } from "../../x402/verify.ts";
import {
  type FacilitatorAccount,
  type GuardrailProblem,
  isOfDay,
  type Limits,
  limitsOf,
  utcDay,
} from "../payments/guardrails.ts";
import type { FacilitatorPayment } from "../payments/payments.ts";

/** About a block. */
const IN_FLIGHT_RETRY_SECONDS = 2;
const UNREADY_RETRY_SECONDS = 5;
/** What holds for a day is looked at again within the hour: the limit may have been raised, or what was open has ended. */
const DAY_RETRY_SECONDS = 3600;

/**
 * `settled`: a transaction of ours has moved the money. `declined`: it is not collected; with a hash only for those who
 * present it on other terms than those on which it was, or may yet be. `pending`: it may yet be collected, by the transaction
 * with the hash if there is one to give. `over_limit`: a limit of the account is against it. `unavailable`: it can't be
 * settled now.
 */
export type CollectionOutcome = {
  /** The exact reason. No caller learns it. */
  readonly reason: string;
  /** When to ask again; null where that would change nothing, and where a hash tells more. */
  readonly retryAfterSeconds: number | null;
} & (
  | { readonly kind: "settled"; readonly hash: Hex }
  | { readonly kind: "declined" | "pending"; readonly hash: Hex | null }
  | { readonly kind: "over_limit" | "unavailable"; readonly hash: null; readonly message: string }
);

export function settledBy(hash: Hex): CollectionOutcome {
  return { kind: "settled", reason: "settled", hash, retryAfterSeconds: null };
}

/** @param hash of a transaction of ours that has moved the money, or may still; null only where there is none */
export function declined(reason: string, hash: Hex | null = null): CollectionOutcome {
  return { kind: "declined", reason, hash, retryAfterSeconds: null };
}

/** There is no hash to give, or there will be a better answer in a moment. */
export const BEING_SETTLED: CollectionOutcome = {
  kind: "pending",
  reason: "being settled",
  hash: null,
  retryAfterSeconds: IN_FLIGHT_RETRY_SECONDS,
};

/** Nothing is against the payment, but it can't be settled now. */
export function notNow(reason: string): CollectionOutcome {
  const message = "no settlement is possible now";
  return { kind: "unavailable", reason, hash: null, message, retryAfterSeconds: UNREADY_RETRY_SECONDS };
}

/** What passes by itself says when to ask again; a maximum, or another kind of payment, does not. */
export function overLimit(reason: GuardrailProblem, { limits, payment }: SettlementRequest): CollectionOutcome {
  const isNever = !isOfDay(reason) || payment.authorization.value > limits.dailyCeiling;
  const message = "the payment is outside the limits of this account";
  return { kind: "over_limit", reason, hash: null, message, retryAfterSeconds: isNever ? null : DAY_RETRY_SECONDS };
}

/** The account has all that it may have under way; the rest is for others. */
export function overShare(reason: string): CollectionOutcome {
  const message = "the account has its share of the settlements under way";
  return { kind: "over_limit", reason, hash: null, message, retryAfterSeconds: UNREADY_RETRY_SECONDS };
}

/** The payer's balance, or the account's gas, would suffice without the payments under way, which may yet fail. */
export function putOff(by: "held" | "gas held"): CollectionOutcome {
  const at = { hash: null, retryAfterSeconds: IN_FLIGHT_RETRY_SECONDS };
  if (by === "held") {
    const reason = "the payer's balance is held by others of its payments";
    return { kind: "unavailable", reason, message: "other payments of this payer come first", ...at };
  }
  const reason = "the account's gas of the day is held by others of its payments";
  return { kind: "over_limit", reason, message: "other payments come first", ...at };
}

/** What the record of the payment says. @param isAwaited a request that waits for the block will answer */
export function outcomeOfRecord(
  record: FacilitatorPayment,
  { named }: SettlementRequest,
  isAwaited: boolean,
  log: Log,
): CollectionOutcome {
  const { status, transaction_hash: hash, reason, foreign_transaction } = record;
  const isOpen = hash === null || (status === "sent" && isAwaited);
  // A payment that is only claimed has no hash yet, and an answer without one would say that it can't land.
  if (isOpen && status !== "failed") return BEING_SETTLED;
  log.info("settlement_answered", { ...named, status, transaction: hash, reason, foreign_transaction });
  if (status === "failed" || hash === null) return declined(reason ?? "failed");
  if (status === "settled") return settledBy(hash);
  return { kind: "pending", reason: "not included in time", hash, retryAfterSeconds: null };
}

/**
 * What others may learn of the record: those who present the same authorization for something else, or from another
 * account. Never a success, and a failure without a hash only when the payment can't land.
 */
export function outcomeForOthers({ status, transaction_hash: hash }: FacilitatorPayment): CollectionOutcome {
  if (status !== "failed" && hash === null) return BEING_SETTLED;
  return declined("claimed_on_other_terms", status === "failed" ? null : hash);
}

interface RefusalLogOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
}

export function createRefusalLog({ store, clock, log }: RefusalLogOptions) {
  let today = "";
  const notes = new Map<string, number>();

  function isFull(account: string, now: number): boolean {
    const day = utcDay(now);
    if (day !== today) notes.clear();
    today = day;
    const count = (notes.get(account) ?? 0) + 1;
    notes.set(account, count);
    return count > MAX.accountNotes;
  }

  return {
    /** Never rejects. */
    async note(named: Named, reason: string): Promise<void> {
      log.info("payment_refused", { ...named, reason });
      const now = clock.now();
      if (isFull(named.account, now)) return;
      const row = { ...named, reason, attempts: 1, created_at: now, updated_at: now };
      try {
        await store.write(async ({ db, tables: { facilitatorRefusals: t } }) => {
          const set = { reason, attempts: sql`${t.attempts} + 1`, updated_at: now };
          await db
            .insert(t)
            .values(row)
            .onConflictDoUpdate({ target: [t.account, t.payer, t.nonce], set });
        });
      } catch (error) {
        log.warn("refusal_not_stored", { account: named.account, error });
      }
    },
  };
}

// One request to collect a payment, with what every step needs of it, and whether it asks for the same as a record. Pure.

/** A payment must be valid for at least this much longer, or it would miss the next block and waste its gas. */
const SPARE_SECONDS = 3;

export interface SettlementRequest {
  readonly network: Network;
  readonly account: string;
  readonly limits: Limits;
  readonly key: PaymentKey;
  readonly payment: Payment;
  readonly requirements: Requirements;
  /** Whose signature it is. If it isn't the payer's own, it may be a contract wallet's, which only the chain can judge. */
  readonly signedBy: SignedBy;
  readonly named: Named;
}

/** A payment in the log: never with its signature. */
export interface Named {
  readonly account: string;
  readonly payer: Hex;
  readonly nonce: Hex;
}

export function settlementRequest(
  network: Network,
  account: FacilitatorAccount,
  request: SettleRequest,
  defaults: Limits,
  signedBy: SignedBy,
): SettlementRequest {
  const { payment, requirements } = request;
  const { from: payer, nonce } = payment.authorization;
  // The token refuses v 0 and 1. A contract wallet may read its signature in any way, so that stays as it is.
  const canonical = signedBy === "payer" ? canonicalSignature(payment.signature) : null;
  return {
    network,
    account: account.name,
    limits: limitsOf(account, defaults),
    key: keyOf(network, payment.authorization),
    payment: { ...payment, signature: canonical ?? payment.signature },
    requirements,
    signedBy,
    named: { account: account.name, payer, nonce },
  };
}

/** A problem ends the payment for good, so it must hold for the whole span of time. */
export function windowProblem({ authorization }: Pick<Payment, "authorization">, { earliest, latest }: TimeSpan) {
  const at = (now: number) => checkWindow(authorization, Math.floor(now / 1000), SPARE_SECONDS);
  return at(earliest) === at(latest) ? at(latest) : null;
}

/** One text for one set of requirements: the fields in one order, integers as decimals, hex in lower case. */
export function requirementsText(requirements: Requirements): string {
  const { scheme, network, asset, payTo, resource, maxTimeoutSeconds } = requirements;
  const maxAmountRequired = String(requirements.maxAmountRequired);
  return JSON.stringify({ scheme, network, maxAmountRequired, asset, payTo, resource, maxTimeoutSeconds });
}

/** Account, authorization and requirements, all fields. Payer and nonce are the record's key, so they are the same. */
export function isSameTerms(record: FacilitatorPayment, { account, payment, ...rest }: SettlementRequest): boolean {
  const { authorization, signature, scheme, network } = payment;
  return (
    record.account === account &&
    scheme === SCHEME &&
    network === rest.network.name &&
    record.pay_to === authorization.to &&
    record.value === String(authorization.value) &&
    record.valid_after === String(authorization.validAfter) &&
    record.valid_before === String(authorization.validBefore) &&
    record.requirements === requirementsText(rest.requirements) &&
    (rest.signedBy === "payer" || record.signature === signature)
  );
}
