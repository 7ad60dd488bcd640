// A batch of payments on its way into the store: put together into transactions, signed with consecutive nonces and
// stored in one write, so that either all of them may be broadcast or none.

import type { Fees } from "../../chain/fees.ts";
import { SHARED_GAS, SHARED_GAS_MAX } from "../../chain/token.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { type Store, type Tx, UniqueViolation } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { markSent, markSentAgain } from "../payments/payments.ts";
import type { WalletLeases } from "./leases.ts";
import type { PendingNonces } from "./pending.ts";
import type { Signer } from "./signer.ts";
import {
  areStored,
  contentOf,
  insertTransactions,
  signRow,
  type TransactionRow,
  type Transfer,
  transactionsOf,
} from "./transactions.ts";

const STORE_RETRY_MS = 250;

export interface SendJob extends Transfer {
  /** Whether it may share a transaction with others. */
  readonly mayShare: boolean;
  /** It was sent before, and none of those transactions can move the money any more. */
  readonly again: boolean;
}

export interface SignedJobs {
  readonly jobs: readonly SendJob[];
  readonly row: TransactionRow;
}

/** The payment's record says that it is not to be sent (any more): it is not claimed, or has ended, or was sent elsewhere. */
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

/**
 * Puts them together by transaction: up to so many share one, as long as its gas suffices; the others have one each.
 * By when the first of each came.
 */
export function byTransaction(jobs: readonly SendJob[], paymentsMax: number): SendJob[][] {
  const all: SendJob[][] = [];
  let shared: SendJob[] = [];
  let gas = 0n;
  for (const job of jobs) {
    const fits = shared.length > 0 && shared.length < paymentsMax && gas + job.gas <= SHARED_GAS_MAX - SHARED_GAS;
    if (job.mayShare && fits) {
      shared.push(job);
      gas += job.gas;
    } else {
      const group = [job];
      all.push(group);
      if (job.mayShare) [shared, gas] = [group, job.gas];
    }
  }
  return all;
}

/** Signs them in order. None is given a nonce after the first that can't be signed, so that there is no gap. */
export async function signBatch(
  signer: Signer,
  groups: readonly (readonly SendJob[])[],
  { nonce, fees, block, now }: BatchStart,
): Promise<{ signed: SignedJobs[]; failure: unknown }> {
  const done: (SignedJobs | undefined)[] = groups.map(() => undefined);
  let failure: unknown = null;
  await mapLimit(groups.entries(), signer.parallel, async ([index, jobs]) => {
    if (failure !== null) return;
    const position = { nonce: nonce + index, replacement: 0, fees, block, now };
    try {
      done[index] = { jobs, row: await signRow(signer, contentOf(signer.address, jobs), position) };
    } catch (error) {
      failure = error;
    }
  });
  const end = done.indexOf(undefined);
  const signed = done.slice(0, end === -1 ? done.length : end).filter((each) => each !== undefined);
  return { signed, failure };
}

export interface BatchStoreOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly leases: Pick<WalletLeases, "fence">;
  readonly pendingNonces: Pick<PendingNonces, "of">;
}

export function createBatchStore({ store, clock, log, leases, pendingNonces }: BatchStoreOptions) {
  let stopped = false;

  async function mark(tx: Tx, { payment, again }: SendJob, hash: Hex): Promise<void> {
    const { key } = payment;
    const isMarked = again
      ? (await markSentAgain(tx, key, clock.now())) && (await isJudged(tx, key, hash))
      : await markSent(tx, payment, hash, clock.now());
    if (!isMarked) throw new NotClaimed(key);
  }

  /** No other process has sent the payment once more, by a transaction that was not judged here. */
  async function isJudged(tx: Tx, key: PaymentKey, own: Hex): Promise<boolean> {
    const rows = await transactionsOf(tx, key);
    return rows.every(
      ({ hash, open, wallet, wallet_nonce }) =>
        hash === own || !open || pendingNonces.of(wallet, wallet_nonce) !== undefined,
    );
  }

  async function insert(signed: readonly SignedJobs[]): Promise<void> {
    await store.write(async (tx) => {
      await insertTransactions(
        tx,
        signed.map(({ row }) => row),
      );
      for (const { jobs, row } of signed) for (const job of jobs) await mark(tx, job, row.hash);
      // Last: when the answer to a commit is lost, the rows in the way of the next try tell that the first one stored them.
      for (const wallet of new Set(signed.map(({ row }) => row.wallet))) await leases.fence(tx, wallet);
    });
  }

  async function surely<T>(work: () => Promise<T>): Promise<T> {
    for (;;) {
      try {
        return await work();
      } catch (error) {
        const isUnsure = store.isShared && error instanceof Fault && error.kind === "unavailable";
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
     * @throws UniqueViolation when a nonce is taken; NotClaimed; WalletNotHeld; Fault `unavailable`
     */
    async write(signed: readonly SignedJobs[]): Promise<void> {
      try {
        await surely(() => insert(signed));
      } catch (error) {
        if (!(error instanceof UniqueViolation)) throw error;
        // The rows in the way may be these same rows, stored by a write whose answer was lost.
        const rows = signed.map(({ row }) => row);
        if (!(await surely(() => store.write((tx) => areStored(tx, rows))))) throw error;
      }
    },
    /** What is not known by now stays unknown, until the next start reads it. */
    stop(): void {
      stopped = true;
    },
  };
}
