// How a payment ends. Settled: a receipt of one of our transactions proves it. Failed: only when none of ours can
// move the money any more, which is read at the hash of a block: the authorization is unused there, and either
// the block's time is past its end, or the nonces of all our transactions for it are used there. When somebody else
// used the wallet's nonce, the payment gets a new one. So does one that failed in a transaction shared with others and
// would go through now: it is sent once more alone, since the cause may have been a neighbour.
//
// Each record is a guarded write: of two processes that find out the same thing, one writes it and the other reads it.
import type { Chain } from "../../chain/chain.ts";
import { isOwnTransfer, type Use } from "../../chain/find-use.ts";
import type { Block, Receipt } from "../../chain/json-rpc.ts";
import { isPaidBy, isUsedUp } from "../../chain/token.ts";
import { type Meters, silentMeters } from "../../core/meters.ts";
import { mapLimit } from "../../kernel/loop.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { utcDay } from "../payments/guardrails.ts";
import {
  type Gas,
  type PaymentFailure,
  recordFailed,
  recordReorganised,
  recordSettled,
  storedPayment,
} from "../payments/payments.ts";
import {
  areAllKnown,
  newestOf,
  type PendingNonce,
  type PendingNonces,
  type PendingPayment,
  type UsedNonce,
  type WalletParts,
} from "./pending.ts";
import { NotClaimed } from "./sender.ts";
import { countLateRevert, markBurned, pays, type Reverted, transactionsOf } from "./transactions.ts";
import type { Wallet } from "./wallet.ts";

/** Looks until a nonce without a receipt of ours counts as used by somebody else: a count may be wrong for a moment. */
const LOOKS_IN_VAIN = 3;

export type Resolver = ReturnType<typeof createPaymentResolver>;

interface ResolverOptions extends WalletParts {
  readonly recorder: OutcomeRecorder;
  /** In lower case. */
  readonly ownWallets: () => Promise<ReadonlySet<Hex>>;
  readonly simulate: Wallet["simulate"];
  /** Sends the payment with a new wallet nonce; resolves when it is stored. */
  readonly send: (payment: PendingPayment, gas: Gas) => Promise<void>;
}

export function isExpired({ authorization }: PendingPayment, head: Block): boolean {
  return BigInt(head.timestamp) >= authorization.validBefore;
}

