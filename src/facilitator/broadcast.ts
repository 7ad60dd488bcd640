// Tells the nodes what is stored, and tells them again: the same bytes, as often as it takes. What a node answers
// changes no record; it only says when to look at the chain.
import type { Log } from "../core/log.ts";
import type { Hex } from "../x402/types.ts";
import type { Chain } from "./chain.ts";
import { pooled } from "./pooled.ts";
import { newestOf, type Slot, type Slots } from "./slots.ts";

/** Nodes keep few transactions of one sender out of order, so not many are under way at a time. */
const PARALLEL = 16;
/** Transactions of one wallet that are broadcast again in one go: those that come first. */
const AGAIN_MAX = 50;
const AGAIN_MS = 5000;
const RETRY_MS = 1000;

export interface BroadcastOptions {
  readonly chain: Chain;
  readonly log: Log;
  readonly slots: Slots;
  /** A nonce of this wallet is used that ought to be free. */
  readonly onForeignNonce: (wallet: Hex) => void;
}

/** Broadcasts what is due. True when a node's answer asks for a look at the chain. */
export function createBroadcast({
  chain,
  log,
  slots,
  onForeignNonce,
}: BroadcastOptions): () => Promise<boolean> {
  async function broadcastSlot(slot: Slot): Promise<boolean> {
    const row = newestOf(slot);
    const reception = await chain.broadcast(row.raw, slot.broadcasts++ > 0);
    // It was replaced meanwhile, or is in a block: then the answer means nothing.
    if (newestOf(slot) !== row || slot.inclusion !== null) return false;
    if (reception === "accepted") return false;
    log.debug("a transaction was not accepted", { transaction: row.hash, reception });
    slot.broadcastAt = performance.now() + RETRY_MS;
    if (reception === "nonce used") onForeignNonce(slot.wallet);
    if (reception !== "underpriced") return reception === "nonce used";
    const isNew = !slot.underpriced;
    slot.underpriced = true;
    return isNew;
  }

  function due(wallet: Hex, now: number): Slot[] {
    const slotsDue = slots.waiting(wallet).filter(({ broadcastAt }) => broadcastAt <= now);
    const again = new Set(slotsDue.filter(({ broadcasts }) => broadcasts > 0).slice(0, AGAIN_MAX));
    return slotsDue.filter((slot) => slot.broadcasts === 0 || again.has(slot));
  }

  return async () => {
    const now = performance.now();
    const slotsDue = [...slots.wallets()].flatMap((wallet) => due(wallet, now));
    // Reserved at once, so that a broadcast which begins meanwhile does not send them as well.
    for (const slot of slotsDue) slot.broadcastAt = now + AGAIN_MS;
    let asksForLook = false;
    await pooled(slotsDue, PARALLEL, async (slot) => {
      if (await broadcastSlot(slot)) asksForLook = true;
    });
    return asksForLook;
  };
}
