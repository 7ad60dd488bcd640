// The chain is looked at on each new block, found by polling, while anything is open. One look tells which wallet nonces are
// used by now, what that means for the payments, what is deep enough in the chain to be closed, what a reorganisation has
// undone, and what has to be replaced. Each step may fail, and is repeated with the next look; nothing is forgotten before the
// database knows it.
import type { Chain } from "../../chain/chain.ts";
import { type Fees, freeingFees, quoteFees, raiseFees, type Tip } from "../../chain/fees.ts";
import type { Block } from "../../chain/json-rpc.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { UniqueViolation } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { createPaymentSpans, type PaymentSpans } from "../payments/payment-spans.ts";
import { isObsolete, newestOf, type PendingNonce, type PendingPayment, type WalletParts } from "./pending.ts";
import { isExpired, type Resolver } from "./resolution.ts";
import type { Sender } from "./sender.ts";
import type { Signer } from "./signer.ts";
import {
  closeNonces,
  contentOf,
  insertTransactions,
  pays,
  reopenNonces,
  signRow,
  type TransactionContent,
  type TransactionRow,
} from "./transactions.ts";

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
  /** Blocks until an inclusion counts as final. */
  readonly confirmations: number;
  readonly refresh: () => Promise<void>;
  /** Until what a node has accepted is broadcast again. Tests shorten it. */
  readonly againMs: number | undefined;
  /** Left out where traces are off. */
  readonly spans: PaymentSpans | undefined;
}

export function createWatcher(options: WatcherOptions) {
  const { chain, log, pendingNonces, refresh } = options;
  const { broadcast, stop: stopBroadcasts } = createBroadcaster(options);
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
      await Promise.all([round, stopBroadcasts()]);
    },
  };
}

