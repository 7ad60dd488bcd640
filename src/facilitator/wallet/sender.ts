// One key's way to the chain. Payments that wait together share transactions or get consecutive nonces, are signed, and are
// stored in one write; only then is the next batch begun. So a nonce is never given twice, none is left out, and nothing
// leaves the process before it is stored. Broadcasting happens elsewhere, since its failure changes nothing.
import { quoteFees } from "../../chain/fees.ts";
import { SHARED_GAS, SHARED_GAS_MAX } from "../../chain/token.ts";
import { Fault } from "../../core/fault.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { endsWithin } from "../../kernel/wait.ts";
import { type Tx, UniqueViolation } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { markSent, markSentAgain } from "../payments/payments.ts";
import { type WalletLeases, WalletNotHeld } from "./leases.ts";
import { areAllKnown, type PendingNonces, type WalletParts } from "./pending.ts";
import type { Signer } from "./signer.ts";
import {
  areStored,
  contentOf,
  highestNonce,
  insertTransactions,
  type PaymentTransfer,
  type Position,
  signRow,
  storedNonces,
  type TransactionRow,
} from "./transactions.ts";

const CONFLICTS_MAX = 20;
/** How old the newest block may be that fees are computed from. */
const BLOCK_AGE_MS_MAX = 1000;
const RETRY_AFTER_SECONDS = 5;
const STORE_RETRY_MS = 250;

export type Sender = ReturnType<typeof createSender>;