export function createPaymentResolver(options: ResolverOptions) {
  const { chain, log, recorder } = options;
  const { network } = chain;
  const resolveUnpaid = createUnpaidResolver(options);

  /** False when nothing can be said yet. */
  async function resolve(payment: PendingPayment, pendingNonce: PendingNonce, own: End, { head, receipt }: Evidence) {
    if (receipt !== null && payment.status !== "settled" && isPaidBy(network, payment.authorization, receipt)) {
      await recorder.settle(payment, receipt);
      return true;
    }
    if (payment.status !== "sent") return true;
    if (payment.moving) return false;
    // A transfer of ours that succeeded has moved the money, so a receipt that does not show it is incomplete.
    if (own.how === "moved") return false;
    const others = [...payment.pendingNonces].filter((other) => other !== pendingNonce);
    // A nonce that is still open decides; this one had no part in the outcome.
    if (others.some(({ inclusion }) => inclusion === null)) return true;
    return resolveUnpaid(payment, head, [own, ...others.map((other) => endOf(other, payment, other.inclusion))]);
  }

  /** False when nothing can be said yet. What is thrown about one payment holds up no other. */
  async function resolveAll(pendingNonce: PendingNonce, found: Evidence): Promise<boolean> {
    let failure: unknown = null;
    let isWhole = true;
    await mapLimit([...pendingNonce.payments], 16, async (payment) => {
      try {
        const own = endOf(pendingNonce, payment, found.used);
        if (!(await resolve(payment, pendingNonce, own, found))) isWhole = false;
        else if (payment.status === "failed")
          await recorder.late(payment, await charged(chain, payment, found.head, [own]), found.head);
      } catch (error) {
        failure ??= error;
      }
    });
    if (failure !== null) throw failure;
    return isWhole;
  }

  return {
    /**
     * The nonce is used in or before `head`: records by whom, and what follows for the payment.
     *
     * @throws Error when nothing can be said yet, and when a node or the database fails; so do the others
     */
    async included(pendingNonce: PendingNonce, head: Block): Promise<void> {
      const receipt = await receiptOf(chain, pendingNonce);
      if (receipt === null && !(await isUsedUpBySomebody(chain, pendingNonce, head))) throw new NotKnownYet();
      const used = usedBy(network, pendingNonce, receipt);
      let isWhole = false;
      try {
        isWhole = await resolveAll(pendingNonce, { head, receipt, used });
      } finally {
        // From here on a reorganisation undoes what is settled. Others that share the nonce are resolved as overdue.
        const isAnySettled = [...pendingNonce.payments].some(({ status }) => status === "settled");
        if (isAnySettled && used !== null) pendingNonce.inclusion = used;
      }
      if (!isWhole) throw new NotKnownYet();
      const { wallet, nonce } = pendingNonce;
      if (receipt === null) log.warn("foreign_nonce_used", { wallet, nonce });
      const at = { blockNumber: head.number, blockHash: head.hash };
      pendingNonce.inclusion = used ?? { hash: null, succeeded: false, paid: new Set(), gasWei: 0n, ...at };
    },
    /** A sent payment whose time is past at `head`, or which has no pending nonce left that could make it. */
    async overdue(payment: PendingPayment, head: Block): Promise<void> {
      if (payment.moving) return;
      const ends: End[] = [];
      for (const each of payment.pendingNonces) {
        const receipt = await sharedReceipt(chain, each);
        if (receipt !== null && isPaidBy(network, payment.authorization, receipt))
          return recorder.settle(payment, receipt);
        ends.push(endOf(each, payment, usedBy(network, each, receipt) ?? each.inclusion));
      }
      if (!(await resolveUnpaid(payment, head, ends))) throw new NotKnownYet();
    },
    /** The block in which the nonce was used is not part of the chain. */
    async reorganised(pendingNonce: PendingNonce): Promise<void> {
      const { payments, inclusion } = pendingNonce;
      const transaction = inclusion?.hash ?? newestOf(pendingNonce).hash;
      log.warn("reorg_detected", { transaction, block: inclusion?.blockNumber });
      for (const payment of payments) {
        if (payment.status === "settled" && inclusion?.paid.has(payment)) await recorder.reopen(payment);
      }
      pendingNonce.inclusion = null;
      pendingNonce.broadcastAt = 0;
      pendingNonce.looksInVain = 0;
    },
  };
}

/** What the chain shows of a nonce that is used. */
interface Evidence {
  readonly head: Block;
  /** Of our transaction that used it; null when none is known to. */
  readonly receipt: Receipt | null;
  readonly used: UsedNonce | null;
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
    // It can only be used after the simulation, at which a node may have been behind.
    const from = payment.sinceBlock - 50;
    const search = chain.findUse(payment.authorization, from, head.number);
    // The search is only for its name then, and some nodes refuse to search.
    const use = await (isForeign ? search.catch(() => null) : search);
    const reverted = await charged(chain, payment, head, ends);
    if (use === null) {
      // After some searches it stays unnamed.
      if (!isForeign || ++payment.lookUps < 5) return false;
      const reason = "the authorization was used elsewhere";
      await recorder.fail(payment, { reason, foreign_transaction: null }, reverted, head);
      return true;
    }
    const own = await resolveOwn(payment, use);
    if (own !== null) return own;
    const reason = `the authorization was ${use.cancelled ? "cancelled" : "used elsewhere"}`;
    await recorder.fail(payment, { reason, foreign_transaction: use.hash }, reverted, head);
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
    if (!isRecorded && !isOwnTransfer(chain.network, receipt, await ownWallets(), payment.authorization)) return null;
    if (!isPaidBy(chain.network, payment.authorization, receipt)) return false;
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
      // With so many wallet nonces used up, it waits until its time is over.
      return payment.pendingNonces.size < 4 && sendAgain(payment, simulation.gas);
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
    [...pendingNonce.payments].every(({ authorization }) => isPaidBy(chain.network, authorization, receipt));
  for (const { hash } of [...pendingNonce.transactions].reverse()) {
    const receipt = await chain.receipt(hash, shows);
    if (receipt !== null) return receipt;
  }
  return null;
}

/** Whether all nodes say so, and more than once: no count proves it as a receipt does. */
async function isUsedUpBySomebody(chain: Chain, pendingNonce: PendingNonce, head: Block): Promise<boolean> {
  const { wallet, nonce } = pendingNonce;
  const isUsed = (await chain.transactionCount(wallet, head, 0, nonce)) > nonce;
  pendingNonce.looksInVain = isUsed ? pendingNonce.looksInVain + 1 : 0;
  return pendingNonce.looksInVain >= LOOKS_IN_VAIN;
}

