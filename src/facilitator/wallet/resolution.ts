// How a payment ends. Settled: a receipt of one of our transactions proves it. Failed: only when none of ours can
// move the money any more, which is read at the hash of a block: the authorization is unused there, and either
// the block's time is past its end, or the nonces of all our transactions for it are used there. When somebody else
// used the wallet's nonce, the payment gets a new one.
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import type { Chain } from "../chain/chain.ts";
import type { Block, Receipt } from "../chain/rpc-types.ts";
import { isPaidBy, isUsedUp } from "../chain/token.ts";
import type { Gas, SettleChain } from "../settle/ports.ts";
import { NotClaimed } from "./batch.ts";
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

export type Resolver = ReturnType<typeof createPaymentResolver>;

export interface ResolverOptions {
  readonly chain: Chain;
  readonly store: Store;
  readonly log: Log;
  readonly recorder: OutcomeRecorder;
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
    // A transfer of ours that succeeded has moved the money, so a receipt that does not show it is incomplete.
    if (endOf(pendingNonce, receipt).how === "moved") return false;
    const others = [...payment.pendingNonces].filter((other) => other !== pendingNonce);
    // A nonce that is still open decides; this one had no part in the outcome.
    if (others.some(({ inclusion }) => inclusion === null)) return true;
    const ends = [endOf(pendingNonce, receipt), ...others.map((other) => endOf(other, other.inclusion))];
    return resolveUnpaid(payment, head, ends);
  }

  return {
    /**
     * The nonce is used in or before `head`: records by whom, and what follows for the payment.
     *
     * @throws Error when nothing can be said yet, and when a node or the database fails; so do the others
     */
    async included(pendingNonce: PendingNonce, head: Block): Promise<void> {
      const { payment } = pendingNonce;
      const receipt = await receiptOf(chain, pendingNonce);
      if (payment !== null && !(await resolve(payment, pendingNonce, head, receipt))) throw new NotKnownYet();
      const [reverted] = revertedOf([endOf(pendingNonce, receipt)]);
      if (payment?.status === "failed" && reverted !== undefined) await recorder.late(payment, reverted);
      if (receipt === null) {
        log.warn("foreign_nonce_used", {
          wallet: pendingNonce.wallet,
          nonce: pendingNonce.nonce,
        });
        pendingNonce.inclusion = {
          hash: null,
          succeeded: false,
          gasWei: 0n,
          blockNumber: head.number,
          blockHash: head.hash,
        };
      } else {
        const { hash, succeeded, gasWei, blockNumber, blockHash } = receipt;
        pendingNonce.inclusion = { hash, succeeded, gasWei, blockNumber, blockHash };
      }
    },
    /** A sent payment whose time is past at `head`, or which has no pending nonce left that could make it. */
    async overdue(payment: PendingPayment, head: Block): Promise<void> {
      if (payment.moving) return;
      const ends = [...payment.pendingNonces].map((pendingNonce) => endOf(pendingNonce, pendingNonce.inclusion));
      if (!(await resolveUnpaid(payment, head, ends))) throw new NotKnownYet();
    },
    /** The block in which the nonce was used is not part of the chain. */
    async reorganised(pendingNonce: PendingNonce): Promise<void> {
      const { payment, inclusion } = pendingNonce;
      log.warn("reorg_detected", {
        transaction: inclusion?.hash ?? newestOf(pendingNonce).hash,
        block: inclusion?.blockNumber,
      });
      if (payment?.status === "settled" && isTransfer(pendingNonce, inclusion?.hash)) await recorder.reopen(payment);
      pendingNonce.inclusion = null;
      pendingNonce.broadcastAt = 0;
    },
  };
}

function createUnpaidResolver({ chain, store, log, recorder, simulate, send }: ResolverOptions) {
  async function sendAgain(payment: PendingPayment, gas: Gas): Promise<true> {
    log.warn("payment_nonce_changed", names(payment));
    payment.moving = true;
    try {
      await send(payment, gas);
    } catch (error) {
      if (!(error instanceof NotClaimed)) throw error;
      // Another process has recorded how it ended.
      await recorder.reread(payment);
    } finally {
      payment.moving = false;
    }
    return true;
  }

  /** The authorization is used or cancelled: by us, or by whom? */
  async function resolveUsed(payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> {
    // If a nonce was used and no receipt of ours shows it, the use may be our own.
    const isForeign = ends.length > 0 && ends.every(({ how }) => how === "reverted" || how === "nothing");
    const from = payment.sinceBlock - BEHIND_BLOCKS;
    const search = chain.findUse(payment.authorization, from, head.number);
    // The search is only for its name then, and some nodes refuse to search.
    const use = await (isForeign ? search.catch(() => null) : search);
    const reverted = revertedOf(ends);
    if (use === null) {
      if (!isForeign || ++payment.lookUps < LOOK_UPS_MAX) return false;
      const reason = "the authorization was used elsewhere";
      await recorder.fail(payment, { reason, foreign_transaction: null }, reverted);
      return true;
    }
    const { hash } = use;
    if ((await transactionsOf(store.read, payment.key)).some((row) => row.hash === hash)) {
      return resolveOwn(payment, hash);
    }
    const how = use.cancelled ? "cancelled" : "used elsewhere";
    const reason = `the authorization was ${how}`;
    await recorder.fail(payment, { reason, foreign_transaction: hash }, reverted);
    return true;
  }

  async function resolveOwn(payment: PendingPayment, hash: Hex): Promise<boolean> {
    const receipt = await chain.receipt(hash);
    if (receipt === null || !isPaidBy(payment.authorization, receipt)) return false;
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
    // After a revert it is not tried again, even if it would go through now: the cause was on the payer's side.
    const reverted = revertedOf(ends);
    if (!simulation.ok || reverted.length > 0) {
      const failure = { reason: isOver ? "expired" : reason, foreign_transaction: null };
      await recorder.fail(payment, failure, reverted);
      return true;
    }
    return payment.pendingNonces.size < NONCES_MAX && sendAgain(payment, simulation.gas);
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

async function receiptOf(chain: Chain, pendingNonce: PendingNonce): Promise<Receipt | null> {
  for (const { hash } of [...pendingNonce.transactions].reverse()) {
    const receipt = await chain.receipt(hash);
    if (receipt !== null) return receipt;
  }
  return null;
}

/**
 * What became of one wallet nonce of a payment: our transfer succeeded or reverted, a transaction of ours did nothing,
 * or none of ours is known to have used it.
 */
interface End {
  readonly how: "moved" | "reverted" | "nothing" | "unknown";
  readonly hash: Hex | null;
  readonly gasWei: bigint;
}

function endOf(pendingNonce: PendingNonce, by: Pick<UsedNonce, "hash" | "succeeded" | "gasWei"> | null): End {
  if (by === null || by.hash === null) return { how: "unknown", hash: null, gasWei: 0n };
  const { hash, gasWei } = by;
  if (!isTransfer(pendingNonce, by.hash)) return { how: "nothing", hash, gasWei };
  return { how: by.succeeded ? "moved" : "reverted", hash, gasWei };
}

function revertedOf(ends: readonly End[]): Reverted[] {
  return ends.flatMap(({ how, hash, gasWei }) => (how === "reverted" && hash !== null ? [{ hash, gasWei }] : []));
}

/** Whether it is one of the pending nonce's transfers, and not a transaction that only used up the nonce. */
function isTransfer(pendingNonce: PendingNonce, hash: Hex | null | undefined): boolean {
  return pendingNonce.transactions.some((row) => row.hash === hash && row.payer !== null);
}
