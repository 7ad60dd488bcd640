// Writes down how a payment ended, or that its block is gone, and tells whoever waits. Each is a guarded write, so
// of two processes that find out the same thing one writes it, and the other reads what it wrote.
import type { Clock } from "../../core/clock.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import type { Receipt } from "../chain/rpc-types.ts";
import {
  findPayment,
  type PaymentFailure,
  recordFailed,
  recordReorganised,
  recordSettled,
} from "../payments.ts";
import type { SettlementWaiters } from "../settle/waiters.ts";
import { countLate, markBurned, type Reverted } from "./gas-burned.ts";
import type { PendingNonces, PendingPayment } from "./pending.ts";
import { transactionsOf } from "./transactions.ts";

/** What can't be said yet is asked again: it is thrown, like the failures of a node. */
export class NotKnownYet extends Error {
  override readonly name = "NotKnownYet";
}

export interface OutcomeRecorder {
  settle(payment: PendingPayment, receipt: Receipt): Promise<void>;
  /** @throws NotKnownYet when another process has sent it once more */
  fail(
    payment: PendingPayment,
    failure: Omit<PaymentFailure, "gas_burned">,
    reverted: readonly Reverted[],
  ): Promise<void>;
  /** Its transfer reverted; counts it, if it has failed for something else before. */
  late(payment: PendingPayment, reverted: Reverted): Promise<void>;
  /** Settled no more, for its block is gone. */
  reopen(payment: PendingPayment): Promise<void>;
  /** Takes over how its record says that it stands. */
  reread(payment: PendingPayment): Promise<void>;
}

export interface OutcomeRecorderOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly outcomes: Pick<SettlementWaiters, "announce">;
  readonly pendingNonces: Pick<PendingNonces, "of">;
  /** The database holds a transaction that is not known here. */
  readonly onConflict: () => void;
}

export function createOutcomeRecorder(options: OutcomeRecorderOptions): OutcomeRecorder {
  const { store, clock, log, outcomes, pendingNonces, onConflict } = options;

  async function reread(payment: PendingPayment): Promise<void> {
    payment.status = (await findPayment(store.read, payment.key))?.status ?? payment.status;
  }

  /** Undone when it has an open transaction that was not judged: that one may still collect it. */
  async function fail(
    { key }: PendingPayment,
    failure: PaymentFailure,
    reverted: readonly Reverted[],
  ): Promise<boolean> {
    try {
      return await store.write(async (tx) => {
        if (!(await recordFailed(tx, key, failure, { was: "sent", now: clock.now() }))) return false;
        for (const each of reverted) await markBurned(tx, each);
        const rows = await transactionsOf(tx, key);
        const isJudged = rows.every(
          (row) => !row.open || pendingNonces.of(row.wallet, row.wallet_nonce) !== undefined,
        );
        if (!isJudged) throw new NotKnownYet();
        return true;
      });
    } catch (error) {
      if (error instanceof NotKnownYet) onConflict();
      throw error;
    }
  }

  return {
    reread,
    async settle(payment, { hash, blockNumber, blockHash }) {
      const inclusion = { transaction_hash: hash, block_number: blockNumber, block_hash: blockHash };
      if (await store.write((tx) => recordSettled(tx, payment.key, inclusion, clock.now()))) {
        payment.status = "settled";
        log.info("payment_settled", { ...names(payment), transaction: hash, block: blockNumber });
      } else await reread(payment);
      if (payment.status === "failed") {
        log.error("failed_payment_collected", { ...names(payment), transaction: hash });
      }
      outcomes.announce(payment.key);
    },
    async fail(payment, found, reverted) {
      const gas = reverted.reduce((sum, { gasWei }) => sum + gasWei, 0n);
      const failure = { ...found, gas_burned: reverted.length === 0 ? null : gas };
      if (await fail(payment, failure, reverted)) {
        payment.status = "failed";
        log.warn("payment_failed", { ...names(payment), ...failure });
      } else await reread(payment);
      outcomes.announce(payment.key);
    },
    async late(payment, reverted) {
      if (await store.write((tx) => countLate(tx, payment.key, reverted, clock.now())))
        log.warn("late_revert", { ...names(payment), ...reverted });
    },
    async reopen(payment) {
      if (await store.write((tx) => recordReorganised(tx, payment.key, clock.now()))) payment.status = "sent";
      else await reread(payment);
    },
  };
}

export function names({ key }: PendingPayment): { payer: Hex; nonce: Hex } {
  return { payer: key.payer, nonce: key.nonce };
}
