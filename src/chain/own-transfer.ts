// Whether a transaction of one of our own wallets has moved the money of an authorization, by what the chain says alone: for
// a database that was restored to an older state, and has forgotten what was collected since.
import type { Clock } from "../core/time.ts";
import { DAY_MS, HOUR_MS } from "../core/time.ts";
import type { Authorization, Hex } from "../x402/types.ts";
import type { Chain } from "./chain.ts";
import { useBy } from "./find-use.ts";
import type { Block, Receipt } from "./json-rpc.ts";
import { isPaidBy } from "./token.ts";

interface OwnTransferOptions {
  /** Of the database, in milliseconds; null for one that never was restored. */
  readonly restoredAt: number | null;
  readonly clock: Clock;
  readonly chain: Pick<Chain, "newest" | "isUsed" | "findUse" | "receipt">;
  /** In lower case. */
  readonly ownWallets: () => Promise<ReadonlySet<Hex>>;
}

/**
 * The receipt that proves it. Null when there is none, or none could be forgotten; "unknown" when the authorization is used,
 * and no node tells by whom, and while a forgotten transaction that is on its way may still use it.
 */
export type FindOwnTransfer = (authorization: Authorization) => Promise<Receipt | "unknown" | null>;

export function createOwnTransfers({ restoredAt, clock, chain, ownWallets }: OwnTransferOptions): FindOwnTransfer {
  function mayBeForgotten({ validAfter }: Authorization): boolean {
    // A gateway asks for a day, and may have been away for a while.
    if (restoredAt === null || clock.now() - restoredAt > 7 * DAY_MS) return false;
    // Clocks differ, and the chain's time is its own.
    return Number(validAfter) * 1000 <= restoredAt + 60_000;
  }

  function mayStillLand({ validBefore }: Authorization, head: Block): boolean {
    // A forgotten transaction that nodes still hold lands within an hour after the restore.
    return restoredAt !== null && clock.now() - restoredAt <= HOUR_MS && BigInt(head.timestamp) < validBefore;
  }

  return async (authorization) => {
    if (!mayBeForgotten(authorization)) return null;
    const head = await chain.newest();
    if (!(await chain.isUsed(authorization, head))) return mayStillLand(authorization, head) ? "unknown" : null;
    const use = await useBy(chain, authorization, head);
    if (use === null) return "unknown";
    if (use.cancelled) return null;
    const receipt = await chain.receipt(use.hash);
    if (receipt === null) return "unknown";
    return isOwnTransfer(receipt, authorization, await ownWallets()) ? receipt : null;
  };
}

/** Whether the transaction is of one of the wallets, and has moved the money. */
export function isOwnTransfer(receipt: Receipt, authorization: Authorization, wallets: ReadonlySet<Hex>): boolean {
  return receipt.from !== null && wallets.has(receipt.from) && isPaidBy(authorization, receipt);
}
