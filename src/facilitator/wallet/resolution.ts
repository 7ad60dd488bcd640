// Decides how a payment ends. Settled: a receipt of one of our transactions proves the transfer. Failed: only when no
// transaction of ours can move the money any more, read at the hash of a block: the authorization is unused there, and either
// it has expired by the block's time, or the nonces of all our transactions for it are used. When somebody else used the
// wallet's nonce, the payment gets a new one. So does a payment that failed in a shared transaction and would succeed now: it
// is sent again alone, since another payment in that transaction may have been the cause.
//
// Each outcome is a guarded write: of two processes that reach one conclusion, one writes it and the other reads it.
import type { Chain } from "../../chain/chain.ts";
import { isOwnTransfer, type Use } from "../../chain/find-use.ts";
import type { Block, Receipt } from "../../chain/json-rpc.ts";
import { isPaidBy, isUsedUp } from "../../chain/token.ts";
import type { Meters } from "../../core/meters.ts";
import { mapLimit } from "../../kernel/loop.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { utcDay } from "../payments/guardrails.ts";
import type { Gas, PaymentFailure } from "../payments/payments.ts";
import { recordFailed, recordReorganised, recordSettled, storedPayment } from "../payments/payments.ts";
import type { PendingNonce, PendingNonces, PendingPayment, UsedNonce, WalletParts } from "./pending.ts";
import { areAllKnown, newestOf } from "./pending.ts";
import { NotClaimed } from "./sender.ts";
import { countLateRevert, markBurned, pays, type Reverted, transactionsOf } from "./transactions.ts";
import type { Wallet, WalletLimits } from "./wallet.ts";

/** Consecutive checks after which a used nonce without a receipt of ours counts as foreign: a count may be briefly wrong. */
const LOOKS_IN_VAIN = 3;

export type Resolver = ReturnType<typeof createPaymentResolver>;

interface ResolverOptions extends WalletParts {
  readonly recorder: ReturnType<typeof createOutcomeRecorder>;
  /** The wallets of all facilitators of this database, in lower case. */
  readonly ownWallets: () => Promise<ReadonlySet<Hex>>;
  readonly simulate: Wallet["simulate"];
  /** Sends the payment with a new wallet nonce; resolves when the transaction is stored. */
  readonly send: (payment: PendingPayment, gas: Gas) => Promise<void>;
}

export const isExpired = ({ authorization }: PendingPayment, head: Block): boolean =>
  BigInt(head.timestamp) >= authorization.validBefore;

export function createPaymentResolver(options: ResolverOptions) {
  const { chain, log, recorder } = options;
  const { network } = chain;
  const resolveUnpaid = createUnpaidResolver(options);

  /** Records the payment's outcome or sends the payment again. False when nothing can be decided yet. */
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
    // Another nonce is still open and will decide the outcome; this one did not.
    if (others.some(({ inclusion }) => inclusion === null)) return true;
    return resolveUnpaid(payment, head, [own, ...others.map((other) => endOf(other, payment, other.inclusion))]);
  }

  /** False when some payment can't be decided yet. An error about one payment delays no other, and is thrown at the end. */
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
     * Handles a nonce that is used in or before `head`: finds which transaction used it, and resolves its payments.
     * @throws NotKnownYet when nothing can be decided yet; what a node or the database throws. So do `overdue`, `reorganised`
     */
    async included(pendingNonce: PendingNonce, head: Block): Promise<void> {
      const receipt = await receiptOf(chain, pendingNonce);
      if (receipt === null && !(await isUsedUpBySomebody(chain, pendingNonce, head))) throw new NotKnownYet();
      const used = usedBy(network, pendingNonce, receipt);
      let isWhole = false;
      try {
        isWhole = await resolveAll(pendingNonce, { head, receipt, used });
      } finally {
        // With an inclusion, a reorganisation reopens the settled payments. Unresolved ones of the nonce are then overdue.
        const isAnySettled = [...pendingNonce.payments].some(({ status }) => status === "settled");
        if (isAnySettled && used !== null) pendingNonce.inclusion = used;
      }
      if (!isWhole) throw new NotKnownYet();
      const { wallet, nonce } = pendingNonce;
      if (receipt === null) log.warn("foreign_nonce_used", { wallet, nonce });
      const at = { blockNumber: head.number, blockHash: head.hash };
      pendingNonce.inclusion = used ?? { hash: null, succeeded: false, paid: new Set(), gasWei: 0n, ...at };
    },
    /** Resolves a sent payment that has expired at `head`, or has no open nonce left that could still make it. */
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
    /** Reopens a nonce, and the payments settled by it, whose block is no longer part of the chain. */
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

