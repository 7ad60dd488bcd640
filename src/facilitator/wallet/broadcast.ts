// Sends the nodes what is stored, the same bytes as often as it takes. A node's answer changes no record; it only says
// when to look at the chain.

import type { Chain } from "../../chain/chain.ts";
import type { Log } from "../../core/log.ts";
import type { Hex } from "../../x402/types.ts";
import { createPaymentSpans, type PaymentSpans } from "../payments/payment-spans.ts";
import type { WalletLeases } from "./leases.ts";
import { isObsolete, newestOf, type PendingNonce, type PendingNonces, type PendingPayment } from "./pending.ts";
import { isExpired } from "./resolution.ts";
import type { WatchSchedule } from "./schedule.ts";

/** Nodes keep few transactions of one sender that arrive out of order, so not many are sent at a time. */
const PARALLEL = 16;
/** Transactions of one wallet that are broadcast again in one go, lowest nonce first. */
const AGAIN_MAX = 50;
const AGAIN_MS = 5000;
const RETRY_MS = 1000;

export interface BroadcasterOptions {
  readonly chain: Chain;
  readonly log: Log;
  readonly pendingNonces: PendingNonces;
  readonly leases: Pick<WalletLeases, "holds">;
  /** A nonce of this wallet is used that should be free. */
  readonly onForeignNonce: (wallet: Hex) => void;
  readonly schedule: Pick<WatchSchedule, "lookAgain">;
  /** Until what a node has accepted is broadcast again. Tests shorten it. */
  readonly againMs?: number | undefined;
  /** Left out where traces are off. */
  readonly spans?: PaymentSpans | undefined;
}

export function createBroadcaster(options: BroadcasterOptions) {
  const { chain, log, leases, pendingNonces, schedule, onForeignNonce, againMs = AGAIN_MS } = options;
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
    onForeignNonce(pendingNonce.wallet);
    schedule.lookAgain();
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
