// One key's way to the chain. Payments that wait together get consecutive nonces, are signed, and are stored in one
// write, and only then is the next batch begun: so a nonce is never given twice, none is left out, and nothing
// leaves the process that is not stored. Broadcasting happens outside, for its failure changes nothing.
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { type Store, UniqueViolation } from "../../storage/store.ts";
import type { Chain } from "../chain/chain.ts";
import { createBatchStore, NotClaimed, type SendJob, type SignedJob, signBatch } from "./batch.ts";
import { quoteFees } from "./fees.ts";
import type { Signer } from "./signer.ts";
import { storedNonces } from "./transactions.ts";

const BATCH_MAX = 100;
/** Another process with the same key took the nonces: it is let go first for a moment, each time of another length. */
const CONFLICTS_MAX = 20;
const CONFLICT_PAUSE_MS_MAX = 100;
/** How old the newest block may be that fees are reckoned from. */
const BLOCK_AGE_MS_MAX = 1000;
const RETRY_AFTER_SECONDS = 5;

export interface Sender {
  readonly signer: Signer;
  /** Payments that wait for a nonce. */
  waiting(): number;
  /** The next nonce that it would give; null when chain and store have to be asked first. */
  next(): number | null;
  /** Resolves when its transaction is stored. @throws Fault `unavailable`; NotClaimed. Nothing is stored then. */
  send(job: SendJob): Promise<void>;
  /** Somebody else uses the key: chain and store are asked before the next nonce is given. */
  resynchronise(): void;
  /** Refuses what waits, and resolves when nothing is under way. */
  stop(): Promise<void>;
}

export interface SenderOptions {
  readonly signer: Signer;
  readonly chain: Chain;
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** Wei per gas. */
  readonly maxFee: bigint;
  /** They are stored; now they may be broadcast. */
  readonly onStored: (jobs: readonly SignedJob[]) => void;
}

interface QueuedSend {
  readonly job: SendJob;
  readonly resolve: () => void;
  readonly reject: (error: unknown) => void;
}

export function createSender(options: SenderOptions): Sender {
  const { signer, chain, store, clock, log, maxFee, onStored } = options;
  const batchStore = createBatchStore(store, clock, log);
  const queue: QueuedSend[] = [];
  /** Those whose turn it is. */
  let batch: readonly QueuedSend[] = [];
  let next: Free | null = null;
  /** Rises when what was known about the next nonce is not trusted any more. */
  let doubts = 0;
  let running: Promise<void> | null = null;
  let stopped = false;

  function doubt(): void {
    doubts++;
    next = null;
  }

  async function run(): Promise<void> {
    while (queue.length > 0) {
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
        // Whatever happened, the next nonce is what chain and store say.
        doubt();
        if (error instanceof UniqueViolation && ++conflicts <= CONFLICTS_MAX) await pauseAtRandom();
        else batch = refuse(batch, error);
      }
    }
  }

  /** Rejects those whom the error is about, and gives the others. */
  function refuse(those: readonly QueuedSend[], error: unknown): readonly QueuedSend[] {
    const reason = error instanceof UniqueViolation ? unavailable("the wallet is in use", error) : error;
    const key = error instanceof NotClaimed ? error.key : null;
    const others = key === null ? [] : those.filter(({ job }) => job.payment.key !== key);
    for (const each of those) if (!others.includes(each)) each.reject(reason);
    return others;
  }

  /** Signs and stores as many as can be signed, and gives those that are left. Nothing is stored when it throws. */
  async function sendSome(those: readonly QueuedSend[]): Promise<readonly QueuedSend[]> {
    const { room, ...start } = await startOf();
    const doubtsBefore = doubts;
    const jobs = those.slice(0, room).map(({ job }) => job);
    const { signed, failure } = await signBatch(signer, jobs, start);
    if (failure !== null) log.error("signer_failed", { wallet: signer.address, error: failure });
    if (signed.length === 0) throw unavailable("signer unreachable", failure);
    await batchStore.write(signed);
    if (doubts === doubtsBefore) next = behind({ nonce: start.nonce, room }, signed.length);
    onStored(signed);
    for (const { resolve } of those.slice(0, signed.length)) resolve();
    return those.slice(signed.length);
  }

  async function startOf() {
    const [newest, tip, free] = await Promise.all([
      chain.newest(BLOCK_AGE_MS_MAX),
      chain.tip(),
      next ?? firstFree(chain, store, signer),
    ]);
    const fees = quoteFees(newest.baseFee, tip, maxFee);
    if (fees === null) throw unavailable("gas is too dear now");
    return { ...free, fees, block: newest.number, now: clock.now() };
  }

  return {
    signer,
    waiting: () => batch.length + queue.length,
    next: () => next?.nonce ?? null,
    send(job) {
      if (stopped) return Promise.reject(unavailable("stopping"));
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      queue.push({ job, resolve, reject });
      running ??= run();
      return promise;
    },
    resynchronise: doubt,
    async stop() {
      stopped = true;
      batchStore.stop();
      for (const { reject } of queue.splice(0)) reject(unavailable("stopping"));
      await running;
    },
  };
}

/** Nonces that nothing is at, in a row. */
interface Free {
  readonly nonce: number;
  readonly room: number;
}

/** Null when there is no more room. */
function behind({ nonce, room }: Free, taken: number): Free | null {
  return taken < room ? { nonce: nonce + taken, room: room - taken } : null;
}

/**
 * What the chain knows of may be of another process; what is stored may not have reached the chain. A gap between them
 * comes first: behind a nonce that a node told wrongly once, nothing else would ever get into a block.
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

function unavailable(message: string, cause?: unknown): Fault {
  return new Fault("unavailable", message, { retryAfterSeconds: RETRY_AFTER_SECONDS, cause });
}