/** The receipt of a transaction for several payments: what was taken from the records at the start does not tell of each. */
async function sharedReceipt(chain: Chain, { payments, inclusion }: PendingNonce): Promise<Receipt | null> {
  const hash = inclusion?.hash ?? null;
  return payments.size > 1 && hash !== null ? chain.receipt(hash) : null;
}

/** How our transaction with this receipt used the nonce; null without a receipt. */
function usedBy(network: Network, { payments }: PendingNonce, receipt: Receipt | null): UsedNonce | null {
  if (receipt === null) return null;
  const { hash, succeeded, gasWei, blockNumber, blockHash } = receipt;
  const paid = new Set([...payments].filter(({ authorization }) => isPaidBy(network, authorization, receipt)));
  return { hash, succeeded, paid, gasWei, blockNumber, blockHash };
}

/**
 * The reverts that count against the payment's account. In a shared transaction a payment bears its own share. But a
 * payer that has code by now, and had none when it was let in, could have burned the gas of all: it bears the whole.
 */
async function charged(chain: Chain, payment: PendingPayment, head: Block, ends: readonly End[]): Promise<Reverted[]> {
  const isAny = ends.some(({ how }) => how === "failed among others");
  const isWhole = isAny && (await chain.hasCode(payment.authorization.from, head));
  return ends.flatMap(({ how, hash, gasWei, shareWei }) => {
    const isReverted = how === "reverted" || how === "failed among others";
    return isReverted && hash !== null ? [{ hash, gasWei: isWhole ? gasWei : shareWei }] : [];
  });
}

/**
 * `moved`: our transfer of this payment succeeded. `reverted`: a transaction of ours that made it alone reverted.
 * `failed among others`: a shared one reverted, or its receipt does not show this payment. `nothing`: a transaction of
 * ours without it used the nonce. `unknown`: none of ours is known to have used it.
 */
export interface End {
  readonly how: "moved" | "reverted" | "failed among others" | "nothing" | "unknown";
  /** A shared transaction succeeded, and the receipt does not show this payment: it failed there, or the receipt lacks it. */
  readonly isUnshown: boolean;
  readonly hash: Hex | null;
  /** What the whole transaction cost. */
  readonly gasWei: bigint;
  /** The payment's part of that. */
  readonly shareWei: bigint;
}

const UNKNOWN: End = { how: "unknown", isUnshown: false, hash: null, gasWei: 0n, shareWei: 0n };

function endOf(pendingNonce: PendingNonce, payment: PendingPayment, used: UsedNonce | null): End {
  if (used === null || used.hash === null) return UNKNOWN;
  const { hash, gasWei, succeeded } = used;
  const row = pendingNonce.transactions.find((each) => each.hash === hash);
  const parts = row?.payments ?? [];
  const known = { isUnshown: false, hash, gasWei, shareWei: gasWei };
  if (row === undefined || !pays(row, payment.key)) return { ...known, how: "nothing" };
  if (parts.length === 1) return { ...known, how: succeeded ? "moved" : "reverted" };
  const all = parts.reduce((sum, { gas }) => sum + gas, 0n);
  const own = parts.find(({ payer, nonce }) => payer === payment.key.payer && nonce === payment.key.nonce)?.gas ?? all;
  const shared = { ...known, shareWei: (gasWei * own) / all };
  if (used.paid.has(payment)) return { ...shared, how: "moved" };
  return { ...shared, how: "failed among others", isUnshown: succeeded };
}

/** False where the receipt may lack the payment's events, as a node's answers do now and then. */
const isCertainlyUnpaid = ({ how, isUnshown }: End): boolean =>
  how === "reverted" || how === "nothing" || (how === "failed among others" && !isUnshown);

/** Nothing can be said yet, and the next look asks again. It is thrown, as a node's failures are. */
export class NotKnownYet extends Error {
  override readonly name = "NotKnownYet";
}

export type OutcomeRecorder = ReturnType<typeof createOutcomeRecorder>;

