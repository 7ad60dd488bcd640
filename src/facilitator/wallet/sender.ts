// Signs and stores the transactions of one wallet, in batches. Payments queued together share transactions or get consecutive
// nonces, are signed, and are stored in one write; only then does the next batch begin. So no nonce is assigned twice or
// skipped, and nothing leaves the process before it is stored. The watcher broadcasts, since a failure there changes no record.
import { quoteFees } from "../../chain/fees.ts";
import { SHARED_GAS, SHARED_GAS_MAX } from "../../chain/token.ts";
import { Fault } from "../../core/fault.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { endsWithin } from "../../kernel/wait.ts";
import { isUnavailable } from "../../storage/failures.ts";
import { type Tx, UniqueViolation } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { markSent, markSentAgain } from "../payments/payments.ts";
import { type WalletLeases, WalletNotHeld } from "./leases.ts";
import { areAllKnown, type PendingNonces, type WalletParts } from "./pending.ts";
import type { Signer } from "./signer.ts";
import type { PaymentTransfer, Position, TransactionRow } from "./transactions.ts";
import { areStored, contentOf, highestNonce, insertTransactions, signRow, storedNonces } from "./transactions.ts";
import type { WalletLimits } from "./wallet.ts";

const CONFLICTS_MAX = 20;
/** The greatest age of the block that fees are computed from, and by which a payer's code is looked up. */
export const BLOCK_AGE_MS_MAX = 1000;
const RETRY_AFTER_SECONDS = 5;
const STORE_RETRY_MS = 250;

export type Sender = ReturnType<typeof createSender>;

export interface SendJob extends PaymentTransfer {
  /** Whether it may share a transaction with others. */
  readonly mayShare: boolean;
  /** Whether the payment was sent before, by transactions that can't move the money any more. */
  readonly again: boolean;
}

interface SignedJobs {
  readonly jobs: readonly SendJob[];
  readonly row: TransactionRow;
}

type BatchParts = Pick<WalletParts, "store" | "clock" | "log"> & {
  readonly leases: Pick<WalletLeases, "fence">;
  readonly pendingNonces: Pick<PendingNonces, "of">;
};

interface SenderOptions extends BatchParts, Pick<WalletParts, "chain" | "wake"> {
  readonly signer: Signer;
  readonly limits: Pick<WalletLimits, "batch" | "maxFee">;
  readonly leases: Pick<WalletLeases, "holds" | "fence">;
  readonly pendingNonces: Pick<PendingNonces, "add" | "of" | "reach">;
}

interface QueuedSend {
  readonly job: SendJob;
  readonly resolve: () => void;
  readonly reject: (error: unknown) => void;
}

