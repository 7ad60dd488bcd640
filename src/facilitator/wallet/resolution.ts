// How a payment ends. Settled: a receipt of one of our transactions proves it. Failed: only when none of ours can
// move the money any more, which is read at the hash of a block: the authorization is unused there and either
// the block's time is past its end, or the nonces of all our transactions for it are used there. A nonce of the
// wallet that somebody else used takes the payment to a new one.
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

/** A use of the authorization must lie after the simulation; this many blocks allow for a node that lay behind. */
const BEHIND_BLOCKS = 50;
/** Searches for the transaction that used an authorization before it stays unnamed. */
const LOOK_UPS_MAX = 5;
/** Wallet nonces for one payment. When they are gone it waits for its end. */
const SLOTS_MAX = 4;

export interface Resolver {
  /**
   * The pending nonce's nonce is used in or before `head`: notes by whom, and what follows for the payment.
   *
   * @throws Error when nothing can be said yet, and when a node or the database fails; so do the others
   */
  included(pendingNonce: PendingNonce, head: Block): Promise<void>;
  /** A payment that is sent, whose time is past at `head` or which has no pending nonce left that could make it. */
  overdue(payment: PendingPayment, head: Block): Promise<void>;
  /** The block in which the pending nonce's nonce was used is not part of the chain. */
  reorganised(pendingNonce: PendingNonce): Promise<void>;
}

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

export function createPaymentResolver(options: ResolverOptions): Resolver {
  const { chain, log, recorder } = options;
  const judgeUnpaid = createJudgeUnpaid(options);

  /** False when nothing can be said yet. */
  async function judge(
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
    // One of ours that succeeded has moved the money: a receipt without that is not the whole one.
    if (endOf(pendingNonce, receipt).how === "moved") return false;
    const others = [...payment.pendingNonces].filter((other) => other !== pendingNonce);
    // A pending nonce that is still open decides, and then this one had no part in it.
    if (others.some(({ inclusion }) => inclusion === null)) return true;
    const ends = [endOf(pendingNonce, receipt), ...others.map((other) => endOf(other, other.inclusion))];
    return judgeUnpaid(payment, head, ends);
  }

  return {
    async included(pendingNonce, head) {
      const { payment } = pendingNonce;
      const receipt = await receiptOf(chain, pendingNonce);
      if (payment !== null && !(await judge(payment, pendingNonce, head, receipt))) throw new NotKnownYet();
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
    async overdue(payment, head) {
      if (payment.moving) return;
      const ends = [...payment.pendingNonces].map((pendingNonce) =>
        endOf(pendingNonce, pendingNonce.inclusion),
      );
      if (!(await judgeUnpaid(payment, head, ends))) throw new NotKnownYet();
    },
    async reorganised(pendingNonce) {
      const { payment, inclusion } = pendingNonce;
      log.warn("reorg_detected", {
        transaction: inclusion?.hash ?? newestOf(pendingNonce).hash,
        block: inclusion?.blockNumber,
      });
      if (payment?.status === "settled" && isTransfer(pendingNonce, inclusion?.hash))
        await recorder.reopen(payment);
      pendingNonce.inclusion = null;
      pendingNonce.broadcastAt = 0;
    },
  };
}

/**
 * None of ours has moved the money in or before `head`, as far as is known. False when nothing can be said yet.
 *
 * @param ends of all its wallet nonces
 */
type JudgeUnpaid = (payment: PendingPayment, head: Block, ends: readonly End[]) => Promise<boolean>;

function createJudgeUnpaid({ chain, store, log, recorder, simulate, send }: ResolverOptions): JudgeUnpaid {
  async function sendAgain(payment: PendingPayment, gas: Gas): Promise<true> {
    log.warn("payment_nonce_changed", names(payment));
    payment.moving = true;
    try {
      await send(payment, gas);
    } catch (error) {
      if (!(error instanceof NotClaimed)) throw error;
      // Another process has found out how it ended.
      await recorder.reread(payment);
    } finally {
      payment.moving = false;
    }
    return true;
  }

  /** The authorization is used or cancelled: by us, or by whom? */
  async function judgeUsed(payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> {
    // Where a nonce was used without a receipt of ours, the use may be our own.
    const isForeign = ends.length > 0 && ends.every(({ how }) => how === "reverted" || how === "nothing");
    const from = payment.sinceBlock - BEHIND_BLOCKS;
    const search = chain.findUse(payment.authorization, from, head.number);
    // It is for the name alone then, and some nodes search for none.
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
      return judgeOwn(payment, hash);
    }
    const how = use.cancelled ? "cancelled" : "used elsewhere";
    const reason = `the authorization was ${how}`;
    await recorder.fail(payment, { reason, foreign_transaction: hash }, reverted);
    return true;
  }

  async function judgeOwn(payment: PendingPayment, hash: Hex): Promise<boolean> {
    const receipt = await chain.receipt(hash);
    if (receipt === null || !isPaidBy(payment.authorization, receipt)) return false;
    await recorder.settle(payment, receipt);
    return true;
  }

  /** Neither ours nor anybody has used it: has the payment failed, or is it sent again? */
  async function judgeUnused(payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> {
    const simulation = await simulate(payment.authorization, payment.signature);
    const isOver = isExpired(payment, head);
    // Only a wrong time makes one of these: the token's own look at it, or the block's.
    if (isOver && simulation.ok) return false;
    const reason = simulation.ok ? "the transaction reverted" : simulation.reason;
    // Used after all, maybe by us: the next block tells.
    if (isUsedUp(reason)) return false;
    // If it would go through now, it is not tried again: what made it revert was a matter of the payer's side.
    const reverted = revertedOf(ends);
    if (!simulation.ok || reverted.length > 0) {
      const failure = { reason: isOver ? "expired" : reason, foreign_transaction: null };
      await recorder.fail(payment, failure, reverted);
      return true;
    }
    return payment.pendingNonces.size < SLOTS_MAX && sendAgain(payment, simulation.gas);
  }

  return async (payment, head, ends) => {
    const isUsed = await chain.isUsed(payment.authorization, head);
    return isUsed ? judgeUsed(payment, head, ends) : judgeUnused(payment, head, ends);
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
  return ends.flatMap(({ how, hash, gasWei }) =>
    how === "reverted" && hash !== null ? [{ hash, gasWei }] : [],
  );
}

/** Whether it is one of the pending nonce's transfers, and not a transaction that only used up the nonce. */
function isTransfer(pendingNonce: PendingNonce, hash: Hex | null | undefined): boolean {
  return pendingNonce.transactions.some((row) => row.hash === hash && row.payer !== null);
}
