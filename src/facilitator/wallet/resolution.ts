// How a payment ends. Settled: a receipt of one of our transactions proves it. Failed: only when none of ours can
// move the money any more, which is read at the hash of a block: the authorization is unused there, and either
// the block's time is past its end, or the nonces of all our transactions for it are used there. When somebody else
// used the wallet's nonce, the payment gets a new one. So does one that failed in a transaction shared with others and
// would go through now: it is sent once more alone, since the cause may have been a neighbour.

import type { Chain } from "../../chain/chain.ts";
import type { Use } from "../../chain/find-use.ts";
import { isOwnTransfer } from "../../chain/own-transfer.ts";
import type { Block, Receipt } from "../../chain/rpc-types.ts";
import { isPaidBy, isUsedUp } from "../../chain/token.ts";
import type { Log } from "../../core/log.ts";
import { mapLimit } from "../../kernel/loop.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import type { Gas, SettleChain } from "../settle/ports.ts";
import { NotClaimed } from "./batch.ts";
import { type End, endOf, isCertainlyUnpaid, revertedOf } from "./end-of-nonce.ts";
import type { Reverted } from "./gas-burned.ts";
import { newestOf, type PendingNonce, type PendingPayment, type UsedNonce } from "./pending.ts";
import { NotKnownYet, names, type OutcomeRecorder } from "./record-outcome.ts";
import { transactionsOf } from "./transactions.ts";

/** The authorization can only be used after the simulation; this many blocks allow for a node that was behind then. */
const BEHIND_BLOCKS = 50;
/** Searches for the transaction that used an authorization before it stays unnamed. */
const LOOK_UPS_MAX = 5;
/** Wallet nonces for one payment. With these used up it waits until its time is over. */
const NONCES_MAX = 4;
/** Payments that share a transaction, judged at a time. */
const PAYMENTS_PARALLEL = 16;

export type Resolver = ReturnType<typeof createPaymentResolver>;

export interface ResolverOptions {
  readonly chain: Chain;
  readonly store: Store;
  readonly log: Log;
  readonly recorder: OutcomeRecorder;
  /** In lower case. */
  readonly ownWallets: () => Promise<ReadonlySet<Hex>>;
  readonly simulate: SettleChain["simulate"];
  /** Sends the payment with a new wallet nonce; resolves when it is stored. */
  readonly send: (payment: PendingPayment, gas: Gas) => Promise<void>;
}

export function isExpired({ authorization }: PendingPayment, head: Block): boolean {
  return BigInt(head.timestamp) >= authorization.validBefore;
}