export function createSender(options: SenderOptions) {
  const { signer, log, limits, leases } = options;
  const batchStore = createBatchStore(options);
  const queue: QueuedSend[] = [];
  /** The payments being signed and stored. */
  let batch: readonly QueuedSend[] = [];
  let next: FreeNonces | null = null;
  /** Counts how often the known next nonce was discarded, so that a batch begun before does not restore it. */
  let resyncs = 0;
  let running: Promise<void> | null = null;
  let endGathering = () => {};
  let stopped = false;

  /** Discards the known next nonce, so that the next batch asks chain and store for it. */
  function resynchronise(): void {
    resyncs++;
    next = null;
  }

  async function run(): Promise<void> {
    while (queue.length > 0) {
      await gather();
      batch = queue.splice(0, 100);
      await sendBatch();
    }
    running = null;
  }

  /** Waits until a transaction is full, for 200 ms at most. */
  async function gather(): Promise<void> {
    if (limits.batch <= 1 || queue.length >= limits.batch || stopped) return;
    const { promise, resolve } = Promise.withResolvers<void>();
    endGathering = resolve;
    // A payment waits for others to share a transaction with, for a tenth of Base's time between blocks.
    await endsWithin(200, promise);
  }

  async function sendBatch(): Promise<void> {
    let conflicts = 0;
    while (batch.length > 0) {
      try {
        batch = await sendSome(batch);
      } catch (error) {
        resynchronise();
        // Another process with this wallet's key took the nonces. A random pause keeps the two from colliding again.
        if (error instanceof UniqueViolation && ++conflicts <= CONFLICTS_MAX) await Bun.sleep(Math.random() * 100);
        else batch = refuse(batch, error);
      }
    }
  }

  /** Signs and stores as many payments as can be signed, and returns the rest. Nothing is stored when this throws. */
  async function sendSome(sends: readonly QueuedSend[]): Promise<readonly QueuedSend[]> {
    if (!leases.holds(signer.address)) throw new WalletNotHeld(signer.address);
    const resyncsBefore = resyncs;
    const { room, ...start } = await startOf(options, next);
    const jobs = sends.map(({ job }) => job);
    const { signed, failure } = await signBatch(options, byTransaction(jobs, limits.batch).slice(0, room), start);
    if (failure !== null) log.error("signer_failed", { wallet: signer.address, error: failure });
    if (signed.length === 0) throw cannotSend("signer unreachable", failure);
    await batchStore.write(signed);
    if (resyncs === resyncsBefore) next = afterTaking({ nonce: start.nonce, room }, signed.length);
    handToWatcher(options, signed);
    const stored = new Set(signed.flatMap(({ jobs }) => jobs));
    for (const { job, resolve } of sends) if (stored.has(job)) resolve();
    return sends.filter(({ job }) => !stored.has(job));
  }

  return {
    signer,
    /** The number of payments that wait for a nonce. */
    waiting: (): number => batch.length + queue.length,
    /** The next nonce; null when chain and store have to be asked for it first. */
    next: (): number | null => next?.nonce ?? null,
    /** Resolves when the transaction is stored. @throws Fault `unavailable`; NotClaimed; WalletNotHeld: nothing is stored then */
    send(job: SendJob): Promise<void> {
      if (stopped) return Promise.reject(cannotSend("stopping"));
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      queue.push({ job, resolve, reject });
      if (queue.length >= limits.batch) endGathering();
      running ??= run();
      return promise;
    },
    resynchronise,
    /** Rejects the queued payments, and resolves when the batch in progress has ended. */
    async stop(): Promise<void> {
      stopped = true;
      batchStore.stop();
      endGathering();
      for (const { reject } of queue.splice(0)) reject(cannotSend("stopping"));
      await running;
    },
  };
}

/** The first nonce and the current fees for the next batch. @throws Fault `unavailable` */
async function startOf(options: SenderOptions, next: FreeNonces | null) {
  const { chain, clock, limits } = options;
  const newest = chain.newest(BLOCK_AGE_MS_MAX);
  const [{ baseFee, number: block }, tip, free] = await Promise.all([newest, chain.tip(), next ?? firstFree(options)]);
  const fees = quoteFees(baseFee, tip, limits.maxFee);
  if (fees === null) throw cannotSend("gas price above the configured maximum");
  return { ...free, fees, block, now: clock.now() };
}

/** Hands stored transactions to the watcher to broadcast, if this process still holds the wallet. */
function handToWatcher({ signer, leases, pendingNonces, wake }: SenderOptions, signed: readonly SignedJobs[]): void {
  if (!leases.holds(signer.address)) return;
  for (const { jobs, row } of signed) {
    const payments = jobs.map(({ payment }) => ({ ...payment, status: "sent" as const }));
    pendingNonces.add(row, payments);
  }
  wake();
}

/** Rejects the payments that the error concerns, and returns the others. */
function refuse(sends: readonly QueuedSend[], error: unknown): readonly QueuedSend[] {
  const reason = error instanceof UniqueViolation ? cannotSend("the wallet is in use", error) : error;
  const key = error instanceof NotClaimed ? error.key : null;
  const others = key === null ? [] : sends.filter(({ job }) => job.payment.key !== key);
  for (const each of sends) if (!others.includes(each)) each.reject(reason);
  return others;
}

/** A run of consecutive free nonces: the first one, and how many there are. */
interface FreeNonces {
  readonly nonce: number;
  readonly room: number;
}

/** The run without its first `taken` nonces; null when none is left. */
const afterTaking = ({ nonce, room }: FreeNonces, taken: number): FreeNonces | null =>
  taken < room ? { nonce: nonce + taken, room: room - taken } : null;

/**
 * The first run of free nonces. The chain may know transactions of another process, and stored ones may not have reached it
 * yet. A gap between the two, left by a node's wrong count, comes first: no later nonce gets into a block before it.
 */
