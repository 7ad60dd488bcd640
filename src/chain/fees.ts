// The fees of a transaction (EIP-1559) in wei per gas: of a new one, of a replacement, and of one that frees a nonce. Pure.

/** Priority fee: what nodes suggest, the least that a replacement offers, and the most while the base fee is not higher. */
export type Tip = Readonly<Record<"suggested" | "least" | "most", bigint>>;

export interface Fees {
  readonly maxFee: bigint;
  readonly maxPriorityFee: bigint;
}

/** The base fee rises by an eighth in a block at most: twice the present one lasts for six full blocks. */
const BASE_FEE_FACTOR = 2n;
/** Nodes take a replacement from 10 % more on in both fields; an eighth allows for their rounding. */
const RAISE_DIVISOR = 8n;

const least = (a: bigint, b: bigint): bigint => (a < b ? a : b);
const most = (a: bigint, b: bigint): bigint => (a > b ? a : b);

/**
 * A node's suggestion is a first offer: at most the base fee, or the network's most where that is more. If a place
 * in a block costs more than that, replacements raise the offer step by step.
 */
const firstOffer = (tip: Tip, baseFee: bigint): bigint => least(tip.suggested, most(baseFee, tip.most));

/** The fees of a new transaction; null while the base fee is over the cap, since no block would include it. */
export function quoteFees(baseFee: bigint, tip: Tip, cap: bigint): Fees | null {
  if (baseFee > cap) return null;
  const offer = firstOffer(tip, baseFee);
  const maxFee = least(BASE_FEE_FACTOR * baseFee + offer, cap);
  return { maxFee, maxPriorityFee: least(offer, maxFee) };
}

/** The least that nodes accept as a replacement of `amount`. */
const raised = (amount: bigint): bigint => amount + amount / RAISE_DIVISOR + 1n;

/**
 * The fees of a replacement: enough for nodes to prefer it to the earlier transaction, and no less than a new transaction
 * would pay. Null when the cap does not allow that, or is below the base fee.
 */
export function raiseFees(before: Fees, baseFee: bigint, tip: Tip, cap: bigint): Fees | null {
  if (baseFee > cap) return null;
  const maxFeeLeast = raised(before.maxFee);
  const maxPriorityFeeLeast = raised(before.maxPriorityFee);
  const maxPriorityFee = most(maxPriorityFeeLeast, most(firstOffer(tip, baseFee), tip.least));
  const wanted = most(maxFeeLeast, BASE_FEE_FACTOR * baseFee + maxPriorityFee);
  const maxFee = least(wanted, cap);
  if (maxFee < maxFeeLeast || maxFee < maxPriorityFeeLeast) return null;
  return { maxFee, maxPriorityFee: least(maxPriorityFee, maxFee) };
}

/**
 * The fees of an empty transaction that replaces one which must not land any more. Never null: where the cap leaves no room
 * to raise, the fee is the cap, which nodes that do not hold the earlier transaction accept. A base fee over the cap falls again.
 */
export function freeingFees(before: Fees, baseFee: bigint, tip: Tip, cap: bigint): Fees {
  const base = least(baseFee, cap);
  const offer = most(before.maxPriorityFee, firstOffer(tip, base));
  return raiseFees(before, base, tip, cap) ?? { maxFee: cap, maxPriorityFee: least(offer, cap) };
}