interface RecorderOptions extends Pick<WalletParts, "store" | "clock" | "log" | "reload"> {
  readonly meters?: Pick<Meters, "settlement"> | undefined;
  /** Told of each payment that has ended, after the write is durable. */
  readonly outcomes: { announce(key: PaymentKey): void };
  readonly pendingNonces: Pick<PendingNonces, "of">;
  /** Whether what all transactions cost has a bound, and so is counted. */
  readonly countsAll: boolean;
}

export function createOutcomeRecorder(options: RecorderOptions) {
  const { store, clock, log, outcomes, pendingNonces, reload, meters = silentMeters } = options;

  /** Takes over the status that its record has. */
  async function reread(payment: PendingPayment): Promise<void> {
    payment.status = (await storedPayment(store.read, payment.key))?.status ?? payment.status;
  }

  /** Undone when an open transaction of the payment was not judged: that one may still collect it. */
  async function fail({ key }: PendingPayment, failure: PaymentFailure, reverted: readonly Reverted[], head: Block) {
    try {
      return await store.write(async (tx) => {
        if (!(await recordFailed(tx, key, failure, { was: "sent", day: dayOf(head), now: clock.now() }))) return false;
        for (const each of reverted) await markBurned(tx, key, each);
        if (!(await areAllKnown(tx, key, pendingNonces))) throw new NotKnownYet();
        return true;
      });
    } catch (error) {
      if (error instanceof NotKnownYet) reload();
      throw error;
    }
  }

  return {
    /** Another process has ended it, or has stored another transaction for it: then @throws NotKnownYet */
    async changedElsewhere(payment: PendingPayment): Promise<void> {
      await reread(payment);
      if (payment.status !== "sent") return;
      reload();
      throw new NotKnownYet();
    },
    async settle(payment: PendingPayment, receipt: Receipt): Promise<void> {
      const { hash, blockNumber } = receipt;
      const cost = options.countsAll ? costOf(payment, receipt) : null;
      if (await store.write((tx) => recordSettled(tx, payment.key, receipt, clock.now(), cost))) {
        payment.status = "settled";
        meters.settlement("settled");
        log.info("payment_settled", { ...names(payment), transaction: hash, block: blockNumber });
      } else await reread(payment);
      if (payment.status === "failed") {
        log.error("failed_payment_collected", { ...names(payment), transaction: hash });
      }
      outcomes.announce(payment.key);
    },
    /** @throws NotKnownYet when another process has sent it once more */
    async fail(
      payment: PendingPayment,
      found: Omit<PaymentFailure, "gas_burned">,
      reverted: readonly Reverted[],
      head: Block,
    ): Promise<void> {
      const gas = reverted.reduce((sum, { gasWei }) => sum + gasWei, 0n);
      const failure = { ...found, gas_burned: reverted.length === 0 ? null : gas };
      if (await fail(payment, failure, reverted, head)) {
        payment.status = "failed";
        meters.settlement("failed");
        log.warn("payment_failed", { ...names(payment), ...failure });
      } else await reread(payment);
      outcomes.announce(payment.key);
    },
    /** Its transfer reverted; counts the gas if the payment had failed for another reason before. */
    async late(payment: PendingPayment, reverted: readonly Reverted[], head: Block): Promise<void> {
      for (const each of reverted)
        if (await store.write((tx) => countLateRevert(tx, payment.key, each, dayOf(head))))
          log.warn("late_revert", { ...names(payment), ...each });
    },
    /** Settled no more, for its block is gone. */
    async reopen(payment: PendingPayment): Promise<void> {
      if (await store.write((tx) => recordReorganised(tx, payment.key, clock.now()))) {
        payment.status = "sent";
        meters.settlement("reorganised");
      } else await reread(payment);
    },
  };
}

const dayOf = ({ timestamp }: Block): string => utcDay(timestamp * 1000);

/** What settled it, with the parts that it had in transactions before that failed. */
function costOf(payment: PendingPayment, { hash, gasWei, ...at }: Receipt): bigint {
  const used = { hash, gasWei, ...at, paid: new Set([payment]) };
  const settling = [...payment.pendingNonces].find(({ transactions }) => transactions.some((row) => row.hash === hash));
  const others = [...payment.pendingNonces].filter((each) => each !== settling);
  const share = settling === undefined ? gasWei : endOf(settling, payment, used).shareWei;
  return others.reduce((sum, each) => sum + endOf(each, payment, each.inclusion).shareWei, share);
}

const names = ({ key: { payer, nonce } }: PendingPayment) => ({ payer, nonce });
