// Watches the chain while any work is open: polls for new blocks and reconciles the wallets' nonces and payments with each. A
// reconciliation finds which wallet nonces are used, resolves their payments, closes what is final, undoes what a reorganisation
// removed, and replaces what is stuck. Each step may fail, and is repeated in the next round; nothing is dropped before it is stored.
import type { Chain } from "../../chain/chain.ts";
import { type Fees, freeingFees, quoteFees, raiseFees, type Tip } from "../../chain/fees.ts";
import type { Block } from "../../chain/json-rpc.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { UniqueViolation } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import type { PaymentSpans } from "../payments/payment-spans.ts";
import { isObsolete, newestOf, type PendingNonce, type PendingPayment, type WalletParts } from "./pending.ts";
import { isExpired, type Resolver } from "./resolution.ts";
import type { Sender } from "./sender.ts";
import type { Signer } from "./signer.ts";
import type { TransactionContent, TransactionRow } from "./transactions.ts";
import { closeNonces, contentOf, insertTransactions, pays, reopenNonces, signRow } from "./transactions.ts";

/** The interval while a transaction or a payment waits for a block. */
const POLL_MS = 150;
/** The interval while inclusions only await their confirmations. */
const CALM_POLL_MS = 1000;
/** How soon a failed step, or a node's response, has the chain checked again even without a new block. */
const LOOK_AGAIN_MS = 1000;
const QUESTIONS_PARALLEL = 16;
const WALLETS_PARALLEL = 4;

interface WatcherOptions extends WalletParts {
  readonly senders: ReadonlyMap<Hex, Sender>;
  readonly resolver: Resolver;
  readonly refresh: () => Promise<void>;
  readonly spans: PaymentSpans;
}

