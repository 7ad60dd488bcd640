// What a transaction may pay for its place in a block (EIP-1559), first and when it is replaced. Pure; all amounts
// are wei per gas.

/** What nodes suggest as priority fee; the least of a replacement, and the most while the base fee is not higher. */
export type Tip = Readonly<Record<"suggested" | "least" | "most", bigint>>;

export interface Fees {
  readonly maxFee: bigint;
  readonly maxPriorityFee: bigint;
}

/** The base fee rises by an eighth in a block at most: twice the present one lasts for six full blocks. */
const BASE_FEE_FACTOR = 2n;
/** Nodes take a replacement from 10 % more on in both fields; an eighth is on the safe side of their rounding. */
const RAISE_DIVISOR = 8n;

const least = (a: bigint, b: bigint): bigint => (a < b ? a : b);
const most = (a: bigint, b: bigint): bigint => (a > b ? a : b);

/**
 * A node's suggestion is a first offer: at most the base fee, or the network's most where that is more. If a place
 * in a block costs more than that, replacements raise the offer step by step.
 */
function sensible(tip: Tip, baseFee: bigint): bigint {
  return least(tip.suggested, most(baseFee, tip.most));
}

/** The fees of a new transaction; null while the base fee is over the cap: no block would take it. */
export function quoteFees(baseFee: bigint, tip: Tip, cap: bigint): Fees | null {
  if (baseFee > cap) return null;
  const offer = sensible(tip, baseFee);
  const maxFee = least(BASE_FEE_FACTOR * baseFee + offer, cap);
  return { maxFee, maxPriorityFee: least(offer, maxFee) };
}

/** The least that nodes take instead of `amount`. */
const raised = (amount: bigint): bigint => amount + amount / RAISE_DIVISOR + 1n;

/**
 * The fees of a replacement: enough for nodes to take it instead of the one before, and what a new transaction would
 * pay if that is more. Null when that is not possible below the cap, or would not get it into a block either.
 */
export function raiseFees(before: Fees, baseFee: bigint, tip: Tip, cap: bigint): Fees | null {
  if (baseFee > cap) return null;
  const maxFeeLeast = raised(before.maxFee);
  const maxPriorityFeeLeast = raised(before.maxPriorityFee);
  const maxPriorityFee = most(maxPriorityFeeLeast, most(sensible(tip, baseFee), tip.least));
  const wanted = most(maxFeeLeast, BASE_FEE_FACTOR * baseFee + maxPriorityFee);
  const maxFee = least(wanted, cap);
  if (maxFee < maxFeeLeast || maxFee < maxPriorityFeeLeast) return null;
  return { maxFee, maxPriorityFee: least(maxPriorityFee, maxFee) };
}

/**
 * The fees of a transaction that does nothing, in place of one that must not land any more. There are always some: where
 * the cap leaves no room to raise, it is the cap itself. Nodes that do not hold the earlier one take it, and a base fee
 * over the cap comes down again.
 */
export function freeingFees(before: Fees, baseFee: bigint, tip: Tip, cap: bigint): Fees {
  const base = least(baseFee, cap);
  const offer = most(before.maxPriorityFee, sensible(tip, base));
  return raiseFees(before, base, tip, cap) ?? { maxFee: cap, maxPriorityFee: least(offer, cap) };
}