/** Looks at the chain whose newest block this is. Never rejects. */
function createReconcile(
  options: WatcherOptions,
  attempt: (step: string, work: () => Promise<void>) => Promise<void>,
): (at: Block) => Promise<void> {
  const { chain, store, leases, pendingNonces, senders, resolver, confirmations } = options;
  const replace = createReplacer(options);
  const undoReorganised = createReorganised(options);
  const progresses = new Map<Hex, NonceProgress>();

  async function progressOf(wallet: Hex, waiting: readonly PendingNonce[], at: Block): Promise<NonceProgress> {
    const known = progresses.get(wallet);
    const highest = waiting.findLast(pendingNonces.isInReach)?.nonce ?? -1;
    const most = Math.max(highest + 1, known?.count ?? 0);
    const count = await chain.transactionCount(wallet, at, known?.count ?? waiting[0]?.nonce, most);
    const isKnown = known?.count === count && known.since <= at.number;
    const progress = isKnown ? known : { count, since: at.number };
    progresses.set(wallet, progress);
    pendingNonces.advance(wallet, count);
    const sender = senders.get(wallet);
    if (sender !== undefined && (sender.next() ?? count) < count) sender.resynchronise();
    return progress;
  }

  async function lookAtWallet(wallet: Hex, at: Block): Promise<void> {
    const waiting = pendingNonces.waiting(wallet);
    const progress = await progressOf(wallet, waiting, at);
    // What counted as used by somebody else, and is not used at all.
    for (const each of included(pendingNonces.all())) {
      const isForeign = each.wallet === wallet && each.inclusion?.hash === null;
      if (isForeign && each.nonce >= progress.count) await resolver.reorganised(each);
    }
    const used = waiting.filter(({ nonce }) => nonce < progress.count);
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
      const isOpen = (each: PendingNonce) => each.inclusion === null && pendingNonces.isInReach(each);
      return isExpired(payment, at) || ![...payment.pendingNonces].some(isOpen);
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
async function sift(chain: Chain, pendingNonces: readonly PendingNonce[]) {
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

// What is stored goes to the nodes, as often as it takes. A node's answer changes no record; it only says when to look at
// the chain. What keeps a wallet's nonces moving is replacement at the same nonce with a higher fee, and filling a nonce at
// which we have no transaction. Both are stored first, and count blocks and not time, so a chain that stands still is waited for.

/** Nodes keep few transactions of one sender that arrive out of order, so not many are sent at a time. */
const PARALLEL = 16;

/** Blocks that a transaction may miss before it is replaced, or a nonce may stay empty before it is filled. */
const MISSED_BLOCKS_MAX = 3;

function createBroadcaster(options: WatcherOptions) {
  const { chain, log, leases, pendingNonces, resynchronise, lookAgain, againMs = 5_000 } = options;
  const { spans = createPaymentSpans(null) } = options;
  const queue = new Set<PendingNonce>();
  const inFlight = new Map<PendingNonce, Promise<void>>();
  let stopped = false;

  async function broadcastNewest(pendingNonce: PendingNonce): Promise<void> {
    const row = newestOf(pendingNonce);
    // The first node may hold the transaction before this one, while others have forgotten it.
    const everywhere = pendingNonce.broadcasts++ > 0 || row.replacement > 0;
    const paid = pendingNonce.payments.values().map(({ key }) => key);
    const reception = await spans.within(paid, () => chain.broadcast(row.raw, everywhere));
    // It was replaced meanwhile, or is in a block: the answer means nothing then.
    if (newestOf(pendingNonce) !== row || pendingNonce.inclusion !== null) return;
    pendingNonce.broadcastAt = performance.now() + (reception === "accepted" ? againMs : 1_000);
    if (reception === "accepted") return;
    log.debug("transaction_not_accepted", { transaction: row.hash, reception });
    if (reception === "underpriced") await broadcastOver(pendingNonce);
    if (reception !== "nonce used") return;
    // A nonce is used that should be free.
    resynchronise(pendingNonce.wallet);
    lookAgain();
  }

  /**
   * No node takes the transaction that does nothing, so some hold a transfer that they may not have passed on. Once the
   * newest block is past the end of all its payments it can't move money, and frees the nonce too, for a little more gas.
   */
  async function broadcastOver(pendingNonce: PendingNonce): Promise<void> {
    const last = pendingNonce.transactions.findLast(({ payments }) => payments.length > 0);
    if (last === undefined || newestOf(pendingNonce).payments.length > 0) return;
    const head = await chain.newest(Number.POSITIVE_INFINITY);
    const isOver = (payment: PendingPayment) => payment.status !== "sent" && isExpired(payment, head);
    if ([...pendingNonce.payments].every(isOver)) await chain.broadcast(last.raw, true);
  }

  function due(wallet: Hex, now: number): PendingNonce[] {
    const noncesDue = pendingNonces
      .waiting(wallet)
      .filter((pendingNonce) => pendingNonce.broadcastAt <= now && pendingNonces.isInReach(pendingNonce))
      .filter((pendingNonce) => !inFlight.has(pendingNonce) && !isObsolete(pendingNonce));
    const again = new Set(noncesDue.filter(({ broadcasts }) => broadcasts > 0).slice(0, 50));
    return noncesDue.filter((pendingNonce) => pendingNonce.broadcasts === 0 || again.has(pendingNonce));
  }

  function pump(): void {
    for (const pendingNonce of queue) {
      if (inFlight.size >= PARALLEL) return;
      queue.delete(pendingNonce);
      // A process that was paused may have lost it meanwhile.
      if (!leases.holds(pendingNonce.wallet)) continue;
      const saying = broadcastNewest(pendingNonce)
        .catch((error: unknown) => log.error("broadcast_failed", { error }))
        .finally(() => {
          inFlight.delete(pendingNonce);
          if (!stopped) pump();
        });
      inFlight.set(pendingNonce, saying);
    }
  }

  return {
    /** Starts to broadcast what is due, and does not wait for it. What is being broadcast already is left alone. */
    broadcast(): void {
      if (stopped) return;
      const now = performance.now();
      for (const wallet of pendingNonces.wallets()) {
        if (!leases.holds(wallet)) continue;
        for (const pendingNonce of due(wallet, now)) queue.add(pendingNonce);
      }
      pump();
    },
    /** Drops what has not begun, and resolves when nothing is under way. */
    async stop(): Promise<void> {
      stopped = true;
      queue.clear();
      await Promise.all(inFlight.values());
    },
  };
}

/** Nonces of a wallet below `count` are used, since that block. */
interface NonceProgress {
  readonly count: number;
  readonly since: number;
}

function createReplacer(parts: WalletParts) {
  const { chain, store, clock, log, leases, pendingNonces, maxFee, reload, resynchronise } = parts;

  /** Those of its payments that may still be made. */
  function content({ wallet, payments, transactions }: PendingNonce, head: Block): TransactionContent {
    const open = [...payments].filter((payment) => payment.status === "sent" && !isExpired(payment, head));
    const transfers = open.flatMap((payment) => {
      const row = transactions.findLast((each) => pays(each, payment.key));
      const gas = row?.payments.find(({ nonce }) => nonce === payment.key.nonce)?.gas;
      return gas === undefined ? [] : [{ payment, gas }];
    });
    return contentOf(chain.network, wallet, transfers);
  }

  /** The transaction that replaces its newest one; null when the fees can't be raised now. */
  function replacementOf(pendingNonce: PendingNonce, head: Block, tip: Tip): Replacement | null {
    const before = newestOf(pendingNonce);
    const made = content(pendingNonce, head);
    // What it leaves out must not land, so there is no price at which the one before may stay.
    const isFreeing = made.payments.length < before.payments.length;
    const fees = (isFreeing ? freeingFees : raiseFees)(feesOf(before), head.baseFee, tip, maxFee);
    return fees === null ? null : { pendingNonce, content: made, fees };
  }

  async function replace(signer: Signer, { pendingNonce, content, fees }: Replacement, head: Block): Promise<void> {
    const before = newestOf(pendingNonce);
    const replacement = before.replacement + 1;
    const position = { nonce: pendingNonce.nonce, replacement, fees, block: head.number, now: clock.now() };
    const row = await signRow(signer, content, position);
    if (pendingNonce.inclusion !== null || !(await keep(signer.address, [row]))) return;
    pendingNonces.add(row, [...pendingNonce.payments]);
    const { wallet, wallet_nonce: nonce, hash: transaction } = row;
    log.info("transaction_replaced", { wallet, nonce, before: before.hash, transaction });
  }

  /** Those whose fees can be raised, up to a number at a time: one that can't be holds up nothing after it. */
  async function replaceSome(signer: Signer, stuck: readonly PendingNonce[], head: Block): Promise<void> {
    if (stuck.length === 0) return;
    const tip = await chain.tip();
    const found = stuck.map((pendingNonce) => replacementOf(pendingNonce, head, tip));
    const replacements = found.filter((each) => each !== null);
    await mapLimit(replacements.slice(0, 50), signer.parallel, (each) => replace(signer, each, head));
  }

  async function fill(signer: Signer, gaps: readonly number[], head: Block): Promise<void> {
    // They were used once, deep in the chain, and are free again: the transactions stored for them come first.
    const reopened = await store.write(async (tx) => {
      await leases.fence(tx, signer.address);
      return reopenNonces(tx, signer.address, gaps);
    });
    if (reopened) {
      log.warn("nonces_reopened", { wallet: signer.address, nonces: gaps });
      reload();
      return;
    }
    const fees = quoteFees(head.baseFee, await chain.tip(), maxFee);
    if (fees === null) return;
    const rows: TransactionRow[] = [];
    for (const nonce of gaps) {
      const position = { nonce, replacement: 0, fees, block: head.number, now: clock.now() };
      rows.push(await signRow(signer, contentOf(chain.network, signer.address, []), position));
    }
    if (!(await keep(signer.address, rows))) return;
    for (const row of rows) pendingNonces.add(row, []);
    log.warn("nonce_gap_filled", { wallet: signer.address, nonces: gaps });
  }

  /** False when another process has stored one at the same nonce: ours must not be broadcast then. @throws WalletNotHeld */
  async function keep(wallet: Hex, rows: readonly TransactionRow[]): Promise<boolean> {
    try {
      await store.write(async (tx) => {
        await leases.fence(tx, wallet);
        await insertTransactions(tx, rows);
      });
      return true;
    } catch (error) {
      if (!(error instanceof UniqueViolation)) throw error;
      reload();
      return false;
    }
  }

  /** Replaces and fills what needs it at `head`, but nothing far ahead. @param next of a new payment, if it is known */
  return async (signer: Signer, progress: NonceProgress, next: number | null, head: Block): Promise<void> => {
    const waiting = pendingNonces.waiting(signer.address).filter(pendingNonces.isInReach);
    const stuck = waiting.filter((each) => each.nonce >= progress.count && needsMore(each, progress, head));
    await replaceSome(signer, stuck, head);
    const end = Math.max((waiting.at(-1)?.nonce ?? -1) + 1, progress.count);
    const gaps: number[] = [];
    for (let nonce = progress.count; nonce < end && gaps.length < 50; nonce++) {
      if (pendingNonces.of(signer.address, nonce) === undefined) gaps.push(nonce);
    }
    if (gaps.length > 0 || (next ?? 0) > end) resynchronise(signer.address);
    const isIdle = head.number - progress.since >= MISSED_BLOCKS_MAX;
    if (gaps.length > 0 && isIdle) await fill(signer, gaps, head);
  };
}

interface Replacement {
  readonly pendingNonce: PendingNonce;
  readonly content: TransactionContent;
  readonly fees: Fees;
}

function feesOf(row: TransactionRow): Fees {
  return { maxFee: BigInt(row.max_fee), maxPriorityFee: BigInt(row.max_priority_fee) };
}

/**
 * Fees rise by blocks missed, not by what nodes answer: a node that accepts no price would drive them to the cap. Only
 * the first in line counts missed blocks; the others wait for it, unless no block can take them.
 */
function needsMore(pendingNonce: PendingNonce, { count, since }: NonceProgress, head: Block): boolean {
  const row = newestOf(pendingNonce);
  if (isObsolete(pendingNonce) || BigInt(row.max_fee) < head.baseFee) return true;
  // A block number that is yet to come was a node's error, and says nothing.
  const from = row.stored_at_block > head.number ? since : Math.max(row.stored_at_block, since);
  const missed = head.number - from;
  return pendingNonce.nonce === count && missed >= MISSED_BLOCKS_MAX;
}
