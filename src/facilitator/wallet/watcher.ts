// The chain is looked at on each new block, found by polling, while anything is open. One look tells which wallet nonces are
// used by now, what that means for the payments, what is deep enough in the chain to be closed, what a reorganisation has
// undone, and what has to be replaced. Each step may fail, and is repeated with the next look; nothing is forgotten before the
// database knows it.
import type { Chain } from "../../chain/chain.ts";
import type { Block } from "../../chain/json-rpc.ts";
import { mapLimit } from "../../kernel/loop.ts";
import type { Hex } from "../../x402/types.ts";
import type { NonceProgress, Replacer } from "./broadcast.ts";
import type { PendingNonce, PendingPayment, WalletParts } from "./pending.ts";
import { isExpired, type Resolver } from "./resolution.ts";
import type { Sender } from "./sender.ts";
import { closeNonces } from "./transactions.ts";

/** While a transaction or a payment waits for a block. */
const POLL_MS = 150;
/** While there is nothing but blocks to count until an inclusion is final. */
const CALM_POLL_MS = 1000;
/** After a failed step, or an answer of a node, the chain is looked at again although there is no new block. */
const LOOK_AGAIN_MS = 1000;
const QUESTIONS_PARALLEL = 16;
const WALLETS_PARALLEL = 4;

interface WatcherOptions extends WalletParts {
  readonly senders: ReadonlyMap<Hex, Sender>;
  readonly resolver: Resolver;
  readonly replace: Replacer;
  /** Blocks until an inclusion counts as final. */
  readonly confirmations: number;
  readonly broadcast: () => void;
  readonly refresh: () => Promise<void>;
}

export function createWatcher(options: WatcherOptions) {
  const { chain, log, pendingNonces, broadcast, refresh } = options;
  const reconcile = createReconcile(options, attempt);
  let seen: Block | null = null;
  /** When the chain is looked at although there is no new block (performance.now). */
  let lookAt = Number.POSITIVE_INFINITY;
  /** When the next round begins (performance.now). */
  let nextAt = Number.POSITIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let round: Promise<void> | null = null;
  let stopped = false;

  function lookAgain(): void {
    lookAt = Math.min(lookAt, performance.now() + LOOK_AGAIN_MS);
  }

  /** A step whose failure must not hold up the others. Never rejects. */
  async function attempt(step: string, work: () => Promise<void>): Promise<void> {
    if (stopped) return;
    try {
      await work();
    } catch (error) {
      log.debug("chain_watcher_failed", { step, error });
      lookAgain();
    }
  }

  async function look(): Promise<void> {
    const at = await chain.newest();
    if (at.hash !== seen?.hash || performance.now() >= lookAt) {
      // What asked for a look before is met by this one.
      lookAt = Number.POSITIVE_INFINITY;
      await refresh();
      await reconcile(at);
      seen = at;
    }
    broadcast();
  }

  function isWaiting(): boolean {
    for (const pendingNonce of pendingNonces.all())
      if (pendingNonce.inclusion === null && pendingNonces.isInReach(pendingNonce)) return true;
    for (const { status } of pendingNonces.payments()) if (status === "sent") return true;
    return false;
  }

  async function run(): Promise<void> {
    await attempt("turn", look);
    round = null;
    if (stopped || (pendingNonces.wallets().size === 0 && !isWaiting())) return;
    scheduleRound(isWaiting() ? POLL_MS : CALM_POLL_MS);
  }

  /** The next round begins after this time, or earlier if it was scheduled earlier already. */
  function scheduleRound(ms: number): void {
    const at = performance.now() + ms;
    if (at >= nextAt) return;
    clearTimeout(timer);
    nextAt = at;
    timer = setTimeout(() => {
      nextAt = Number.POSITIVE_INFINITY;
      round ??= run();
    }, ms);
  }

  return {
    lookAgain,
    wake(): void {
      if (stopped) return;
      broadcast();
      // A round under way schedules the next one itself.
      if (round === null) scheduleRound(POLL_MS);
    },
    async stop(): Promise<void> {
      stopped = true;
      clearTimeout(timer);
      await round;
    },
  };
}

