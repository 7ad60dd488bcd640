// What is stored goes to the nodes, as often as it takes. A node's answer changes no record; it only says when to look at
// the chain. What keeps a wallet's nonces moving is replacement at the same nonce with a higher fee, and filling a nonce at
// which we have no transaction. Both are stored first, and count blocks and not time, so a chain that stands still is waited for.
import { type Fees, freeingFees, quoteFees, raiseFees } from "../../chain/fees.ts";
import type { Block } from "../../chain/json-rpc.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { UniqueViolation } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { createPaymentSpans, type PaymentSpans } from "../payments/payment-spans.ts";
import { isObsolete, newestOf, type PendingNonce, type PendingPayment, type WalletParts } from "./pending.ts";
import { isExpired } from "./resolution.ts";
import type { Signer } from "./signer.ts";
import {
  contentOf,
  insertTransactions,
  pays,
  reopenNonces,
  signRow,
  type TransactionContent,
  type TransactionRow,
} from "./transactions.ts";

/** Nodes keep few transactions of one sender that arrive out of order, so not many are sent at a time. */
const PARALLEL = 16;
/** Transactions of one wallet that are broadcast again in one go, lowest nonce first. */
const AGAIN_MAX = 50;
const AGAIN_MS = 5000;
const RETRY_MS = 1000;

/** Blocks that a transaction may miss before it is replaced, or a nonce may stay empty before it is filled. */
const MISSED_BLOCKS_MAX = 3;

interface BroadcasterOptions extends WalletParts {
  /** Until what a node has accepted is broadcast again. Tests shorten it. */
  readonly againMs: number | undefined;
  /** Left out where traces are off. */
  readonly spans: PaymentSpans | undefined;
}

export function createBroadcaster(options: BroadcasterOptions) {
  const { chain, log, leases, pendingNonces, resynchronise, lookAgain, againMs = AGAIN_MS } = options;
  const { spans = createPaymentSpans(null) } = options;
  const queue = new Set<PendingNonce>();
  const underWay = new Map<PendingNonce, Promise<void>>();
  let stopped = false;

  async function broadcastNewest(pendingNonce: PendingNonce): Promise<void> {
    const row = newestOf(pendingNonce);
    // The first node may hold the transaction before this one, while others have forgotten it.
    const everywhere = pendingNonce.broadcasts++ > 0 || row.replacement > 0;
    const paid = pendingNonce.payments.values().map(({ key }) => key);
    const reception = await spans.within(paid, () => chain.broadcast(row.raw, everywhere));
    // It was replaced meanwhile, or is in a block: the answer means nothing then.
    if (newestOf(pendingNonce) !== row || pendingNonce.inclusion !== null) return;
    pendingNonce.broadcastAt = performance.now() + (reception === "accepted" ? againMs : RETRY_MS);
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
      .filter((pendingNonce) => !underWay.has(pendingNonce) && !isObsolete(pendingNonce));
    const again = new Set(noncesDue.filter(({ broadcasts }) => broadcasts > 0).slice(0, AGAIN_MAX));
    return noncesDue.filter((pendingNonce) => pendingNonce.broadcasts === 0 || again.has(pendingNonce));
  }

  function pump(): void {
    for (const pendingNonce of queue) {
      if (underWay.size >= PARALLEL) return;
      queue.delete(pendingNonce);
      // A process that was paused may have lost it meanwhile.
      if (!leases.holds(pendingNonce.wallet)) continue;
      const saying = broadcastNewest(pendingNonce)
        .catch((error: unknown) => log.error("broadcast_failed", { error }))
        .finally(() => {
          underWay.delete(pendingNonce);
          if (!stopped) pump();
        });
      underWay.set(pendingNonce, saying);
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
      await Promise.all(underWay.values());
    },
  };
}

/** Nonces of a wallet below `count` are used, since that block. */
export interface NonceProgress {
  readonly count: number;
  readonly since: number;
}

export type Replacer = ReturnType<typeof createReplacer>;

export function createReplacer(parts: WalletParts) {
  const { chain, store, clock, log, leases, pendingNonces, maxFee, reload, resynchronise } = parts;

  /** Those of its payments that may still be made. */
  function content({ wallet, payments, transactions }: PendingNonce, head: Block): TransactionContent {
    const open = [...payments].filter((payment) => payment.status === "sent" && !isExpired(payment, head));
    const transfers = open.flatMap((payment) => {
      const row = transactions.findLast((each) => pays(each, payment.key));
      const gas = row?.payments.find(({ nonce }) => nonce === payment.key.nonce)?.gas;
      return gas === undefined ? [] : [{ payment, gas }];
    });
    return contentOf(wallet, transfers);
  }

  /** The transaction that replaces its newest one; null when the fees can't be raised now. */
  function replacementOf(pendingNonce: PendingNonce, head: Block, tip: bigint): Replacement | null {
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
      rows.push(await signRow(signer, contentOf(signer.address, []), position));
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

  /** Replaces and fills what needs it at `head`. @param next the nonce that a new payment would get, if it is known */
  return async (signer: Signer, progress: NonceProgress, next: number | null, head: Block): Promise<void> => {
    const waiting = pendingNonces.waiting(signer.address).filter(({ nonce }) => nonce >= progress.count);
    const stuck = waiting.filter((pendingNonce) => needsMore(pendingNonce, progress, head));
    await replaceSome(signer, stuck, head);
    // Nonces up to one far ahead are not filled.
    const end = (waiting.findLast(pendingNonces.isInReach)?.nonce ?? progress.count - 1) + 1;
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
