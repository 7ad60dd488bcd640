// What became of one wallet nonce of a payment, as far as a receipt tells. Pure.
import type { Hex } from "../../x402/types.ts";
import type { Reverted } from "./gas-burned.ts";
import type { PendingNonce, PendingPayment, UsedNonce } from "./pending.ts";
import { pays } from "./transactions.ts";

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

export function endOf(pendingNonce: PendingNonce, payment: PendingPayment, used: UsedNonce | null): End {
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

/** The reverts of a payment. @param isWhole whether it bears the whole cost of what it shared with others */
export function revertedOf(ends: readonly End[], isWhole: boolean): Reverted[] {
  return ends.flatMap(({ how, hash, gasWei, shareWei }) => {
    const isReverted = how === "reverted" || how === "failed among others";
    return isReverted && hash !== null ? [{ hash, gasWei: isWhole ? gasWei : shareWei }] : [];
  });
}

/** False where the receipt may lack the payment's events, as a node's answers do now and then. */
export function isCertainlyUnpaid({ how, isUnshown }: End): boolean {
  return how === "reverted" || how === "nothing" || (how === "failed among others" && !isUnshown);
}
