// Writes down how a payment ended, or that its block is gone, and tells whoever waits. Each is a guarded write, so
// of two processes that find out the same thing one writes it, and the other reads what it wrote.
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import type { Store } from "../storage/store.ts";
import type { Hex } from "../x402/types.ts";
import type { Outcomes } from "./outcomes.ts";
import { findPayment, recordFailed, recordReorganised, recordSettled } from "./payments.ts";
import type { OpenPayment } from "./slots.ts";
import type { Receipt } from "./wire.ts";

export interface Verdicts {
  settle(payment: OpenPayment, receipt: Receipt): Promise<void>;
  /** @param foreign who used the authorization, where it is known */
  fail(payment: OpenPayment, reason: string, foreign?: Hex): Promise<void>;
  /** Settled no more, for its block is gone. */
  reopen(payment: OpenPayment): Promise<void>;
}

export interface VerdictsOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly outcomes: Pick<Outcomes, "announce">;
}

export function createVerdicts({ store, clock, log, outcomes }: VerdictsOptions): Verdicts {
  async function reread(payment: OpenPayment): Promise<void> {
    payment.status = (await findPayment(store.read, payment.key))?.status ?? payment.status;
  }

  return {
    async settle(payment, { hash, blockNumber, blockHash }) {
      const inclusion = { transaction_hash: hash, block_number: blockNumber, block_hash: blockHash };
      if (await store.write((tx) => recordSettled(tx, payment.key, inclusion, clock.now()))) {
        payment.status = "settled";
        log.info("payment settled", { ...names(payment), transaction: hash, block: blockNumber });
      } else await reread(payment);
      if (payment.status === "failed") {
        log.error("a payment recorded as failed was collected", { ...names(payment), transaction: hash });
      }
      outcomes.announce(payment.key);
    },
    async fail(payment, reason, foreign) {
      const failure = { reason, foreign_transaction: foreign ?? null };
      if (await store.write((tx) => recordFailed(tx, payment.key, failure, clock.now()))) {
        payment.status = "failed";
        log.warn("payment failed", { ...names(payment), reason, foreign_transaction: foreign });
      } else await reread(payment);
      outcomes.announce(payment.key);
    },
    async reopen(payment) {
      if (await store.write((tx) => recordReorganised(tx, payment.key, clock.now()))) payment.status = "sent";
      else await reread(payment);
    },
  };
}

export function names({ key }: OpenPayment): { payer: Hex; nonce: Hex } {
  return { payer: key.payer, nonce: key.nonce };
}
