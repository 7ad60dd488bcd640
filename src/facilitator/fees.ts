// What a transaction may pay for its place in a block (EIP-1559), first and when it is replaced. Pure; all amounts
// are wei per gas.

export interface Fees {
  readonly maxFee: bigint;
  readonly maxPriorityFee: bigint;
}

/** The base fee rises by an eighth in a block at most: twice the present one lasts for six full blocks. */
const BASE_FEE_FACTOR = 2n;
/** Nodes take a replacement from 10 % more on in both fields; an eighth is on the safe side of their rounding. */
const RAISE_DIVISOR = 8n;
const WEI_PER_GWEI = 1_000_000_000;

function least(a: bigint, b: bigint): bigint {
  return a < b ? a : b;
}

function most(a: bigint, b: bigint): bigint {
  return a > b ? a : b;
}

/** @param gwei may have a fraction */
export function gweiToWei(gwei: number): bigint {
  return BigInt(Math.round(gwei * WEI_PER_GWEI));
}

/** The fees of a new transaction; null while the base fee is over the cap: no block would take it. */
export function quoteFees(baseFee: bigint, tip: bigint, cap: bigint): Fees | null {
  if (baseFee > cap) return null;
  const maxFee = least(BASE_FEE_FACTOR * baseFee + tip, cap);
  return { maxFee, maxPriorityFee: least(tip, maxFee) };
}

/** The least that nodes take instead of `amount`. */
function raised(amount: bigint): bigint {
  return amount + amount / RAISE_DIVISOR + 1n;
}

/**
 * The fees of a replacement: enough for nodes to take it instead of the one before, and what a new transaction would
 * pay if that is more. Null when that is not possible below the cap, or would not get it into a block either.
 */
export function raiseFees(before: Fees, baseFee: bigint, tip: bigint, cap: bigint): Fees | null {
  if (baseFee > cap) return null;
  const maxFeeLeast = raised(before.maxFee);
  const maxPriorityFeeLeast = raised(before.maxPriorityFee);
  const maxPriorityFee = most(maxPriorityFeeLeast, least(tip, cap));
  const wanted = most(maxFeeLeast, BASE_FEE_FACTOR * baseFee + maxPriorityFee);
  const maxFee = least(wanted, cap);
  if (maxFee < maxFeeLeast || maxFee < maxPriorityFeeLeast) return null;
  return { maxFee, maxPriorityFee: least(maxPriorityFee, maxFee) };
}