export interface SendJob extends PaymentTransfer {
  /** Whether it may share a transaction with others. */
  readonly mayShare: boolean;
  /** It was sent before, and none of those transactions can move the money any more. */
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

interface SenderOptions extends BatchParts, Pick<WalletParts, "chain" | "maxFee" | "wake"> {
  readonly signer: Signer;
  /** Most payments of one transaction; up to 1: each has its own. */
  readonly sharedMax: number;
  readonly leases: Pick<WalletLeases, "holds" | "fence">;
  readonly pendingNonces: Pick<PendingNonces, "add" | "of" | "reach">;
}

interface QueuedSend {
  readonly job: SendJob;
  readonly resolve: () => void;
  readonly reject: (error: unknown) => void;
}

export function createSender(options: SenderOptions) {
  const { signer, log, sharedMax, leases } = options;
  const batchStore = createBatchStore(options);
  const queue: QueuedSend[] = [];
  /** Being signed and stored. */
  let batch: readonly QueuedSend[] = [];
  let next: Free | null = null;
  /** Rises whenever the next nonce is no longer known for certain. */
  let resyncs = 0;
  let running: Promise<void> | null = null;
  let endGathering = () => {};
  let stopped = false;

  /** Chain and store are asked for the next nonce. */
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

  /** Until a transaction is full, or for a moment. */
  async function gather(): Promise<void> {
    if (sharedMax <= 1 || queue.length >= sharedMax || stopped) return;
    const { promise, resolve } = Promise.withResolvers<void>();
    endGathering = resolve;
    // A tenth of Base's time between blocks: how long a payment waits for others to share a transaction with.
    await endsWithin(200, promise);
  }

  async function sendBatch(): Promise<void> {
    let conflicts = 0;
    while (batch.length > 0) {
      try {
        batch = await sendSome(batch);
      } catch (error) {
        resynchronise();
        // Another process with the same key took the nonces: after a random time, it has gone first.
        if (error instanceof UniqueViolation && ++conflicts <= CONFLICTS_MAX) await Bun.sleep(Math.random() * 100);
        else batch = refuse(batch, error);
      }
    }
  }

  /** Signs and stores as many as can be signed, and returns the rest. Nothing is stored when it throws. */
  async function sendSome(those: readonly QueuedSend[]): Promise<readonly QueuedSend[]> {
    if (!leases.holds(signer.address)) throw new WalletNotHeld(signer.address);
    const resyncsBefore = resyncs;
    const { room, ...start } = await startOf(options, next);
    const jobs = those.map(({ job }) => job);
    const { signed, failure } = await signBatch(options, byTransaction(jobs, sharedMax).slice(0, room), start);
    if (failure !== null) log.error("signer_failed", { wallet: signer.address, error: failure });
    if (signed.length === 0) throw cannotSend("signer unreachable", failure);
    await batchStore.write(signed);
    if (resyncs === resyncsBefore) next = behind({ nonce: start.nonce, room }, signed.length);
    follow(options, signed);
    const stored = new Set(signed.flatMap(({ jobs }) => jobs));
    for (const { job, resolve } of those) if (stored.has(job)) resolve();
    return those.filter(({ job }) => !stored.has(job));
  }

  return {
    signer,
    /** Payments that wait for a nonce. */
    waiting: (): number => batch.length + queue.length,
    /** The next nonce; null when chain and store have to be asked for it first. */
    next: (): number | null => next?.nonce ?? null,
    /** Resolves when its transaction is stored. @throws Fault `unavailable`; NotClaimed; WalletNotHeld. Nothing is stored then. */
    send(job: SendJob): Promise<void> {
      if (stopped) return Promise.reject(cannotSend("stopping"));
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      queue.push({ job, resolve, reject });
      if (queue.length >= sharedMax) endGathering();
      running ??= run();
      return promise;
    },
    resynchronise,
    /** Refuses what waits, and resolves when nothing is under way. */
    async stop(): Promise<void> {
      stopped = true;
      batchStore.stop();
      endGathering();
      for (const { reject } of queue.splice(0)) reject(cannotSend("stopping"));
      await running;
    },
  };
}

/** Where the next batch begins, at the fees of now. @throws Fault `unavailable` */
async function startOf(options: SenderOptions, next: Free | null) {
  const { chain, clock, maxFee } = options;
  const [newest, tip, free] = await Promise.all([
    chain.newest(BLOCK_AGE_MS_MAX),
    chain.tip(),
    next ?? firstFree(options),
  ]);
  const fees = quoteFees(newest.baseFee, tip, maxFee);
  if (fees === null) throw cannotSend("gas price above the configured maximum");
  return { ...free, fees, block: newest.number, now: clock.now() };
}

/** They are stored. Now they may be broadcast, by the process that holds the wallet by now. */
function follow({ signer, leases, pendingNonces, wake }: SenderOptions, signed: readonly SignedJobs[]): void {
  if (!leases.holds(signer.address)) return;
  for (const { jobs, row } of signed) {
    const payments = jobs.map(({ payment }) => ({ ...payment, status: "sent" as const }));
    pendingNonces.add(row, payments);
  }
  wake();
}

/** Rejects those that the error is about, and returns the others. */
function refuse(those: readonly QueuedSend[], error: unknown): readonly QueuedSend[] {
  const reason = error instanceof UniqueViolation ? cannotSend("the wallet is in use", error) : error;
  const key = error instanceof NotClaimed ? error.key : null;
  const others = key === null ? [] : those.filter(({ job }) => job.payment.key !== key);
  for (const each of those) if (!others.includes(each)) each.reject(reason);
  return others;
}

/** Free nonces in a row. */
interface Free {
  readonly nonce: number;
  readonly room: number;
}

/** Null when there is no more room. */
const behind = ({ nonce, room }: Free, taken: number): Free | null =>
  taken < room ? { nonce: nonce + taken, room: room - taken } : null;

/**
 * The chain may know of transactions of another process, and stored ones may not have reached the chain yet. A gap
 * between the two is filled first: after a nonce that a node once reported wrongly, no other would get into a block.
 */
async function firstFree({ signer: { address }, chain, store, pendingNonces }: SenderOptions): Promise<Free> {
  const highest = await highestNonce(store.read, address, pendingNonces.reach(address));
  let nonce = await chain.transactionCount(address, "pending", 0, highest + 1);
  for (const stored of await storedNonces(store.read, address, nonce)) {
    if (stored > nonce) return { nonce, room: stored - nonce };
    nonce = stored + 1;
  }
  return { nonce, room: Number.POSITIVE_INFINITY };
}

export function cannotSend(message: string, cause?: unknown): Fault {
  return new Fault("unavailable", message, { retryAfterSeconds: RETRY_AFTER_SECONDS, cause });
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
      // Last: when the answer to a commit is lost, the rows in the way of the next try tell that the first one stored them.
      for (const wallet of new Set(rows.map((row) => row.wallet))) await leases.fence(tx, wallet);
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
        await Bun.sleep(STORE_RETRY_MS);
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
