// The fees of a transaction (EIP-1559) in wei per gas: of a new one, of a replacement, and of one that frees a nonce. Pure.

/** Priority fees: the nodes' suggestion, a replacement's least, and the most of a first offer unless the base fee is higher. */
export type Tip = Readonly<Record<"suggested" | "least" | "most", bigint>>;

export interface Fees {
  readonly maxFee: bigint;
  readonly maxPriorityFee: bigint;
}

/** The base fee rises by at most an eighth per block: twice the present fee suffices for the next five blocks, however full. */
const BASE_FEE_FACTOR = 2n;
/** Nodes accept a replacement that raises both fees by at least 10 %; an eighth leaves room for their rounding. */
const RAISE_DIVISOR = 8n;

const least = (a: bigint, b: bigint): bigint => (a < b ? a : b);
const most = (a: bigint, b: bigint): bigint => (a > b ? a : b);

/**
 * The priority fee of a new transaction: the nodes' suggestion, but at most the base fee or `tip.most`, whichever is
 * higher. If a place in a block costs more than that, replacements raise the offer step by step.
 */
const firstOffer = (tip: Tip, baseFee: bigint): bigint => least(tip.suggested, most(baseFee, tip.most));

/** The fees of a new transaction; null while the base fee is over the cap, since no block would include it. */
export function quoteFees(baseFee: bigint, tip: Tip, cap: bigint): Fees | null {
  if (baseFee > cap) return null;
  const offer = firstOffer(tip, baseFee);
  const maxFee = least(BASE_FEE_FACTOR * baseFee + offer, cap);
  return { maxFee, maxPriorityFee: least(offer, maxFee) };
}

/** The fee to offer where nodes hold a transaction that offers `amount`: surely enough for them to replace it. */
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
 * to raise, the fee is the cap, which nodes without the earlier transaction accept. While the base fee is over the cap, it waits.
 */
export function freeingFees(before: Fees, baseFee: bigint, tip: Tip, cap: bigint): Fees {
  const base = least(baseFee, cap);
  const offer = most(before.maxPriorityFee, firstOffer(tip, base));
  return raiseFees(before, base, tip, cap) ?? { maxFee: cap, maxPriorityFee: least(offer, cap) };
}