export function createPaymentResolver(options: ResolverOptions) {
  const { chain, log, recorder } = options;
  const resolveUnpaid = createUnpaidResolver(options);

  /** False when nothing can be said yet. */
  async function resolve(
    payment: PendingPayment,
    pendingNonce: PendingNonce,
    head: Block,
    receipt: Receipt | null,
  ): Promise<boolean> {
    if (receipt !== null && payment.status !== "settled" && isPaidBy(payment.authorization, receipt)) {
      await recorder.settle(payment, receipt);
      return true;
    }
    if (payment.status !== "sent") return true;
    if (payment.moving) return false;
    const own = endOf(pendingNonce, payment, usedBy(pendingNonce, receipt));
    // A transfer of ours that succeeded has moved the money, so a receipt that does not show it is incomplete.
    if (own.how === "moved") return false;
    const others = [...payment.pendingNonces].filter((other) => other !== pendingNonce);
    // A nonce that is still open decides; this one had no part in the outcome.
    if (others.some(({ inclusion }) => inclusion === null)) return true;
    return resolveUnpaid(payment, head, [own, ...others.map((other) => endOf(other, payment, other.inclusion))]);
  }

  /** False when nothing can be said yet. What is thrown about one payment holds up no other. */
  async function resolveAll(pendingNonce: PendingNonce, head: Block, receipt: Receipt | null): Promise<boolean> {
    let failure: unknown = null;
    let isWhole = true;
    await mapLimit([...pendingNonce.payments], PAYMENTS_PARALLEL, async (payment) => {
      try {
        if (!(await resolve(payment, pendingNonce, head, receipt))) isWhole = false;
        else if (payment.status === "failed") await countLate(payment, pendingNonce, head, receipt);
      } catch (error) {
        failure ??= error;
      }
    });
    if (failure !== null) throw failure;
    return isWhole;
  }

  async function countLate(payment: PendingPayment, pendingNonce: PendingNonce, head: Block, receipt: Receipt | null) {
    const end = endOf(pendingNonce, payment, usedBy(pendingNonce, receipt));
    for (const reverted of await charged(chain, payment, head, [end])) await recorder.late(payment, reverted, head);
  }

  return {
    /**
     * The nonce is used in or before `head`: records by whom, and what follows for the payment.
     *
     * @throws Error when nothing can be said yet, and when a node or the database fails; so do the others
     */
    async included(pendingNonce: PendingNonce, head: Block): Promise<void> {
      const receipt = await receiptOf(chain, pendingNonce);
      const used = usedBy(pendingNonce, receipt);
      let isWhole = false;
      try {
        isWhole = await resolveAll(pendingNonce, head, receipt);
      } finally {
        // From here on a reorganisation undoes what is settled. Others that share the nonce are resolved as overdue.
        const isAnySettled = [...pendingNonce.payments].some(({ status }) => status === "settled");
        if (isAnySettled && used !== null) pendingNonce.inclusion = used;
      }
      if (!isWhole) throw new NotKnownYet();
      const { wallet, nonce } = pendingNonce;
      if (receipt === null) log.warn("foreign_nonce_used", { wallet, nonce });
      pendingNonce.inclusion = used ?? {
        hash: null,
        succeeded: false,
        paid: new Set(),
        gasWei: 0n,
        blockNumber: head.number,
        blockHash: head.hash,
      };
    },
    /** A sent payment whose time is past at `head`, or which has no pending nonce left that could make it. */
    async overdue(payment: PendingPayment, head: Block): Promise<void> {
      if (payment.moving) return;
      const ends: End[] = [];
      for (const each of payment.pendingNonces) {
        const receipt = await sharedReceipt(chain, each);
        if (receipt !== null && isPaidBy(payment.authorization, receipt)) return recorder.settle(payment, receipt);
        ends.push(endOf(each, payment, usedBy(each, receipt) ?? each.inclusion));
      }
      if (!(await resolveUnpaid(payment, head, ends))) throw new NotKnownYet();
    },
    /** The block in which the nonce was used is not part of the chain. */
    async reorganised(pendingNonce: PendingNonce): Promise<void> {
      const { payments, inclusion } = pendingNonce;
      log.warn("reorg_detected", {
        transaction: inclusion?.hash ?? newestOf(pendingNonce).hash,
        block: inclusion?.blockNumber,
      });
      for (const payment of payments) {
        if (payment.status === "settled" && inclusion?.paid.has(payment)) await recorder.reopen(payment);
      }
      pendingNonce.inclusion = null;
      pendingNonce.broadcastAt = 0;
    },
  };
}

