// A batch of payments on its way into the store: signed with consecutive nonces and stored in one write, so that
// either all of them may be broadcast or none.

import { mapLimit } from "../../concurrency/map-limit.ts";
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { type Store, UniqueViolation } from "../../storage/store.ts";
import type { PaymentKey } from "../../x402/types.ts";
import type { Fees } from "../chain/fees.ts";
import { type ClaimedPayment, markSent, markSentAgain } from "../payments/payments.ts";
import type { Signer } from "./signer.ts";
import { areStored, insertTransactions, signRow, type TransactionRow, transfer } from "./transactions.ts";

const STORE_RETRY_MS = 250;

export interface SendJob {
  readonly payment: ClaimedPayment;
  readonly gas: bigint;
  /** It was sent before, and none of those transactions can move the money any more. */
  readonly again: boolean;
}

export interface SignedJob {
  readonly job: SendJob;
  readonly row: TransactionRow;
}

/** The payment's record says that it is not to be sent (any more): it is not claimed, or has ended. */
export class NotClaimed extends Error {
  override readonly name = "NotClaimed";
  readonly key: PaymentKey;

  constructor(key: PaymentKey) {
    super("the payment is not to be sent");
    this.key = key;
  }
}

export interface BatchStart {
  readonly nonce: number;
  readonly fees: Fees;
  /** The chain's newest block. */
  readonly block: number;
  /** Milliseconds. */
  readonly now: number;
}

/** Signs them in order. None is given a nonce after the first that can't be signed, so that there is no gap. */
export async function signBatch(
  signer: Signer,
  jobs: readonly SendJob[],
  { nonce, fees, block, now }: BatchStart,
): Promise<{ signed: SignedJob[]; failure: unknown }> {
  const done: (SignedJob | undefined)[] = jobs.map(() => undefined);
  let failure: unknown = null;
  await mapLimit(jobs.entries(), signer.parallel, async ([index, job]) => {
    if (failure !== null) return;
    const position = { nonce: nonce + index, replacement: 0, fees, block, now };
    try {
      done[index] = { job, row: await signRow(signer, transfer(job.payment, job.gas), position) };
    } catch (error) {
      failure = error;
    }
  });
  const end = done.indexOf(undefined);
  const signed = done.slice(0, end === -1 ? done.length : end).filter((each) => each !== undefined);
  return { signed, failure };
}

export function createBatchStore(store: Store, clock: Clock, log: Log) {
  let stopped = false;

  async function insert(jobs: readonly SignedJob[]): Promise<void> {
    await store.write(async (tx) => {
      await insertTransactions(
        tx,
        jobs.map(({ row }) => row),
      );
      for (const { job, row } of jobs) {
        const { key } = job.payment;
        const isMarked = job.again
          ? await markSentAgain(tx, key, clock.now())
          : await markSent(tx, job.payment, row.hash, clock.now());
        if (!isMarked) throw new NotClaimed(key);
      }
    });
  }

  async function surely<T>(work: () => Promise<T>): Promise<T> {
    for (;;) {
      try {
        return await work();
      } catch (error) {
        const isUnsure = store.dialect === "postgres" && error instanceof Fault && error.kind === "unavailable";
        if (!isUnsure || stopped) throw error;
        log.warn("transactions_in_doubt", { error });
        await new Promise((resolve) => setTimeout(resolve, STORE_RETRY_MS));
      }
    }
  }

  return {
    /**
     * Resolves when they are stored. When it throws, they certainly are not: if the database's answer was lost, the
     * same write is repeated until an answer tells how the first one ended.
     *
     * @throws UniqueViolation when a nonce is taken; NotClaimed; Fault `unavailable`
     */
    async write(jobs: readonly SignedJob[]): Promise<void> {
      try {
        await surely(() => insert(jobs));
      } catch (error) {
        if (!(error instanceof UniqueViolation)) throw error;
        // The rows in the way may be these same rows, stored by a write whose answer was lost.
        const rows = jobs.map(({ row }) => row);
        if (!(await surely(() => store.write((tx) => areStored(tx, rows))))) throw error;
      }
    },
    /** What is not known by now stays unknown, until the next start reads it. */
    stop(): void {
      stopped = true;
    },
  };
}