async function firstFree({ signer: { address }, chain, store, pendingNonces }: SenderOptions): Promise<FreeNonces> {
  const highest = await highestNonce(store.read, address, pendingNonces.reach(address));
  let nonce = await chain.transactionCount(address, "pending", 0, highest + 1);
  for (const stored of await storedNonces(store.read, address, nonce)) {
    if (stored > nonce) return { nonce, room: stored - nonce };
    nonce = stored + 1;
  }
  return { nonce, room: Number.POSITIVE_INFINITY };
}

export const cannotSend = (message: string, cause?: unknown): Fault =>
  new Fault("unavailable", message, { retryAfterSeconds: RETRY_AFTER_SECONDS, cause });

/** By its record, the payment must not be sent: it is not claimed (any more), has ended, or was sent by another process. */
export class NotClaimed extends Error {
  override readonly name = "NotClaimed";
  readonly key: PaymentKey;

  constructor(key: PaymentKey) {
    super("the payment is not to be sent");
    this.key = key;
  }
}

/**
 * Groups payments into transactions, in order of arrival. Up to `paymentsMax` payments that may share go into one transaction,
 * within its gas limit; each of the others has its own.
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

/** Signs the groups in order of nonce, and drops all from the first that can't be signed on, so that there is no gap. */
async function signBatch(
  { chain, signer }: SenderOptions,
  groups: readonly (readonly SendJob[])[],
  { nonce, ...at }: Omit<Position, "replacement">,
): Promise<{ signed: SignedJobs[]; failure: unknown }> {
  const done: (SignedJobs | undefined)[] = groups.map(() => undefined);
  let failure: unknown = null;
  await mapLimit(groups.entries(), signer.parallel, async ([index, jobs]) => {
    if (failure !== null) return;
    const position = { ...at, nonce: nonce + index, replacement: 0 };
    try {
      done[index] = { jobs, row: await signRow(signer, contentOf(chain.network, signer.address, jobs), position) };
    } catch (error) {
      failure = error;
    }
  });
  const end = done.indexOf(undefined);
  const signed = done.slice(0, end === -1 ? done.length : end).filter((each) => each !== undefined);
  return { signed, failure };
}

export function createBatchStore({ store, clock, log, leases, pendingNonces }: BatchParts) {
  let stopped = false;

  async function mark(tx: Tx, { payment, again }: SendJob, hash: Hex): Promise<void> {
    const { key } = payment;
    const isMarked = again
      ? (await markSentAgain(tx, key, clock.now())) && (await areAllKnown(tx, key, pendingNonces, hash))
      : await markSent(tx, payment, hash, clock.now());
    if (!isMarked) throw new NotClaimed(key);
  }

  async function insert(signed: readonly SignedJobs[]): Promise<void> {
    await store.write(async (tx) => {
      const rows = signed.map(({ row }) => row);
      await insertTransactions(tx, rows);
      for (const { jobs, row } of signed) for (const job of jobs) await mark(tx, job, row.hash);
      // The fence comes last: if a commit's response was lost, the retry must meet the stored rows first and so learn of them.
      for (const wallet of new Set(rows.map((row) => row.wallet))) await leases.fence(tx, wallet);
    });
  }

  /** Repeats the write while a shared database is unavailable, since a lost response leaves open whether it took effect. */
  async function untilCertain<T>(work: () => Promise<T>): Promise<T> {
    for (;;) {
      try {
        return await work();
      } catch (error) {
        if (!store.isShared || !isUnavailable(error) || stopped) throw error;
        log.warn("transactions_in_doubt", { error });
        await Bun.sleep(STORE_RETRY_MS);
      }
    }
  }

  return {
    /**
     * Resolves when the transactions are stored. When this throws, they certainly are not: if the database's response was
     * lost, the write is repeated until a response tells how the first one ended.
     * @throws UniqueViolation when a nonce is taken; NotClaimed; WalletNotHeld; Fault `unavailable`
     */
    async write(signed: readonly SignedJobs[]): Promise<void> {
      try {
        await untilCertain(() => insert(signed));
      } catch (error) {
        if (!(error instanceof UniqueViolation)) throw error;
        // The conflicting rows may be these rows themselves, stored by a write whose response was lost.
        const rows = signed.map(({ row }) => row);
        if (!(await untilCertain(() => store.write((tx) => areStored(tx, rows))))) throw error;
      }
    },
    /** Ends the retries. A write whose result is unknown stays so until the next start reads the rows. */
    stop(): void {
      stopped = true;
    },
  };
}
