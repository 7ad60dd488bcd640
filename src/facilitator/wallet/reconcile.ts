// One look at the chain: which wallet nonces are used by now, what that means for the payments, what is deep
// enough to be closed, what was reorganised away, and what has to be replaced. Each step can fail and is taken again
// with the next look; nothing is forgotten before the database knows it.

import { pooled } from "../../concurrency/map-limit.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import type { Chain } from "../chain/chain.ts";
import type { Block } from "../chain/rpc-types.ts";
import type { OpenPayment, Slot, Slots } from "./pending.ts";
import type { Progress, Renew } from "./replace.ts";
import { isExpired, type Judge } from "./resolution.ts";
import type { Lane } from "./sender.ts";
import { closePlaces } from "./transactions.ts";

const QUESTIONS_PARALLEL = 16;
const WALLETS_PARALLEL = 4;

export interface LookOptions {
  readonly chain: Chain;
  readonly store: Store;
  readonly slots: Slots;
  readonly lanes: ReadonlyMap<Hex, Lane>;
  readonly judge: Judge;
  readonly renew: Renew;
  /** Blocks until an inclusion counts as final. */
  readonly confirmations: number;
  /** Runs a step whose failure must not hold up the others. */
  readonly attempt: (step: string, work: () => Promise<void>) => Promise<void>;
}

/** Looks at the chain whose newest block this is. Never rejects. */
export function createLook(options: LookOptions): (at: Block) => Promise<void> {
  const { chain, store, slots, lanes, judge, renew, confirmations, attempt } = options;
  const undoReorganised = createReorganised(options);
  const progresses = new Map<Hex, Progress>();

  async function progressOf(wallet: Hex, at: Block): Promise<Progress> {
    const count = await chain.transactionCount(wallet, at);
    const known = progresses.get(wallet);
    const isKnown = known?.count === count && known.since <= at.number;
    const progress = isKnown ? known : { count, since: at.number };
    progresses.set(wallet, progress);
    slots.advance(wallet, count);
    const lane = lanes.get(wallet);
    if (lane !== undefined && (lane.next() ?? count) < count) lane.resynchronise();
    return progress;
  }

  async function lookAtWallet(wallet: Hex, at: Block): Promise<void> {
    const progress = await progressOf(wallet, at);
    const used = slots.waiting(wallet).filter(({ nonce }) => nonce < progress.count);
    await pooled(used, QUESTIONS_PARALLEL, (slot) => attempt("included", () => judge.included(slot, at)));
    const lane = lanes.get(wallet);
    // Transactions of a key that is configured no more are still watched and broadcast, but can't be replaced.
    if (lane !== undefined) await renew(lane.signer, progress, lane.next(), at);
  }

  function overdue(at: Block): OpenPayment[] {
    return [...slots.payments()].filter((payment) => {
      if (payment.status !== "sent") return false;
      return isExpired(payment, at) || [...payment.slots].every(({ inclusion }) => inclusion !== null);
    });
  }

  async function closeDeep(at: Block): Promise<void> {
    const deep = included(slots).filter(({ inclusion, payment }) => {
      const isDeep = inclusion !== null && at.number - inclusion.blockNumber >= confirmations;
      return isDeep && payment?.status !== "sent";
    });
    if (deep.length === 0) return;
    const { kept, lost } = await sift(chain, deep);
    for (const slot of lost) await judge.reorganised(slot);
    if (kept.length > 0) await store.write((tx) => closePlaces(tx, kept));
    for (const slot of kept) slots.remove(slot);
  }

  return async (at) => {
    await attempt("reorganised", () => undoReorganised(at));
    await pooled(slots.wallets(), WALLETS_PARALLEL, (wallet) => {
      return attempt("wallet", () => lookAtWallet(wallet, at));
    });
    await pooled(overdue(at), QUESTIONS_PARALLEL, (payment) => {
      return attempt("overdue", () => judge.overdue(payment, at));
    });
    await attempt("close", () => closeDeep(at));
    for (const payment of slots.payments()) slots.forget(payment);
  };
}

/** Blocks that follow one another need no question; anything else may be another branch. */
function createReorganised({ chain, slots, judge }: LookOptions): (at: Block) => Promise<void> {
  let head: Block | null = null;
  /** Not every block that holds something of ours has been seen to be part of the present chain. */
  let isDoubtful = false;
  return async (at) => {
    if (head !== null && head.hash !== at.hash && head.hash !== at.parentHash) isDoubtful = true;
    head = at;
    if (!isDoubtful) return;
    const { lost, isWhole } = await sift(chain, included(slots));
    for (const slot of lost) await judge.reorganised(slot);
    isDoubtful = !isWhole;
  };
}

function included(slots: Slots): Slot[] {
  return [...slots.all()].filter(({ inclusion }) => inclusion !== null);
}

/** Sorts included slots by whether their block is part of the chain. A node that does not know it says nothing. */
async function sift(
  chain: Chain,
  slots: readonly Slot[],
): Promise<{ kept: Slot[]; lost: Slot[]; isWhole: boolean }> {
  const byBlock = Map.groupBy(slots, ({ inclusion }) => inclusion?.blockNumber ?? 0);
  const kept: Slot[] = [];
  const lost: Slot[] = [];
  let isWhole = true;
  await pooled(byBlock, QUESTIONS_PARALLEL, async ([number, those]) => {
    const hash = await chain.blockHash(number);
    if (hash === null) isWhole = false;
    else for (const slot of those) (slot.inclusion?.blockHash === hash ? kept : lost).push(slot);
  });
  return { kept, lost, isWhole };
}
