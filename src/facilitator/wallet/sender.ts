// One key's way to the chain. Payments that wait together share transactions or get consecutive nonces, are signed, and are stored in one
// write, and only then is the next batch begun: so a nonce is never given twice, none is left out, and nothing
// leaves the process before it is stored. Broadcasting happens elsewhere, since its failure changes nothing.

import type { Chain } from "../../chain/chain.ts";
import { quoteFees } from "../../chain/fees.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { endsWithin } from "../../kernel/wait.ts";
import { type Store, UniqueViolation } from "../../storage/store.ts";
import { WalletNotHeld } from "../settle/ports.ts";
import { byTransaction, createBatchStore, NotClaimed, type SendJob, type SignedJobs, signBatch } from "./batch.ts";
import type { WalletLeases } from "./leases.ts";
import type { KnownPayment, PendingNonces } from "./pending.ts";
import type { WatchSchedule } from "./schedule.ts";
import type { Signer } from "./signer.ts";
import { storedNonces } from "./transactions.ts";

const BATCH_MAX = 100;
/** A tenth of Base's time between blocks: how long a payment waits for others to share a transaction with. */
const GATHER_MS = 200;
/** Another process with the same key took the nonces: back off for a random time, so that it can go first. */
const CONFLICTS_MAX = 20;
const CONFLICT_PAUSE_MS_MAX = 100;
/** How old the newest block may be that fees are computed from. */
const BLOCK_AGE_MS_MAX = 1000;
const RETRY_AFTER_SECONDS = 5;

export type Sender = ReturnType<typeof createSender>;

export interface SenderOptions {
  readonly signer: Signer;
  readonly chain: Chain;
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** Wei per gas. */
  readonly maxFee: bigint;
  /** Most payments of one transaction; up to 1: each has its own. */
  readonly sharedMax: number;
  readonly leases: Pick<WalletLeases, "holds" | "fence">;
  readonly pendingNonces: Pick<PendingNonces, "add" | "of">;
  readonly schedule: Pick<WatchSchedule, "wake">;
}

interface QueuedSend {
  readonly job: SendJob;
  readonly resolve: () => void;
  readonly reject: (error: unknown) => void;
}

export function createSender(options: SenderOptions) {
  const { signer, chain, clock, log, maxFee, sharedMax, leases } = options;
  const batchStore = createBatchStore(options);
  const queue: QueuedSend[] = [];
  /** The payments that are being signed and stored. */
  let batch: readonly QueuedSend[] = [];
  let next: Free | null = null;
  /** Rises whenever the next nonce is no longer known for certain. */
  let resyncs = 0;
  let running: Promise<void> | null = null;
  const gathering = createGathering(sharedMax);
  let stopped = false;

  /** Somebody else uses the key: chain and store are asked for the next nonce. */
  function resynchronise(): void {
    resyncs++;
    next = null;
  }

  async function run(): Promise<void> {
    while (queue.length > 0) {
      await gathering.wait(() => queue.length);
      batch = queue.splice(0, BATCH_MAX);
      await sendBatch();
    }
    running = null;
  }

  /** Settles every one of the batch, sooner or later. */
  async function sendBatch(): Promise<void> {
    let conflicts = 0;
    while (batch.length > 0) {
      try {
        batch = await sendSome(batch);
      } catch (error) {
        // Whatever happened, chain and store tell the next nonce.
        resynchronise();
        if (error instanceof UniqueViolation && ++conflicts <= CONFLICTS_MAX) await pauseAtRandom();
        else batch = refuse(batch, error);
      }
    }
  }

  /** Signs and stores as many as can be signed, and returns the rest. Nothing is stored when it throws. */
  async function sendSome(those: readonly QueuedSend[]): Promise<readonly QueuedSend[]> {
    if (!leases.holds(signer.address)) throw new WalletNotHeld(signer.address);
    const resyncsBefore = resyncs;
    const { room, ...start } = await startOf();
    const groups = byTransaction(
      those.map(({ job }) => job),
      sharedMax,
    );
    const { signed, failure } = await signBatch(signer, groups.slice(0, room), start);
    if (failure !== null) log.error("signer_failed", { wallet: signer.address, error: failure });
    if (signed.length === 0) throw unavailable("signer unreachable", failure);
    await batchStore.write(signed);
    if (resyncs === resyncsBefore) next = behind({ nonce: start.nonce, room }, signed.length);
    follow(options, signed);
    const stored = new Set(signed.flatMap(({ jobs }) => jobs));
    for (const { job, resolve } of those) if (stored.has(job)) resolve();
    return those.filter(({ job }) => !stored.has(job));
  }

  async function startOf() {
    const [newest, tip, free] = await Promise.all([
      chain.newest(BLOCK_AGE_MS_MAX),
      chain.tip(),
      next ?? firstFree(chain, options.store, signer),
    ]);
    const fees = quoteFees(newest.baseFee, tip, maxFee);
    if (fees === null) throw unavailable("gas is too dear now");
    return { ...free, fees, block: newest.number, now: clock.now() };
  }

  return {
    signer,
    /** Payments that wait for a nonce. */
    waiting: (): number => batch.length + queue.length,
    /** The next nonce; null when chain and store have to be asked for it first. */
    next: (): number | null => next?.nonce ?? null,
    /** Resolves when its transaction is stored. @throws Fault `unavailable`; NotClaimed; WalletNotHeld. Nothing is stored then. */
    send(job: SendJob): Promise<void> {
      if (stopped) return Promise.reject(unavailable("stopping"));
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      queue.push({ job, resolve, reject });
      gathering.came(queue.length);
      running ??= run();
      return promise;
    },
    resynchronise,
    /** Refuses what waits, and resolves when nothing is under way. */
    async stop(): Promise<void> {
      stopped = true;
      batchStore.stop();
      gathering.stop();
      for (const { reject } of queue.splice(0)) reject(unavailable("stopping"));
      await running;
    },
  };
}

