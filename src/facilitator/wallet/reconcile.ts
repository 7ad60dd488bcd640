// One look at the chain: which wallet nonces are used by now, what that means for the payments, what is deep enough in
// the chain to be closed, what a reorganisation has undone, and what has to be replaced. Each step may fail, and is
// repeated with the next look; nothing is forgotten before the database knows it.

import type { Chain } from "../../chain/chain.ts";
import type { Block } from "../../chain/rpc-types.ts";
import { mapLimit } from "../../kernel/loop.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import type { WalletLeases } from "./leases.ts";
import type { PendingNonce, PendingNonces, PendingPayment } from "./pending.ts";
import type { NonceProgress, Replacer } from "./replace.ts";
import { isExpired, type Resolver } from "./resolution.ts";
import type { WatchSchedule } from "./schedule.ts";
import type { Sender } from "./sender.ts";
import { closeNonces } from "./transactions.ts";

const QUESTIONS_PARALLEL = 16;
const WALLETS_PARALLEL = 4;

export interface ReconcileOptions {
  readonly chain: Chain;
  readonly store: Store;
  readonly leases: Pick<WalletLeases, "holds">;
  readonly pendingNonces: PendingNonces;
  readonly senders: ReadonlyMap<Hex, Sender>;
  readonly resolver: Resolver;
  readonly replace: Replacer;
  /** Blocks until an inclusion counts as final. */
  readonly confirmations: number;
  readonly schedule: WatchSchedule;
}

/** Looks at the chain whose newest block this is. Never rejects. */
export function createReconcile(options: ReconcileOptions): (at: Block) => Promise<void> {
  const { chain, store, leases, pendingNonces, senders, resolver, replace, confirmations } = options;
  const { attempt } = options.schedule;
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
    const deep = included(pendingNonces).filter(({ inclusion, payments }) => {
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
    await mapLimit(pendingNonces.wallets(), WALLETS_PARALLEL, (wallet) => {
      return attempt("wallet", () => lookAtWallet(wallet, at));
    });
    await mapLimit(overdue(at), QUESTIONS_PARALLEL, (payment) => {
      return attempt("overdue", () => resolver.overdue(payment, at));
    });
    await attempt("close", () => closeDeep(at));
    for (const payment of pendingNonces.payments()) pendingNonces.forget(payment);
    pendingNonces.recount();
  };
}

/** No question is needed while each block follows the last one seen; anything else may be another branch. */
function createReorganised({ chain, pendingNonces, resolver }: ReconcileOptions): (at: Block) => Promise<void> {
  let head: Block | null = null;
  /** Some block with a transaction of ours has not been seen to be part of the present chain. */
  let isDoubtful = false;
  return async (at) => {
    if (head !== null && head.hash !== at.hash && head.hash !== at.parentHash) isDoubtful = true;
    head = at;
    if (!isDoubtful) return;
    const { lost, isWhole } = await sift(chain, included(pendingNonces));
    for (const pendingNonce of lost) await resolver.reorganised(pendingNonce);
    isDoubtful = !isWhole;
  };
}

function included(pendingNonces: PendingNonces): PendingNonce[] {
  return [...pendingNonces.all()].filter(({ inclusion }) => inclusion !== null);
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
    else
      for (const pendingNonce of those) (pendingNonce.inclusion?.blockHash === hash ? kept : lost).push(pendingNonce);
  });
  return { kept, lost, isWhole };
}
