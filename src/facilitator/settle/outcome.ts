// The outcome of one `/settle` request: one value for every protocol, which the routes turn into a response. Also the request
// that settling works on, the outcome by a payment's record, and the notes of refusals. A caller learns only a coarse reason.
// The exact one goes to the log and to the operator's table, whose row is a mere note: a failure to store it changes no response.
import { sql } from "drizzle-orm";
import type { TimeSpan } from "../../chain/newest-block.ts";
import type { Log } from "../../core/log.ts";
import { MAX } from "../../kernel/limits.ts";
import type { StoreTools } from "../../storage/store.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import { canonicalSignature } from "../../x402/eip3009.ts";
import { type Network, SCHEME } from "../../x402/network.ts";
import type { Hex, Payment, PaymentKey, Requirements } from "../../x402/types.ts";
import { checkWindow, keyOf, type SignedBy } from "../../x402/verify.ts";
import type { FacilitatorAccount, GuardrailProblem, Limits } from "../payments/guardrails.ts";
import { isOfDay, limitsOf, utcDay } from "../payments/guardrails.ts";
import type { FacilitatorPayment } from "../payments/payments.ts";

/** About the time between two blocks. */
const IN_FLIGHT_RETRY_SECONDS = 2;
const UNREADY_RETRY_SECONDS = 5;
/** A caller over a daily limit retries within the hour: the limit may be raised, or open payments may end and free it. */
const DAY_RETRY_SECONDS = 3600;

/**
 * `settled`: a transaction of ours has moved the money. `declined`: the payment is not collected for this caller; a hash is
 * given only when it was, or may yet be, collected on other terms. `pending`: the payment may yet be collected, by the
 * transaction with the hash if there is one. `over_limit`: it exceeds a limit of the account. `unavailable`: it can't settle now.
 */
export type CollectionOutcome = {
  /** The exact reason, which no caller learns. */
  readonly reason: string;
  /** When the caller may retry; null where a retry would change nothing, and where a hash tells more. */
  readonly retryAfterSeconds: number | null;
} & (
  | { readonly kind: "settled"; readonly hash: Hex }
  | { readonly kind: "declined" | "pending"; readonly hash: Hex | null }
  | { readonly kind: "over_limit" | "unavailable"; readonly hash: null; readonly message: string }
);

export function settledBy(hash: Hex): CollectionOutcome {
  return { kind: "settled", reason: "settled", hash, retryAfterSeconds: null };
}

/** @param hash of a transaction of ours that has moved the money, or still may; null only where there is none */
export function declined(reason: string, hash: Hex | null = null): CollectionOutcome {
  return { kind: "declined", reason, hash, retryAfterSeconds: null };
}

/** The payment is being settled, and no transaction hash is known yet or the final outcome is moments away. */
export const BEING_SETTLED: CollectionOutcome = {
  kind: "pending",
  reason: "being settled",
  hash: null,
  retryAfterSeconds: IN_FLIGHT_RETRY_SECONDS,
};

/** The payment itself is fine, but it can't be settled now. */
export function notNow(reason: string): CollectionOutcome {
  const message = "no settlement is possible now";
  return { kind: "unavailable", reason, hash: null, message, retryAfterSeconds: UNREADY_RETRY_SECONDS };
}

/** Only a daily limit that the payment can fit on another day comes with a retry time. */
export function overLimit(reason: GuardrailProblem, { limits, payment }: SettlementRequest): CollectionOutcome {
  const isPermanent = !isOfDay(reason) || payment.authorization.value > limits.dailyCeiling;
  const message = "the payment is outside the limits of this account";
  return { kind: "over_limit", reason, hash: null, message, retryAfterSeconds: isPermanent ? null : DAY_RETRY_SECONDS };
}

/** The account has as many settlements in flight as its share allows; the rest of the capacity is for other accounts. */
export function overShare(reason: string): CollectionOutcome {
  const message = "the account has its share of the settlements under way";
  return { kind: "over_limit", reason, hash: null, message, retryAfterSeconds: UNREADY_RETRY_SECONDS };
}