/** They are stored. Now they may be broadcast, by the process that holds the wallet by now. */
function follow({ signer, leases, pendingNonces, schedule }: SenderOptions, signed: readonly SignedJobs[]): void {
  if (!leases.holds(signer.address)) return;
  for (const { jobs, row } of signed) pendingNonces.add(row, jobs.map(asSent));
  schedule.wake();
}

function asSent({ payment }: SendJob): KnownPayment {
  return { ...payment, status: "sent" };
}

/** Rejects those that the error is about, and returns the others. */
function refuse(those: readonly QueuedSend[], error: unknown): readonly QueuedSend[] {
  const reason = error instanceof UniqueViolation ? unavailable("the wallet is in use", error) : error;
  const key = error instanceof NotClaimed ? error.key : null;
  const others = key === null ? [] : those.filter(({ job }) => job.payment.key !== key);
  for (const each of those) if (!others.includes(each)) each.reject(reason);
  return others;
}

/** Waits for others to share a transaction with: until it is full, or for a moment. */
function createGathering(sharedMax: number) {
  let full = Promise.withResolvers<void>();
  let stopped = false;
  return {
    async wait(waiting: () => number): Promise<void> {
      if (sharedMax <= 1 || waiting() >= sharedMax || stopped) return;
      full = Promise.withResolvers();
      await endsWithin(GATHER_MS, full.promise);
    },
    came(waiting: number): void {
      if (waiting >= sharedMax) full.resolve();
    },
    stop(): void {
      stopped = true;
      full.resolve();
    },
  };
}

/** A row of free nonces. */
interface Free {
  readonly nonce: number;
  readonly room: number;
}

/** Null when there is no more room. */
function behind({ nonce, room }: Free, taken: number): Free | null {
  return taken < room ? { nonce: nonce + taken, room: room - taken } : null;
}

/**
 * The chain may know of transactions of another process, and stored ones may not have reached the chain yet. A gap
 * between the two is filled first: after a nonce that a node once reported wrongly, no other would get into a block.
 */
async function firstFree(chain: Chain, store: Store, { address }: Signer): Promise<Free> {
  let nonce = await chain.transactionCount(address, "pending");
  for (const stored of await storedNonces(store.read, address, nonce)) {
    if (stored > nonce) return { nonce, room: stored - nonce };
    nonce = stored + 1;
  }
  return { nonce, room: Number.POSITIVE_INFINITY };
}

function pauseAtRandom(): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, Math.random() * CONFLICT_PAUSE_MS_MAX));
}

export function unavailable(message: string, cause?: unknown): Fault {
  return new Fault("unavailable", message, { retryAfterSeconds: RETRY_AFTER_SECONDS, cause });
}
