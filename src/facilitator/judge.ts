// How a payment ends. Settled: a receipt of one of our transactions proves it. Failed: only when none of ours can
// move the money any more, which is read at the hash of a block: the authorization is unused there and either
// the block's time is past its end, or the nonces of all our transactions for it are used there. A nonce of the
// wallet that somebody else used takes the payment to a new one.
import type { Log } from "../core/log.ts";
import type { Store } from "../storage/store.ts";
import type { Hex } from "../x402/types.ts";
import type { Chain } from "./chain.ts";
import { newestOf, type OpenPayment, type Slot } from "./slots.ts";
import { isPaidBy } from "./token.ts";
import { transactionsOf } from "./transactions.ts";
import { names, type Verdicts } from "./verdicts.ts";
import type { Block, Receipt } from "./wire.ts";

/** A use of the authorization must lie after the simulation; this many blocks allow for a node that lay behind. */
const BEHIND_BLOCKS = 50;
/** Searches for the transaction that used an authorization before it stays unnamed. */
const LOOK_UPS_MAX = 5;
/** Wallet nonces for one payment. When they are gone it waits for its end. */
const SLOTS_MAX = 4;

/** What can't be said yet is asked again: it is thrown, like the failures of a node. */
class NotKnownYet extends Error {
  override readonly name = "NotKnownYet";
}

export interface Judge {
  /**
   * The slot's nonce is used in or before `head`: notes by whom, and what follows for the payment.
   *
   * @throws Error when nothing can be said yet, and when a node or the database fails; so do the others
   */
  included(slot: Slot, head: Block): Promise<void>;
  /** A payment that is sent, whose time is past at `head` or which has no slot left that could make it. */
  overdue(payment: OpenPayment, head: Block): Promise<void>;
  /** The block in which the slot's nonce was used is not part of the chain. */
  reorganised(slot: Slot): Promise<void>;
}

export interface JudgeOptions {
  readonly chain: Chain;
  readonly store: Store;
  readonly log: Log;
  readonly verdicts: Verdicts;
  /** Sends the payment with a new wallet nonce; resolves when it is stored. */
  readonly send: (payment: OpenPayment, gas: bigint) => Promise<void>;
}

export function isExpired({ authorization }: OpenPayment, head: Block): boolean {
  return BigInt(head.timestamp) >= authorization.validBefore;
}

export function createJudge({ chain, store, log, verdicts, send }: JudgeOptions): Judge {
  /**
   * None of ours has moved the money in or before `head`, as far as is known. False when nothing can be said yet.
   *
   * @param reverted a transaction of ours is in a block and did not succeed
   */
  async function judgeUnpaid(payment: OpenPayment, head: Block, reverted: boolean): Promise<boolean> {
    const { authorization, signature } = payment;
    if (await chain.isUsed(authorization, head.hash)) return judgeUsed(payment, head, reverted);
    if (isExpired(payment, head)) {
      await verdicts.fail(payment, "expired");
      return true;
    }
    const simulation = await chain.simulate(authorization, signature);
    // If it would go through now, it is not tried again: what made it revert was a matter of the payer's side.
    if (!simulation.ok || reverted) {
      await verdicts.fail(payment, simulation.ok ? "the transaction reverted" : simulation.reason);
      return true;
    }
    if (payment.slots.size >= SLOTS_MAX) return false;
    log.warn("a payment gets another wallet nonce", names(payment));
    payment.moving = true;
    try {
      await send(payment, simulation.gas);
    } finally {
      payment.moving = false;
    }
    return true;
  }

  /** The authorization is used or cancelled: by us, or by whom? */
  async function judgeUsed(payment: OpenPayment, head: Block, reverted: boolean): Promise<boolean> {
    const from = payment.sinceBlock - BEHIND_BLOCKS;
    const use = await chain.findUse(payment.authorization, from, head.number);
    if (use === null) {
      // Without a receipt of ours the use may be our own: then it stays open.
      if (!reverted || ++payment.lookUps < LOOK_UPS_MAX) return false;
      await verdicts.fail(payment, "the authorization was used elsewhere");
      return true;
    }
    const own = await transactionsOf(store.read, payment.key);
    if (own.some(({ hash }) => hash === use.hash)) return judgeOwn(payment, use.hash);
    const how = use.cancelled ? "cancelled" : "used elsewhere";
    await verdicts.fail(payment, `the authorization was ${how}`, use.hash);
    return true;
  }

  async function judgeOwn(payment: OpenPayment, hash: Hex): Promise<boolean> {
    const receipt = await chain.receipt(hash);
    if (receipt === null) return false;
    if (isPaidBy(payment.authorization, receipt)) await verdicts.settle(payment, receipt);
    else await verdicts.fail(payment, "the transaction holds no matching transfer");
    return true;
  }

  /** False when nothing can be said yet. */
  async function judge(
    payment: OpenPayment,
    slot: Slot,
    head: Block,
    receipt: Receipt | null,
  ): Promise<boolean> {
    if (receipt !== null && payment.status !== "settled" && isPaidBy(payment.authorization, receipt)) {
      await verdicts.settle(payment, receipt);
      return true;
    }
    if (payment.status !== "sent") return true;
    if (payment.moving) return false;
    // A slot that is still open decides, and then this one had no part in it.
    if ([...payment.slots].some((other) => other !== slot && other.inclusion === null)) return true;
    return judgeUnpaid(payment, head, isTransfer(slot, receipt?.hash));
  }

  return {
    async included(slot, head) {
      const { payment } = slot;
      const receipt = await receiptOf(chain, slot);
      if (payment !== null && !(await judge(payment, slot, head, receipt))) throw new NotKnownYet();
      if (receipt === null) {
        log.warn("a wallet nonce was used elsewhere", { wallet: slot.wallet, nonce: slot.nonce });
        slot.inclusion = { hash: null, blockNumber: head.number, blockHash: head.hash };
      } else {
        const { hash, blockNumber, blockHash } = receipt;
        slot.inclusion = { hash, blockNumber, blockHash };
      }
    },
    async overdue(payment, head) {
      if (payment.moving) return;
      const reverted = [...payment.slots].some((slot) => isTransfer(slot, slot.inclusion?.hash));
      if (!(await judgeUnpaid(payment, head, reverted))) throw new NotKnownYet();
    },
    async reorganised(slot) {
      const { payment, inclusion } = slot;
      log.warn("a block with a transaction of ours is not part of the chain any more", {
        transaction: inclusion?.hash ?? newestOf(slot).hash,
        block: inclusion?.blockNumber,
      });
      if (payment?.status === "settled" && isTransfer(slot, inclusion?.hash)) await verdicts.reopen(payment);
      slot.inclusion = null;
      slot.broadcastAt = 0;
    },
  };
}

async function receiptOf(chain: Chain, slot: Slot): Promise<Receipt | null> {
  for (const { hash } of [...slot.transactions].reverse()) {
    const receipt = await chain.receipt(hash);
    if (receipt !== null) return receipt;
  }
  return null;
}

/** Whether it is one of the slot's transfers, and not a transaction that only used up the nonce. */
function isTransfer(slot: Slot, hash: Hex | null | undefined): boolean {
  return slot.transactions.some((row) => row.hash === hash && row.payer !== null);
}
