// Records how a payment ended, or that its block is gone, and tells those that wait. Each record is a guarded write, so
// when two processes find out the same thing, one writes it and the other reads what was written.

import type { Block, Receipt } from "../../chain/rpc-types.ts";
import type { Log } from "../../core/log.ts";
import { type Meters, silentMeters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { utcDay } from "../payments/guardrails.ts";
import {
  findPayment,
  type PaymentFailure,
  recordFailed,
  recordReorganised,
  recordSettled,
} from "../payments/payments.ts";
import type { SettlementWaiters } from "../settle/waiters.ts";
import { endOf } from "./end-of-nonce.ts";
import { countLate, markBurned, type Reverted } from "./gas-burned.ts";
import type { PendingNonces, PendingPayment } from "./pending.ts";
import { transactionsOf } from "./transactions.ts";

/** Nothing can be said yet, and the next look asks again. It is thrown, as a node's failures are. */
export class NotKnownYet extends Error {
  override readonly name = "NotKnownYet";
}

export type OutcomeRecorder = ReturnType<typeof createOutcomeRecorder>;

export interface OutcomeRecorderOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly meters?: Pick<Meters, "settlement">;
  readonly outcomes: Pick<SettlementWaiters, "announce">;
  readonly pendingNonces: Pick<PendingNonces, "of">;
  /** The database holds a transaction that is not known here. */
  readonly onConflict: () => void;
  /** Whether what all transactions cost has a bound, and so is counted. */
  readonly countsAll: boolean;
}

export function createOutcomeRecorder(options: OutcomeRecorderOptions) {
  const { store, clock, log, outcomes, pendingNonces, onConflict, meters = silentMeters } = options;

  /** Takes over the status that its record has. */
  async function reread(payment: PendingPayment): Promise<void> {
    payment.status = (await findPayment(store.read, payment.key))?.status ?? payment.status;
  }

  /** Undone when an open transaction of the payment was not judged: that one may still collect it. */
  async function fail(
    { key }: PendingPayment,
    failure: PaymentFailure,
    reverted: readonly Reverted[],
    head: Block,
  ): Promise<boolean> {
    try {
      return await store.write(async (tx) => {
        if (!(await recordFailed(tx, key, failure, { was: "sent", day: dayOf(head), now: clock.now() }))) return false;
        for (const each of reverted) await markBurned(tx, key, each);
        const rows = await transactionsOf(tx, key);
        const isJudged = rows.every((row) => !row.open || pendingNonces.of(row.wallet, row.wallet_nonce) !== undefined);
        if (!isJudged) throw new NotKnownYet();
        return true;
      });
    } catch (error) {
      if (error instanceof NotKnownYet) onConflict();
      throw error;
    }
  }

  return {
    /** Another process has ended it, or has stored another transaction for it. @throws NotKnownYet in the second case */
    async changedElsewhere(payment: PendingPayment): Promise<void> {
      await reread(payment);
      if (payment.status !== "sent") return;
      onConflict();
      throw new NotKnownYet();
    },
    async settle(payment: PendingPayment, receipt: Receipt): Promise<void> {
      const { hash, blockNumber, blockHash } = receipt;
      const inclusion = { transaction_hash: hash, block_number: blockNumber, block_hash: blockHash };
      const cost = options.countsAll ? costOf(payment, receipt) : null;
      if (await store.write((tx) => recordSettled(tx, payment.key, inclusion, clock.now(), cost))) {
        payment.status = "settled";
        meters.settlement("settled");
        log.info("payment_settled", { ...names(payment), transaction: hash, block: blockNumber });
      } else await reread(payment);
      if (payment.status === "failed") {
        log.error("failed_payment_collected", { ...names(payment), transaction: hash });
      }
      outcomes.announce(payment.key);
    },
    /** @throws NotKnownYet when another process has sent it once more */
    async fail(
      payment: PendingPayment,
      found: Omit<PaymentFailure, "gas_burned">,
      reverted: readonly Reverted[],
      head: Block,
    ): Promise<void> {
      const gas = reverted.reduce((sum, { gasWei }) => sum + gasWei, 0n);
      const failure = { ...found, gas_burned: reverted.length === 0 ? null : gas };
      if (await fail(payment, failure, reverted, head)) {
        payment.status = "failed";
        meters.settlement("failed");
        log.warn("payment_failed", { ...names(payment), ...failure });
      } else await reread(payment);
      outcomes.announce(payment.key);
    },
    /** Its transfer reverted; counts the gas if the payment had failed for another reason before. */
    async late(payment: PendingPayment, reverted: Reverted, head: Block): Promise<void> {
      if (await store.write((tx) => countLate(tx, payment.key, reverted, dayOf(head))))
        log.warn("late_revert", { ...names(payment), ...reverted });
    },
    /** Settled no more, for its block is gone. */
    async reopen(payment: PendingPayment): Promise<void> {
      if (await store.write((tx) => recordReorganised(tx, payment.key, clock.now()))) {
        payment.status = "sent";
        meters.settlement("reorganised");
      } else await reread(payment);
    },
  };
}

function dayOf({ timestamp }: Block): string {
  return utcDay(timestamp * 1000);
}

/** What settled it, with the parts that it had in transactions before that failed. */
function costOf(payment: PendingPayment, { hash, gasWei, ...at }: Receipt): bigint {
  const used = { hash, gasWei, ...at, paid: new Set([payment]) };
  const settling = [...payment.pendingNonces].find(({ transactions }) => transactions.some((row) => row.hash === hash));
  const others = [...payment.pendingNonces].filter((each) => each !== settling);
  const share = settling === undefined ? gasWei : endOf(settling, payment, used).shareWei;
  return others.reduce((sum, each) => sum + endOf(each, payment, each.inclusion).shareWei, share);
}

export function names({ key }: PendingPayment): { payer: Hex; nonce: Hex } {
  return { payer: key.payer, nonce: key.nonce };
}