/** The payer's balance, or the account's gas, would suffice without the payments in flight, which may yet fail. */
export function putOff(by: "held" | "gas held"): CollectionOutcome {
  const common = { hash: null, retryAfterSeconds: IN_FLIGHT_RETRY_SECONDS };
  if (by === "held") {
    const reason = "the payer's balance is held by others of its payments";
    return { kind: "unavailable", reason, message: "other payments of this payer come first", ...common };
  }
  const reason = "the account's gas of the day is held by others of its payments";
  return { kind: "over_limit", reason, message: "other payments come first", ...common };
}

/** The outcome that the payment's record shows. @param isAwaited whether another request still waits for the block */
export function outcomeOfRecord(
  record: FacilitatorPayment,
  { named }: SettlementRequest,
  isAwaited: boolean,
  log: Log,
): CollectionOutcome {
  const { status, transaction_hash: hash, reason, foreign_transaction } = record;
  const isOpen = hash === null || (status === "sent" && isAwaited);
  // A payment that is only claimed has no hash yet, and a response without a hash would say that it can't land.
  if (isOpen && status !== "failed") return BEING_SETTLED;
  log.info("settlement_answered", { ...named, status, transaction: hash, reason, foreign_transaction });
  if (status === "failed" || hash === null) return declined(reason ?? "failed");
  if (status === "settled") return settledBy(hash);
  return { kind: "pending", reason: "not included in time", hash, retryAfterSeconds: null };
}

/**
 * What a caller may learn of a record made on other terms, such as another account or other requirements for the same
 * authorization. It is never a success, and a failure without a hash only when the payment can't land.
 */
export function outcomeForOthers({ status, transaction_hash: hash }: FacilitatorPayment): CollectionOutcome {
  if (status !== "failed" && hash === null) return BEING_SETTLED;
  return declined("claimed_on_other_terms", status === "failed" ? null : hash);
}

/** Returns a function that logs and stores a refusal, and never rejects. */
export function createRefusalLog({ store, clock, log }: StoreTools) {
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

  return async (named: Named, reason: string): Promise<void> => {
    log.info("payment_refused", { ...named, reason });
    const now = clock.now();
    if (isFull(named.account, now)) return;
    const row = { ...named, reason, attempts: 1, created_at: now, updated_at: now };
    const storing = store.write(async ({ db, tables: { facilitatorRefusals: t } }) => {
      const set = { reason, attempts: sql`${t.attempts} + 1`, updated_at: now };
      const target = [t.account, t.payer, t.nonce];
      await db.insert(t).values(row).onConflictDoUpdate({ target, set });
    });
    await storing.catch((error) => log.warn("refusal_not_stored", { account: named.account, error }));
  };
}

// One request to settle a payment, with what each step needs, and the comparison of its terms with a record. Pure functions.

/** A payment must stay valid for at least this long, or it would miss the next block and waste the gas. */
const SPARE_SECONDS = 3;

export interface SettlementRequest extends SettleRequest {
  readonly network: Network;
  readonly account: string;
  readonly limits: Limits;
  readonly key: PaymentKey;
  /** Who signed. A signature that is not the payer's own may be a contract wallet's, which only the chain can judge. */
  readonly signedBy: SignedBy;
  readonly named: Named;
}

/** How a payment is named in the log: never with its signature. */
export interface Named extends Pick<PaymentKey, "payer" | "nonce"> {
  readonly account: string;
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
  // The token refuses v 0 and 1. A contract wallet may read its signature in its own way, so such a signature is kept as is.
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

/** A problem with the validity window ends the payment for good, so it must hold at both ends of the time span. */
export function windowProblem({ authorization }: Pick<Payment, "authorization">, { earliest, latest }: TimeSpan) {
  const at = (now: number) => checkWindow(authorization, Math.floor(now / 1000), SPARE_SECONDS);
  return at(earliest) === at(latest) ? at(latest) : null;
}

/** The canonical text of a set of requirements: fixed order of fields, decimal integers, lower-case hex. */
export function requirementsText(requirements: Requirements): string {
  const { scheme, network, asset, payTo, resource, maxTimeoutSeconds } = requirements;
  const maxAmountRequired = String(requirements.maxAmountRequired);
  return JSON.stringify({ scheme, network, maxAmountRequired, asset, payTo, resource, maxTimeoutSeconds });
}

/** Compares account, authorization and requirements in full; payer and nonce are the record's key, so they match already. */
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