function createUnpaidResolver({ chain, store, log, recorder, ownWallets, simulate, send }: ResolverOptions) {
  async function sendAgain(payment: PendingPayment, gas: Gas): Promise<true> {
    log.warn("payment_nonce_changed", names(payment));
    payment.moving = true;
    try {
      await send(payment, gas);
    } catch (error) {
      if (!(error instanceof NotClaimed)) throw error;
      // Another process has recorded how it ended, or has sent it once more.
      await recorder.changedElsewhere(payment);
    } finally {
      payment.moving = false;
    }
    return true;
  }

  /** The authorization is used or cancelled: by us, or by whom? */
  async function resolveUsed(payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> {
    // If a nonce was used and no receipt of ours shows it, the use may be our own.
    const isForeign = ends.length > 0 && ends.every(isCertainlyUnpaid);
    const from = payment.sinceBlock - BEHIND_BLOCKS;
    const search = chain.findUse(payment.authorization, from, head.number);
    // The search is only for its name then, and some nodes refuse to search.
    const use = await (isForeign ? search.catch(() => null) : search);
    const reverted = await charged(chain, payment, head, ends);
    if (use === null) {
      if (!isForeign || ++payment.lookUps < LOOK_UPS_MAX) return false;
      const reason = "the authorization was used elsewhere";
      await recorder.fail(payment, { reason, foreign_transaction: null }, reverted, head);
      return true;
    }
    const own = await resolveOwn(payment, use);
    if (own !== null) return own;
    const { hash } = use;
    const how = use.cancelled ? "cancelled" : "used elsewhere";
    const reason = `the authorization was ${how}`;
    await recorder.fail(payment, { reason, foreign_transaction: hash }, reverted, head);
    return true;
  }

  /**
   * A use by a transaction of ours, also by one of which a database that was restored to an older state knows nothing. Null
   * when it is another's, false when nothing can be said yet.
   */
  async function resolveOwn(payment: PendingPayment, { hash, cancelled }: Use): Promise<boolean | null> {
    if (cancelled) return null;
    const receipt = await chain.receipt(hash);
    if (receipt === null) return false;
    const isRecorded = (await transactionsOf(store.read, payment.key)).some((row) => row.hash === hash);
    if (!isRecorded && !isOwnTransfer(receipt, payment.authorization, await ownWallets())) return null;
    if (!isPaidBy(payment.authorization, receipt)) return false;
    await recorder.settle(payment, receipt);
    return true;
  }

  /** Neither ours nor anybody has used it: has the payment failed, or is it sent again? */
  async function resolveUnused(payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> {
    const simulation = await simulate(payment.authorization, payment.signature);
    const isOver = isExpired(payment, head);
    // The two contradict each other, so one of the times is wrong: the simulation's, or the block's.
    if (isOver && simulation.ok) return false;
    const reason = simulation.ok ? "the transaction reverted" : simulation.reason;
    // It was used after all, maybe by us: the next block tells.
    if (isUsedUp(reason)) return false;
    // After a revert alone it is not tried again, even if it would go through now: the cause was on the payer's side.
    if (simulation.ok && !ends.some(({ how }) => how === "reverted"))
      return payment.pendingNonces.size < NONCES_MAX && sendAgain(payment, simulation.gas);
    // What is recorded now is final, so every node is asked for itself whether it knows of a use.
    if (await isUsedByAny(chain, payment)) return false;
    const failure = { reason: isOver ? "expired" : reason, foreign_transaction: null };
    await recorder.fail(payment, failure, await charged(chain, payment, head, ends), head);
    return true;
  }

  /**
   * As far as is known, no transaction of ours has moved the money up to `head`. False when nothing can be said yet.
   *
   * @param ends of all its wallet nonces
   */
  return async (payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> => {
    const isUsed = await chain.isUsed(payment.authorization, head);
    return isUsed ? resolveUsed(payment, head, ends) : resolveUnused(payment, head, ends);
  };
}

async function isUsedByAny(chain: Chain, { authorization }: PendingPayment): Promise<boolean> {
  const views = await chain.views(authorization);
  return (await Promise.all(views.map(({ isUsed }) => isUsed))).includes(true);
}

async function receiptOf(chain: Chain, pendingNonce: PendingNonce): Promise<Receipt | null> {
  const shows = (receipt: Receipt) =>
    [...pendingNonce.payments].every(({ authorization }) => isPaidBy(authorization, receipt));
  for (const { hash } of [...pendingNonce.transactions].reverse()) {
    const receipt = await chain.receipt(hash, shows);
    if (receipt !== null) return receipt;
  }
  return null;
}

/** The receipt of a transaction that used a nonce for several payments. What was taken from the records at the start does not tell of each. */
async function sharedReceipt(chain: Chain, { payments, inclusion }: PendingNonce): Promise<Receipt | null> {
  const hash = inclusion?.hash ?? null;
  return payments.size > 1 && hash !== null ? chain.receipt(hash) : null;
}

/** How our transaction with this receipt used the nonce; null without a receipt. */
function usedBy({ payments }: PendingNonce, receipt: Receipt | null): UsedNonce | null {
  if (receipt === null) return null;
  const { hash, succeeded, gasWei, blockNumber, blockHash } = receipt;
  const paid = new Set([...payments].filter(({ authorization }) => isPaidBy(authorization, receipt)));
  return { hash, succeeded, paid, gasWei, blockNumber, blockHash };
}

/**
 * The reverts that count against the payment's account. In a shared transaction a payment bears its own share. But a
 * payer that has code by now, and had none when it was let in, could have burned the gas of all: it bears the whole.
 */
async function charged(chain: Chain, payment: PendingPayment, head: Block, ends: readonly End[]): Promise<Reverted[]> {
  const isAny = ends.some(({ how }) => how === "failed among others");
  const isWhole = isAny && (await chain.hasCode(payment.authorization.from, head));
  return revertedOf(ends, isWhole);
}
