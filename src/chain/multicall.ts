// Multicall3 (https://github.com/mds1/multicall), by which one transaction makes several payments: each call may fail
// without undoing the others. The contract takes no part in what a payment means, for the token asks only who signed it.
// It passes all of the remaining gas on to each call, so no payer with code may share a transaction with others: its code
// could burn the gas of all. Pure.
import { encodeFunctionData, keccak256, parseAbi } from "viem";
import type { Hex } from "../x402/types.ts";

const ABI = parseAbi([
  "struct Call3 { address target; bool allowFailure; bytes callData; }",
  "struct Result { bool success; bytes returnData; }",
  "function aggregate3(Call3[] calls) payable returns (Result[] returnData)",
]);

export const MULTICALL3_CHECKSUMMED = "0xcA11bde05977b3631167028862bE2a173976CA11";
export const MULTICALL3: Hex = "0xca11bde05977b3631167028862be2a173976ca11";

/** Of the code that stands there on Base, as on most chains. */
const CODE_HASH: Hex = "0xd5c15df687b16f2ff992fc8d767b4216323184a2bbc6ee2f9c398c318e770891";

/**
 * What a shared transaction may need beside the sum of its payments' own limits. Each limit is that of a transaction of
 * its own, so it holds 21,000 gas for what every transaction costs; that pays for the call's place in the data and in
 * Multicall3 several times over (measured: 6,000 for each).
 */
export const SHARED_GAS = 50_000n;
/** Of one transaction; Base takes at most 2^24 = 16,777,216 (EIP-7825). */
export const SHARED_GAS_MAX = 16_000_000n;

/** The call data of `aggregate3`: each of the calls goes to the target, and each may fail alone. */
export function aggregateData(target: Hex, calls: readonly Hex[]): Hex {
  const args = calls.map((callData) => ({ target, allowFailure: true, callData }));
  return encodeFunctionData({ abi: ABI, args: [args] });
}

/** Whether this is the code of Multicall3, and no other contract that may do other things with the gas. */
export function isMulticall3(code: Hex): boolean {
  return keccak256(code) === CODE_HASH;
}