/** Looks at the chain whose newest block this is. Never rejects. */
function createReconcile(
  options: WatcherOptions,
  attempt: (step: string, work: () => Promise<void>) => Promise<void>,
): (at: Block) => Promise<void> {
  const { chain, store, leases, pendingNonces, senders, resolver, replace, confirmations } = options;
  const undoReorganised = createReorganised(options);
  const progresses = new Map<Hex, NonceProgress>();

  async function progressOf(wallet: Hex, at: Block): Promise<NonceProgress> {
    const known = progresses.get(wallet);
    const count = await chain.transactionCount(wallet, at, known?.count);
    const isKnown = known?.count === count && known.since <= at.number;
    const progress = isKnown ? known : { count, since: at.number };
    progresses.set(wallet, progress);
    pendingNonces.advance(wallet, count);
    const sender = senders.get(wallet);
    if (sender !== undefined && (sender.next() ?? count) < count) sender.resynchronise();
    return progress;
  }

  async function lookAtWallet(wallet: Hex, at: Block): Promise<void> {
    const progress = await progressOf(wallet, at);
    const used = pendingNonces.waiting(wallet).filter(({ nonce }) => nonce < progress.count);
    await mapLimit(used, QUESTIONS_PARALLEL, (pendingNonce) =>
      attempt("included", () => resolver.included(pendingNonce, at)),
    );
    const sender = senders.get(wallet);
    // Transactions of a key that is no longer configured are still watched and broadcast, but can't be replaced. What is
    // another process's is watched as far as a payment of ours depends on it.
    if (sender !== undefined && leases.holds(wallet)) await replace(sender.signer, progress, sender.next(), at);
  }

  function overdue(at: Block): PendingPayment[] {
    return [...pendingNonces.payments()].filter((payment) => {
      if (payment.status !== "sent") return false;
      return isExpired(payment, at) || [...payment.pendingNonces].every(({ inclusion }) => inclusion !== null);
    });
  }

  async function closeDeep(at: Block): Promise<void> {
    const deep = included(pendingNonces.all()).filter(({ inclusion, payments }) => {
      const isDeep = inclusion !== null && at.number - inclusion.blockNumber >= confirmations;
      return isDeep && [...payments].every(({ status }) => status !== "sent");
    });
    if (deep.length === 0) return;
    const { kept, lost } = await sift(chain, deep);
    for (const pendingNonce of lost) await resolver.reorganised(pendingNonce);
    if (kept.length > 0) await store.write((tx) => closeNonces(tx, kept));
    for (const pendingNonce of kept) pendingNonces.remove(pendingNonce);
  }

  return async (at) => {
    await attempt("reorganised", () => undoReorganised(at));
    const wallets = pendingNonces.wallets();
    await mapLimit(wallets, WALLETS_PARALLEL, (wallet) => attempt("wallet", () => lookAtWallet(wallet, at)));
    const late = overdue(at);
    await mapLimit(late, QUESTIONS_PARALLEL, (each) => attempt("overdue", () => resolver.overdue(each, at)));
    await attempt("close", () => closeDeep(at));
    for (const payment of pendingNonces.payments()) pendingNonces.forget(payment);
  };
}

/** No question is needed while each block follows the last one seen; anything else may be another branch. */
function createReorganised({ chain, pendingNonces, resolver }: WatcherOptions): (at: Block) => Promise<void> {
  let head: Block | null = null;
  /** Some block with a transaction of ours has not been seen to be part of the present chain. */
  let isDoubtful = false;
  return async (at) => {
    if (head !== null && head.hash !== at.hash && head.hash !== at.parentHash) isDoubtful = true;
    head = at;
    if (!isDoubtful) return;
    const { lost, isWhole } = await sift(chain, included(pendingNonces.all()));
    for (const pendingNonce of lost) await resolver.reorganised(pendingNonce);
    isDoubtful = !isWhole;
  };
}

function included(pendingNonces: Iterable<PendingNonce>): PendingNonce[] {
  return [...pendingNonces].filter(({ inclusion }) => inclusion !== null);
}

/** Sorts included nonces by whether their block is part of the chain. A node that does not know the block says nothing. */
async function sift(
  chain: Chain,
  pendingNonces: readonly PendingNonce[],
): Promise<{ kept: PendingNonce[]; lost: PendingNonce[]; isWhole: boolean }> {
  const byBlock = Map.groupBy(pendingNonces, ({ inclusion }) => inclusion?.blockNumber ?? 0);
  const kept: PendingNonce[] = [];
  const lost: PendingNonce[] = [];
  let isWhole = true;
  await mapLimit(byBlock, QUESTIONS_PARALLEL, async ([number, those]) => {
    const hash = await chain.blockHash(number);
    if (hash === null) isWhole = false;
    else for (const each of those) (each.inclusion?.blockHash === hash ? kept : lost).push(each);
  });
  return { kept, lost, isWhole };
}