export function createWatcher(options: WatcherOptions) {
  const { chain, log, pendingNonces, refresh } = options;
  const { broadcast, stop: stopBroadcasts } = createBroadcaster(options);
  const reconcile = createReconcile(options, attempt);
  let seen: Block | null = null;
  /** When to reconcile even without a new block (performance.now). */
  let lookAt = Number.POSITIVE_INFINITY;
  /** When the next round begins (performance.now). */
  let nextAt = Number.POSITIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let round: Promise<void> | null = null;
  let stopped = false;

  function lookAgain(): void {
    lookAt = Math.min(lookAt, performance.now() + LOOK_AGAIN_MS);
  }

  /** Runs a step whose failure must not hold up the others. Never rejects. */
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
      // This reconciliation satisfies all earlier requests for one.
      lookAt = Number.POSITIVE_INFINITY;
      await refresh();
      await reconcile(at);
      seen = at;
    }
    broadcast();
  }

  function isWaiting(): boolean {
    const isAnySent = pendingNonces.payments().some(({ status }) => status === "sent");
    return isAnySent || pendingNonces.all().some(pendingNonces.isOpen);
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

/** Reconciles nonces and payments with the chain, as of the newest block `at`. Never rejects. */
function createReconcile(options: WatcherOptions, attempt: (step: string, work: () => Promise<void>) => Promise<void>) {
  const { chain, store, leases, pendingNonces, senders, resolver, limits } = options;
  const replace = createReplacer(options);
  const undoReorganised = createReorganised(options);
  const progresses = new Map<Hex, NonceProgress>();

  async function progressOf(wallet: Hex, waiting: readonly PendingNonce[], at: Block): Promise<NonceProgress> {
    const known = progresses.get(wallet);
    const highest = waiting.findLast(pendingNonces.isOpen)?.nonce ?? -1;
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
    // A nonce that counted as used by somebody else may turn out to be unused.
    for (const each of included(pendingNonces.all())) {
      const isForeign = each.wallet === wallet && each.inclusion?.hash === null;
      if (isForeign && each.nonce >= progress.count) await resolver.reorganised(each);
    }
    const used = waiting.filter(({ nonce }) => nonce < progress.count);
    await mapLimit(used, QUESTIONS_PARALLEL, (pendingNonce) =>
      attempt("included", () => resolver.included(pendingNonce, at)),
    );
    const sender = senders.get(wallet);
    // Without its key configured, a wallet's transactions are still watched and broadcast, but can't be replaced. Another
    // process's transactions are only watched, as far as a payment of ours depends on them.
    if (sender !== undefined && leases.holds(wallet)) await replace(sender.signer, progress, sender.next(), at);
  }

  function overdue(at: Block): PendingPayment[] {
    return [...pendingNonces.payments()].filter((payment) => {
      if (payment.status !== "sent") return false;
      return isExpired(payment, at) || ![...payment.pendingNonces].some(pendingNonces.isOpen);
    });
  }

  async function closeDeep(at: Block): Promise<void> {
    const deep = included(pendingNonces.all()).filter(({ inclusion, payments }) => {
      const isDeep = inclusion !== null && at.number - inclusion.blockNumber >= limits.confirmations;
      return isDeep && [...payments].every(({ status }) => status !== "sent");
    });
    if (deep.length === 0) return;
    const { kept, lost } = await sift(chain, deep);
    for (const pendingNonce of lost) await resolver.reorganised(pendingNonce);
    if (kept.length > 0) await store.write((tx) => closeNonces(tx, kept));
    for (const pendingNonce of kept) pendingNonces.remove(pendingNonce);
  }

  return async (at: Block): Promise<void> => {
    await attempt("reorganised", () => undoReorganised(at));
    const wallets = pendingNonces.wallets();
    await mapLimit(wallets, WALLETS_PARALLEL, (wallet) => attempt("wallet", () => lookAtWallet(wallet, at)));
    const late = overdue(at);
    await mapLimit(late, QUESTIONS_PARALLEL, (each) => attempt("overdue", () => resolver.overdue(each, at)));
    await attempt("close", () => closeDeep(at));
    for (const payment of pendingNonces.payments()) pendingNonces.forget(payment);
  };
}

/** Finds reorganisations. While each block is the child of the last one seen, no request to a node is needed. */
function createReorganised({ chain, pendingNonces, resolver }: WatcherOptions): (at: Block) => Promise<void> {
  let head: Block | null = null;
  /** Whether some block with a transaction of ours is not yet confirmed to be part of the present chain. */
  let isDoubtful = false;
  return async (at) => {
    if (head !== null && head.hash !== at.hash && head.hash !== at.parentHash) isDoubtful = true;
    head = at;
    if (!isDoubtful) return;
    const { lost, isComplete } = await sift(chain, included(pendingNonces.all()));
    for (const pendingNonce of lost) await resolver.reorganised(pendingNonce);
    isDoubtful = !isComplete;
  };
}

const included = (pendingNonces: Iterable<PendingNonce>): PendingNonce[] =>
  [...pendingNonces].filter(({ inclusion }) => inclusion !== null);

/** Divides included nonces by whether their block is part of the chain. A block that no node knows leaves its nonces out. */
async function sift(chain: Chain, pendingNonces: readonly PendingNonce[]) {
  const byBlock = Map.groupBy(pendingNonces, ({ inclusion }) => inclusion?.blockNumber ?? 0);
  const kept: PendingNonce[] = [];
  const lost: PendingNonce[] = [];
  let isComplete = true;
  await mapLimit(byBlock, QUESTIONS_PARALLEL, async ([number, those]) => {
    const hash = await chain.blockHash(number);
    if (hash === null) isComplete = false;
    else for (const each of those) (each.inclusion?.blockHash === hash ? kept : lost).push(each);
  });
  return { kept, lost, isComplete };
}

// Stored transactions are broadcast as often as it takes. A node's response changes no record; it only decides when the chain is
// checked. A wallet's nonces keep moving by replacement at the same nonce with a higher fee, and by filling a nonce without a
// transaction. Both are stored first, and both count blocks, not time, so that a chain that stands still is waited for.

/** Broadcasts in flight. Nodes keep few transactions of one sender that arrive out of order, so the number is small. */
const PARALLEL = 16;

/** Blocks that a transaction may miss before it is replaced, or a nonce may stay empty before it is filled. */
const MISSED_BLOCKS_MAX = 3;

function createBroadcaster(options: WatcherOptions) {
  const { chain, log, leases, pendingNonces, spans, resynchronise, lookAgain } = options;
  const { rebroadcastMs = 5_000 } = options.limits;
  const queue = new Set<PendingNonce>();
  const inFlight = new Map<PendingNonce, Promise<void>>();
  let stopped = false;

  async function broadcastNewest(pendingNonce: PendingNonce): Promise<void> {
    const row = newestOf(pendingNonce);
    // The first node may still hold the transaction, or one that it replaces, while others have dropped it.
    const everywhere = pendingNonce.broadcasts++ > 0 || row.replacement > 0;
    const paid = pendingNonce.payments.values().map(({ key }) => key);
    const reception = await spans.within(paid, () => chain.broadcast(row.raw, everywhere));
    // The response is irrelevant if the transaction was replaced or included meanwhile.
    if (newestOf(pendingNonce) !== row || pendingNonce.inclusion !== null) return;
    pendingNonce.broadcastAt = performance.now() + (reception === "accepted" ? rebroadcastMs : 1_000);
    if (reception === "accepted") return;
    log.debug("transaction_not_accepted", { transaction: row.hash, reception });
    if (reception === "underpriced") await broadcastOver(pendingNonce);
    if (reception !== "nonce used") return;
    // A nonce that should be free is used, so chain and store are asked again.
    resynchronise(pendingNonce.wallet);
    lookAgain();
  }

  /**
   * When nodes refuse an empty replacement as underpriced, some node holds the older transfer but may not have passed it on.
   * Once its payments have expired by the newest block, the transfer can't move money, so it is broadcast to free the nonce.
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
      .filter((pendingNonce) => pendingNonce.broadcastAt <= now && pendingNonces.isOpen(pendingNonce))
      .filter((pendingNonce) => !inFlight.has(pendingNonce) && !isObsolete(pendingNonce));
    const again = new Set(noncesDue.filter(({ broadcasts }) => broadcasts > 0).slice(0, 50));
    return noncesDue.filter((pendingNonce) => pendingNonce.broadcasts === 0 || again.has(pendingNonce));
  }

  function pump(): void {
    for (const pendingNonce of queue) {
      if (inFlight.size >= PARALLEL) return;
      queue.delete(pendingNonce);
      // A process that was paused may have lost the wallet meanwhile.
      if (!leases.holds(pendingNonce.wallet)) continue;
      const broadcasting = broadcastNewest(pendingNonce)
        .catch((error: unknown) => log.error("broadcast_failed", { error }))
        .finally(() => {
          inFlight.delete(pendingNonce);
          if (!stopped) pump();
        });
      inFlight.set(pendingNonce, broadcasting);
    }
  }

  return {
    /** Starts to broadcast the transactions that are due, except those in flight, and does not wait for them. */
    broadcast(): void {
      if (stopped) return;
      const now = performance.now();
      for (const wallet of pendingNonces.wallets()) {
        if (!leases.holds(wallet)) continue;
        for (const pendingNonce of due(wallet, now)) queue.add(pendingNonce);
      }
      pump();
    },
    /** Drops the queue, and resolves when no broadcast is in flight. */
    async stop(): Promise<void> {
      stopped = true;
      queue.clear();
      await Promise.all(inFlight.values());
    },
  };
}

