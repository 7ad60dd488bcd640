// What `/settle` answers: one coarse reason for every failed collection, and a Fault for what can't be judged now. The
// exact reason, which no caller learns, goes to the log and to the operator's table. It is only a note there: a failure to
// store it changes no answer.

import { sql } from "drizzle-orm";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import type { Store } from "../../storage/store.ts";
import { NETWORK } from "../../x402/kind.ts";
import type { Hex } from "../../x402/types.ts";
import { type GuardrailProblem, isOfDay, utcDay } from "../payments/guardrails.ts";
import type { FacilitatorPayment } from "../payments/payments.ts";
import type { SettlementRequest } from "./request.ts";

const ERROR_REASON = "payment could not be collected";
/** About a block. */
const IN_FLIGHT_RETRY_SECONDS = 2;
const UNREADY_RETRY_SECONDS = 5;

/** What holds for a day is looked at again within the hour: the limit may have been raised, or what was open has ended. */
const DAY_RETRY_SECONDS = 3600;

/** For the log, and for the caller; a limit of the account's is 429. */
const PUT_OFF = {
  held: ["the payer's balance is held by others of its payments", "other payments of this payer", "unavailable"],
  "gas held": ["the account's gas of the day is held by others of its payments", "other payments", "over_limit"],
} as const;

/** `transaction` is "" on a failure only when this facilitator has none that may still land. */
export type SettleResponse = { readonly network: string; readonly payer: Hex } & (
  | { readonly success: true; readonly transaction: Hex }
  | { readonly success: false; readonly errorReason: string; readonly transaction: Hex | "" }
);

/** Before a claim: a failed collection, or a guardrail. */
export type SettlementRefusal = { readonly failed: string } | { readonly overLimit: GuardrailProblem };

export type SettlementResponses = ReturnType<typeof createSettlementResponses>;

export function createSettlementResponses(log: Log, refusals: RefusalLog, meters: Pick<Meters, "settlement">) {
  return {
    /** @throws Fault `over_limit` for a guardrail */
    async refuse(request: SettlementRequest, refusal: SettlementRefusal): Promise<SettleResponse> {
      const isFailed = "failed" in refusal;
      meters.settlement(isFailed ? "refused" : "over_limit");
      await refusals.note({ ...request.named, reason: isFailed ? refusal.failed : refusal.overLimit });
      if (isFailed) return failure(request, "");
      throw new Fault(
        "over_limit",
        "the payment is outside the limits of this account",
        retryAfter(request, refusal.overLimit),
      );
    },

    /** The account has all that it may have under way; the rest is for others. */
    overShare({ named }: SettlementRequest, reason: string): Fault {
      log.warn("settlement_impossible", { ...named, reason });
      meters.settlement("over_limit");
      const detail = { retryAfterSeconds: UNREADY_RETRY_SECONDS };
      return new Fault("over_limit", "the account has its share of the settlements under way", detail);
    },

    /** Nothing is against the payment, but it can't be settled now. */
    unready({ named }: SettlementRequest, reason: string): Fault {
      log.warn("settlement_impossible", { ...named, reason });
      return unavailable();
    },

    /** The payer's balance, or the account's gas, would suffice without the payments under way, which may yet fail. */
    putOff({ named }: SettlementRequest, by: "held" | "gas held"): Fault {
      const [held, first, kind] = PUT_OFF[by];
      log.info("settlement_deferred", { ...named, reason: held });
      return new Fault(kind, `${first} come first`, {
        retryAfterSeconds: IN_FLIGHT_RETRY_SECONDS,
      });
    },

    /**
     * What the record of the payment says.
     *
     * @param isAwaited a request that waits for the block will answer
     * @throws Fault `unavailable` while that is so, and while there is no hash to give
     */
    fromRecord(request: SettlementRequest, record: FacilitatorPayment, isAwaited: boolean): SettleResponse {
      const { status, transaction_hash: transaction, reason, foreign_transaction } = record;
      // A payment that is only claimed has no hash yet, and "" would say that it can't land.
      const isOpen = transaction === null || (status === "sent" && isAwaited);
      if (isOpen && status !== "failed") throw beingSettled();
      log.info("settlement_answered", { ...request.named, status, transaction, reason, foreign_transaction });
      if (status === "failed" || transaction === null) return failure(request, "");
      if (status === "sent") return failure(request, transaction);
      return collected(request, transaction);
    },

    collected,

    /**
     * What others may learn of the record: those who present the same authorization for something else, or from another
     * account. Never a success, and a failure without a hash only when the payment can't land.
     *
     * @throws Fault `unavailable` while there is no hash to give
     */
    async onOtherTerms(
      request: SettlementRequest,
      { status, transaction_hash: transaction }: FacilitatorPayment,
    ): Promise<SettleResponse> {
      meters.settlement("refused");
      await refusals.note({ ...request.named, reason: "claimed_on_other_terms" });
      if (status === "failed") return failure(request, "");
      if (transaction === null) throw beingSettled();
      return failure(request, transaction);
    },
  };
}

/** What passes by itself says when to ask again; a maximum, or another kind of payment, does not. */
function retryAfter({ limits, payment }: SettlementRequest, problem: GuardrailProblem) {
  const isNever = !isOfDay(problem) || payment.authorization.value > limits.dailyCeiling;
  return isNever ? {} : { retryAfterSeconds: DAY_RETRY_SECONDS };
}

function collected({ key }: SettlementRequest, transaction: Hex): SettleResponse {
  return { success: true, transaction, network: NETWORK, payer: key.payer };
}

function failure({ key }: SettlementRequest, transaction: Hex | ""): SettleResponse {
  return { success: false, errorReason: ERROR_REASON, transaction, network: NETWORK, payer: key.payer };
}

export function beingSettled(): Fault {
  return new Fault("unavailable", "this payment is being settled", {
    retryAfterSeconds: IN_FLIGHT_RETRY_SECONDS,
  });
}

export function unavailable(): Fault {
  return new Fault("unavailable", "no settlement is possible now", {
    retryAfterSeconds: UNREADY_RETRY_SECONDS,
  });
}

/** An account chooses payers and nonces, so it could fill the table. Beyond this number only the log has the reasons. */
const NOTES_PER_DAY_MAX = 10_000;

interface RefusalRecord {
  readonly account: string;
  readonly payer: Hex;
  readonly nonce: Hex;
  readonly reason: string;
}

type RefusalLog = ReturnType<typeof createRefusalLog>;

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
    return count > NOTES_PER_DAY_MAX;
  }

  return {
    /** Never rejects. */
    async note(refusal: RefusalRecord): Promise<void> {
      log.info("payment_refused", { ...refusal });
      const now = clock.now();
      if (isFull(refusal.account, now)) return;
      try {
        await keep(store, refusal, now);
      } catch (error) {
        log.warn("refusal_not_stored", { account: refusal.account, error });
      }
    },
  };
}

function keep(store: Store, { account, payer, nonce, reason }: RefusalRecord, now: number): Promise<unknown> {
  return store.write(({ db, tables: { facilitatorRefusals: t } }) =>
    db
      .insert(t)
      .values({ account, payer, nonce, reason, attempts: 1, created_at: now, updated_at: now })
      .onConflictDoUpdate({
        target: [t.account, t.payer, t.nonce],
        set: { reason, attempts: sql`${t.attempts} + 1`, updated_at: now },
      }),
  );
}
