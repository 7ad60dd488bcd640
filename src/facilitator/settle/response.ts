// What `/settle` answers: the one coarse reason of every failed collection, and the Faults of what can't be judged
// now. The exact reason goes to the log and to the store on the way.
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { NETWORK } from "../../x402/kind.ts";
import type { Hex } from "../../x402/types.ts";
import type { GuardrailProblem } from "../guardrails.ts";
import type { FacilitatorPayment } from "../payments.ts";
import type { RefusalLog } from "./refusals.ts";
import type { SettlementRequest } from "./request.ts";

const ERROR_REASON = "payment could not be collected";
/** About a block. */
const IN_FLIGHT_RETRY_SECONDS = 2;
const UNREADY_RETRY_SECONDS = 5;

/** For the log, and for the caller. */
const PUT_OFF = {
  held: ["the payer's balance is held by others of its payments", "other payments of this payer"],
  "gas held": ["the account's gas of the day is held by others of its payments", "other payments"],
} as const;

/** `transaction` is "" on a failure only when this facilitator has none that may still land. */
export type SettleResponse = { readonly network: string; readonly payer: Hex } & (
  | { readonly success: true; readonly transaction: Hex }
  | { readonly success: false; readonly errorReason: string; readonly transaction: Hex | "" }
);

/** Before a claim: a failed collection, or a guardrail. */
export type SettlementRefusal = { readonly failed: string } | { readonly overLimit: GuardrailProblem };

export interface SettlementResponses {
  /** @throws Fault `over_limit` for a guardrail */
  refuse(asked: SettlementRequest, refusal: SettlementRefusal): Promise<SettleResponse>;
  /** Nothing is against the payment; it can't be settled now. */
  unready(asked: SettlementRequest, reason: string): Fault;
  /** The payer's balance, or the account's gas, would do but for what is under way, which may end otherwise. */
  putOff(asked: SettlementRequest, by: "held" | "gas held"): Fault;
  /**
   * What the record of the payment says.
   *
   * @param isAwaited a request that waits for the block will answer
   * @throws Fault `unavailable` while that is so, and while there is no hash to give
   */
  fromRecord(asked: SettlementRequest, record: FacilitatorPayment, isAwaited: boolean): SettleResponse;
  /**
   * What whoever has the same authorization, but asks for something else with it or from another account, may know of
   * the record: never a success, nor that it failed for as long as it may land or when it has landed.
   *
   * @throws Fault `unavailable` while there is no hash to give
   */
  onOtherTerms(asked: SettlementRequest, record: FacilitatorPayment): Promise<SettleResponse>;
}

export function createSettlementResponses(log: Log, refusals: RefusalLog): SettlementResponses {
  return {
    async refuse(asked, refusal) {
      const isFailed = "failed" in refusal;
      await refusals.note({ ...asked.named, reason: isFailed ? refusal.failed : refusal.overLimit });
      if (isFailed) return failure(asked, "");
      throw new Fault("over_limit", "the payment is outside the limits of this account");
    },

    unready({ named }, reason) {
      log.warn("settlement_impossible", { ...named, reason });
      return unavailable();
    },

    putOff({ named }, by) {
      const [held, first] = PUT_OFF[by];
      log.info("settlement_deferred", { ...named, reason: held });
      return new Fault("unavailable", `${first} come first`, {
        retryAfterSeconds: IN_FLIGHT_RETRY_SECONDS,
      });
    },

    fromRecord(asked, record, isAwaited) {
      const { status, transaction_hash: transaction, reason, foreign_transaction } = record;
      // What is only claimed has no hash to give, and "" would say that it can't land.
      const isOpen = transaction === null || (status === "sent" && isAwaited);
      if (isOpen && status !== "failed") throw inFlight();
      log.info("settlement_answered", { ...asked.named, status, transaction, reason, foreign_transaction });
      if (status === "failed" || transaction === null) return failure(asked, "");
      if (status === "sent") return failure(asked, transaction);
      return { success: true, transaction, network: NETWORK, payer: asked.key.payer };
    },

    async onOtherTerms(asked, { status, transaction_hash: transaction }) {
      await refusals.note({ ...asked.named, reason: "claimed_on_other_terms" });
      if (status === "failed") return failure(asked, "");
      if (transaction === null) throw inFlight();
      return failure(asked, transaction);
    },
  };
}

function failure({ key }: SettlementRequest, transaction: Hex | ""): SettleResponse {
  return { success: false, errorReason: ERROR_REASON, transaction, network: NETWORK, payer: key.payer };
}

export function inFlight(): Fault {
  return new Fault("unavailable", "this payment is being settled", {
    retryAfterSeconds: IN_FLIGHT_RETRY_SECONDS,
  });
}

export function unavailable(): Fault {
  return new Fault("unavailable", "no settlement is possible now", {
    retryAfterSeconds: UNREADY_RETRY_SECONDS,
  });
}