/** A wallet's nonces below `count` are used, and the count has not changed since the block `since`. */
interface NonceProgress {
  readonly count: number;
  readonly since: number;
}

function createReplacer(parts: WalletParts) {
  const { chain, store, clock, log, leases, pendingNonces, reload, resynchronise } = parts;
  const { maxFee } = parts.limits;

  /** The content for those of the nonce's payments that may still be made. */
  function openContent({ wallet, payments, transactions }: PendingNonce, head: Block): TransactionContent {
    const open = [...payments].filter((payment) => payment.status === "sent" && !isExpired(payment, head));
    const transfers = open.flatMap((payment) => {
      const row = transactions.findLast((each) => pays(each, payment.key));
      const gas = row?.payments.find(({ nonce }) => nonce === payment.key.nonce)?.gas;
      return gas === undefined ? [] : [{ payment, gas }];
    });
    return contentOf(chain.network, wallet, transfers);
  }

  /** A replacement for the nonce's newest transaction; null when the fees can't be raised now. */
  function replacementOf(pendingNonce: PendingNonce, head: Block, tip: Tip): Replacement | null {
    const before = newestOf(pendingNonce);
    const content = openContent(pendingNonce, head);
    // A payment that the replacement leaves out must not land, so the replacement has to outbid its predecessor.
    const isFreeing = content.payments.length < before.payments.length;
    const paid = { maxFee: BigInt(before.max_fee), maxPriorityFee: BigInt(before.max_priority_fee) };
    const fees = (isFreeing ? freeingFees : raiseFees)(paid, head.baseFee, tip, maxFee);
    return fees === null ? null : { pendingNonce, content, fees };
  }

  async function replace(signer: Signer, { pendingNonce, content, fees }: Replacement, head: Block): Promise<void> {
    const before = newestOf(pendingNonce);
    const replacement = before.replacement + 1;
    const position = { nonce: pendingNonce.nonce, replacement, fees, block: head.number, now: clock.now() };
    const row = await signRow(signer, content, position);
    if (pendingNonce.inclusion !== null || !(await storeRows(signer.address, [row]))) return;
    pendingNonces.add(row, [...pendingNonce.payments]);
    const { wallet, wallet_nonce: nonce, hash: transaction } = row;
    log.info("transaction_replaced", { wallet, nonce, before: before.hash, transaction });
  }

  /** Replaces up to 50 of the stuck transactions whose fees can be raised; the others hold up nothing. */
  async function replaceSome(signer: Signer, stuck: readonly PendingNonce[], head: Block): Promise<void> {
    if (stuck.length === 0) return;
    const tip = await chain.tip();
    const found = stuck.map((pendingNonce) => replacementOf(pendingNonce, head, tip));
    const replacements = found.filter((each) => each !== null);
    await mapLimit(replacements.slice(0, 50), signer.parallel, (each) => replace(signer, each, head));
  }

  async function fill(signer: Signer, gaps: readonly number[], head: Block): Promise<void> {
    // The nonces may have closed transactions, used deep in the chain once and unused again now: these are broadcast first.
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
    if (!(await storeRows(signer.address, rows))) return;
    for (const row of rows) pendingNonces.add(row, []);
    log.warn("nonce_gap_filled", { wallet: signer.address, nonces: gaps });
  }

  /** Stores the rows. False, with no broadcast allowed, when another process has taken a nonce. @throws WalletNotHeld */
  async function storeRows(wallet: Hex, rows: readonly TransactionRow[]): Promise<boolean> {
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

  /** Replaces and fills the nonces within reach that need it at `head`. @param next the sender's next nonce, if known */
  return async (signer: Signer, progress: NonceProgress, next: number | null, head: Block): Promise<void> => {
    const waiting = pendingNonces.waiting(signer.address).filter(pendingNonces.isOpen);
    const stuck = waiting.filter((each) => each.nonce >= progress.count && needsReplacement(each, progress, head));
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

/**
 * Whether a replacement is due. Fees rise by missed blocks, not by nodes' responses: a node that accepts no price would drive
 * them to the cap. Only the first nonce in line counts missed blocks; later ones wait, unless their fee is below the base fee.
 */
function needsReplacement(pendingNonce: PendingNonce, { count, since }: NonceProgress, head: Block): boolean {
  const row = newestOf(pendingNonce);
  if (isObsolete(pendingNonce) || BigInt(row.max_fee) < head.baseFee) return true;
  // A stored block number above the head was a node's error, and is ignored.
  const from = row.stored_at_block > head.number ? since : Math.max(row.stored_at_block, since);
  const missed = head.number - from;
  return pendingNonce.nonce === count && missed >= MISSED_BLOCKS_MAX;
}