/** What the chain shows about a used nonce. */
interface Evidence {
  readonly head: Block;
  /** The receipt of our transaction that used the nonce; null when none is known. */
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
      // Another process has recorded the payment's outcome, or has sent the payment again.
      await recorder.changedElsewhere(payment);
    } finally {
      payment.moving = false;
    }
    return true;
  }

  /** The authorization is used or cancelled: finds out by whom, and records the outcome. */
  async function resolveUsed(payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> {
    // The use is certainly foreign only if every nonce is known to have been used without paying.
    const isForeign = ends.length > 0 && ends.every(isCertainlyUnpaid);
    // The authorization was unused at the simulation, for which a node may have been some blocks behind.
    const from = payment.sinceBlock - 50;
    const search = chain.findUse(payment.authorization, from, head.number);
    // If the use is foreign, the search only names the transaction, so a node that refuses to search does not matter.
    const use = await (isForeign ? search.catch(() => null) : search);
    const reverted = await charged(chain, payment, head, ends);
    if (use === null) {
      // After five searches, the failure is recorded without the foreign transaction.
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
   * Settles the payment if a transaction of ours used the authorization, even one that a database restored to an older state
   * does not know. Null when the use is not ours; false when nothing can be decided yet.
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

  /** The authorization is unused: records that the payment has failed, or sends the payment again. */
  async function resolveUnused(payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> {
    const simulation = await simulate(payment.authorization, payment.signature);
    const isOver = isExpired(payment, head);
    // An expired payment can't pass a simulation, so the time of the simulation or of the block is wrong.
    if (isOver && simulation.ok) return false;
    const reason = simulation.ok ? "the transaction reverted" : simulation.reason;
    // The authorization was used after all, maybe by us: the next block tells.
    if (isUsedUp(reason)) return false;
    // A payment that reverted in a transaction of its own is not sent again: the cause was on the payer's side.
    if (simulation.ok && !ends.some(({ how }) => how === "reverted"))
      // A payment that has used up four wallet nonces is not sent again; it waits until it expires.
      return payment.pendingNonces.size < 4 && sendAgain(payment, simulation.gas);
    // A recorded failure is final, so each node is asked whether it knows of a use.
    const views = await chain.views(payment.authorization);
    if ((await Promise.all(views.map(({ isUsed }) => isUsed))).includes(true)) return false;
    const failure = { reason: isOver ? "expired" : reason, foreign_transaction: null };
    await recorder.fail(payment, failure, await charged(chain, payment, head, ends), head);
    return true;
  }

  /** Resolves a payment that no transaction of ours is known to have paid up to `head`. False when nothing can be decided yet. */
  return async (payment: PendingPayment, head: Block, ends: readonly End[]): Promise<boolean> => {
    const isUsed = await chain.isUsed(payment.authorization, head);
    return isUsed ? resolveUsed(payment, head, ends) : resolveUnused(payment, head, ends);
  };
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

/** Whether the nonce is used by the nodes' counts in several checks in a row, since a count is weaker proof than a receipt. */
async function isUsedUpBySomebody(chain: Chain, pendingNonce: PendingNonce, head: Block): Promise<boolean> {
  const { wallet, nonce } = pendingNonce;
  const isUsed = (await chain.transactionCount(wallet, head, 0, nonce)) > nonce;
  pendingNonce.looksInVain = isUsed ? pendingNonce.looksInVain + 1 : 0;
  return pendingNonce.looksInVain >= LOOKS_IN_VAIN;
}

/** The receipt of a shared transaction: an inclusion restored from the records at start does not cover each payment. */
async function sharedReceipt(chain: Chain, { payments, inclusion }: PendingNonce): Promise<Receipt | null> {
  const hash = inclusion?.hash ?? null;
  return payments.size > 1 && hash !== null ? chain.receipt(hash) : null;
}

/** The use of the nonce by our transaction with this receipt; null without a receipt. */
function usedBy(network: Network, { payments }: PendingNonce, receipt: Receipt | null): UsedNonce | null {
  if (receipt === null) return null;
  const { hash, succeeded, gasWei, blockNumber, blockHash } = receipt;
  const paid = new Set([...payments].filter(({ authorization }) => isPaidBy(network, authorization, receipt)));
  return { hash, succeeded, paid, gasWei, blockNumber, blockHash };
}

/**
 * The reverts that count against the payment's account. In a shared transaction a payment bears its own share of the gas. But
 * a payer that had no code when its payment was admitted, and has some now, could have burned all the gas: it bears the whole.
 */
async function charged(chain: Chain, payment: PendingPayment, head: Block, ends: readonly End[]): Promise<Reverted[]> {
  const isShared = ({ how }: End) => how === "failed among others" || how === "not shown";
  const isWhole = ends.some(isShared) && (await chain.hasCode(payment.authorization.from, head));
  return ends.flatMap((end) => {
    const { hash, gasWei, shareWei } = end;
    const isReverted = end.how === "reverted" || isShared(end);
    return isReverted && hash !== null ? [{ hash, gasWei: isWhole ? gasWei : shareWei }] : [];
  });
}

/**
 * What the use of one wallet nonce meant for a payment. `moved`: our transfer succeeded. `reverted`: a transaction of this
 * payment alone reverted. `failed among others`: a shared transaction reverted. `not shown`: a shared transaction succeeded, and its
 * receipt does not show this payment: the payment failed there, or the receipt is incomplete. `nothing`: a transaction of
 * ours without this payment used the nonce. `unknown`: none of ours is known to have used it.
 */
export interface End {
  readonly how: "moved" | "reverted" | "failed among others" | "not shown" | "nothing" | "unknown";
  readonly hash: Hex | null;
  /** The cost of the whole transaction. */
  readonly gasWei: bigint;
  /** The payment's part of gasWei. */
  readonly shareWei: bigint;
}

const UNKNOWN: End = { how: "unknown", hash: null, gasWei: 0n, shareWei: 0n };

function endOf(pendingNonce: PendingNonce, payment: PendingPayment, used: UsedNonce | null): End {
  if (used === null || used.hash === null) return UNKNOWN;
  const { hash, gasWei, succeeded } = used;
  const row = pendingNonce.transactions.find((each) => each.hash === hash);
  const parts = row?.payments ?? [];
  const known = { hash, gasWei, shareWei: gasWei };
  if (row === undefined || !pays(row, payment.key)) return { ...known, how: "nothing" };
  if (parts.length === 1) return { ...known, how: succeeded ? "moved" : "reverted" };
  const all = parts.reduce((sum, { gas }) => sum + gas, 0n);
  const own = parts.find(({ payer, nonce }) => payer === payment.key.payer && nonce === payment.key.nonce)?.gas ?? all;
  // Rounded up, so that the shares never add up to less than was spent.
  const shareWei = (gasWei * own + all - 1n) / all;
  const failed = succeeded ? "not shown" : "failed among others";
  return { hash, gasWei, shareWei, how: used.paid.has(payment) ? "moved" : failed };
}

/** Whether the nonce certainly did not pay. False where the receipt may lack the payment's events, as happens with nodes. */
const isCertainlyUnpaid = ({ how }: End): boolean =>
  how === "reverted" || how === "nothing" || how === "failed among others";

/** Nothing can be decided yet; the watcher tries again in its next round, as after a node's failure. */
export class NotKnownYet extends Error {
  override readonly name = "NotKnownYet";
}

export interface RecorderOptions extends Pick<WalletParts, "store" | "clock" | "log" | "reload"> {
  readonly meters: Pick<Meters, "settlement">;
  /** Is told of each payment that has ended, after the write is durable. */
  readonly outcomes: { announce(key: PaymentKey): void };
  readonly pendingNonces: Pick<PendingNonces, "of">;
  readonly limits: Pick<WalletLimits, "dailyGasAllWei">;
}

export function createOutcomeRecorder(options: RecorderOptions) {
  const { store, clock, log, outcomes, pendingNonces, reload, meters } = options;

  /** Adopts the status of the payment's record. */
  async function reread(payment: PendingPayment): Promise<void> {
    payment.status = (await storedPayment(store.read, payment.key))?.status ?? payment.status;
  }

  /** Records the failure, but rolls back when an open transaction of the payment is unknown here: it may still collect. */
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
    /** Adopts what another process has recorded. @throws NotKnownYet when it has stored another transaction for the payment */
    async changedElsewhere(payment: PendingPayment): Promise<void> {
      await reread(payment);
      if (payment.status !== "sent") return;
      reload();
      throw new NotKnownYet();
    },
    async settle(payment: PendingPayment, receipt: Receipt): Promise<void> {
      const { hash, blockNumber } = receipt;
      const cost = options.limits.dailyGasAllWei > 0n ? costOf(payment, receipt) : null;
      if (await store.write((tx) => recordSettled(tx, payment.key, receipt, clock.now(), cost))) {
        payment.status = "settled";
        meters.settlement("settled");
        log.info("payment_settled", { ...names(payment), transaction: hash, block: blockNumber });
      } else await reread(payment);
      if (payment.status === "failed") log.error("failed_payment_collected", { ...names(payment), transaction: hash });
      outcomes.announce(payment.key);
    },
    /** Records that the payment has failed. @throws NotKnownYet when another process has sent the payment again */
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
    /** Counts the gas of a transfer that reverted after its payment had failed for another reason. */
    async late(payment: PendingPayment, reverted: readonly Reverted[], head: Block): Promise<void> {
      for (const each of reverted)
        if (await store.write((tx) => countLateRevert(tx, payment.key, each, dayOf(head))))
          log.warn("late_revert", { ...names(payment), ...each });
    },
    /** Returns a settled payment to `sent`, since its block has left the chain. */
    async reopen(payment: PendingPayment): Promise<void> {
      if (await store.write((tx) => recordReorganised(tx, payment.key, clock.now()))) {
        payment.status = "sent";
        meters.settlement("reorganised");
      } else await reread(payment);
    },
  };
}

const dayOf = ({ timestamp }: Block): string => utcDay(timestamp * 1000);

/** The payment's cost: its share of the settling transaction, and its shares of those that failed before. */
function costOf(payment: PendingPayment, { hash, gasWei, ...at }: Receipt): bigint {
  const used = { hash, gasWei, ...at, paid: new Set([payment]) };
  const settling = [...payment.pendingNonces].find(({ transactions }) => transactions.some((row) => row.hash === hash));
  const others = [...payment.pendingNonces].filter((each) => each !== settling);
  const share = settling === undefined ? gasWei : endOf(settling, payment, used).shareWei;
  return others.reduce((sum, each) => sum + endOf(each, payment, each.inclusion).shareWei, share);
}

const names = ({ key: { payer, nonce } }: PendingPayment) => ({ payer, nonce });
