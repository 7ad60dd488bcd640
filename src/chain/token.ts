// The token's contract: the call that moves the money, the events that prove it, and the reasons of refusals; and
// Multicall3, by which one transaction makes several such calls. Pure.
import * as viem from "viem";
import type { Network } from "../x402/network.ts";
import type { Authorization, Hex } from "../x402/types.ts";
import type { LogEntry, Receipt, RpcError } from "./json-rpc.ts";

const ABI = viem.parseAbi([
  "function authorizationState(address authorizer, bytes32 nonce) view returns (bool)",
  "function balanceOf(address account) view returns (uint256)",
  "function getL1FeeUpperBound(uint256 size) view returns (uint256)",
  "function isValidSignature(bytes32 digest, bytes signature) view returns (bytes4)",
  "struct Call3 { address target; bool allowFailure; bytes callData; }",
  "struct Result { bool success; bytes returnData; }",
  "function aggregate3(Call3[] calls) payable returns (Result[] returnData)",
]);

/**
 * The functions of the token; of the L1 fee oracle of OP-stack chains such as Base (`feeUpperBound`); of ERC-1271, by which the
 * token checks every payer that has code (`isValidSignature`); and of Multicall3. Each is prepared once, since finding a
 * function among others and hashing its name costs twice as much as encoding a call.
 */
export const CALLS = {
  transfer: viem.prepareEncodeFunctionData({
    abi: viem.parseAbi([
      "function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce, uint8 v, bytes32 r, bytes32 s)",
    ]),
  }),
  transferByAnySignature: viem.prepareEncodeFunctionData({
    abi: viem.parseAbi([
      "function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce, bytes signature)",
    ]),
  }),
  authorizationState: viem.prepareEncodeFunctionData({ abi: ABI, functionName: "authorizationState" }),
  balanceOf: viem.prepareEncodeFunctionData({ abi: ABI, functionName: "balanceOf" }),
  feeUpperBound: viem.prepareEncodeFunctionData({ abi: ABI, functionName: "getL1FeeUpperBound" }),
  isValidSignature: viem.prepareEncodeFunctionData({ abi: ABI, functionName: "isValidSignature" }),
  aggregate: viem.prepareEncodeFunctionData({ abi: ABI, functionName: "aggregate3" }),
};
/** The GasPriceOracle predeploy of OP-stack chains. */
export const FEE_ORACLE: Hex = "0x420000000000000000000000000000000000000f";
const VALID = "0x1626ba7e";

/** Less than any transfer costs: the base cost of a transaction, the signature check, and the storage of the nonce. */
export const GAS_MIN = 50_000n;
/** More than any transfer costs; what a contract wallet's signature check may burn is bounded by it. */
export const GAS_MAX = 500_000n;
const TRANSFER = viem.toEventSelector("Transfer(address,address,uint256)");
export const AUTHORIZATION_USED = viem.toEventSelector("AuthorizationUsed(address,bytes32)");
export const AUTHORIZATION_CANCELED = viem.toEventSelector("AuthorizationCanceled(address,bytes32)");

/**
 * The call data of the transfer. Both forms of the call take the signature of a contract wallet too, which must
 * arrive as it is; the one with v, r and s costs 412 gas less (measured), and takes 65 bytes only.
 * @param signature canonical where it is the payer's own, as settle/outcome.ts makes it: the token refuses v 0 and 1
 */
export function transferData(authorization: Authorization, signature: Hex): Hex {
  const { from, to, value, validAfter, validBefore, nonce } = authorization;
  const words = [from, to, value, validAfter, validBefore, nonce] as const;
  if (viem.size(signature) !== 65) {
    return viem.encodeFunctionData({ ...CALLS.transferByAnySignature, args: [...words, signature] });
  }
  const [r, s] = [viem.slice(signature, 0, 32), viem.slice(signature, 32, 64)];
  const v = viem.hexToNumber(viem.slice(signature, 64));
  return viem.encodeFunctionData({ ...CALLS.transfer, args: [...words, v, r, s] });
}

export const balanceData = (holder: Hex): Hex => viem.encodeFunctionData({ ...CALLS.balanceOf, args: [holder] });

/** Whether a contract wallet's answer to `isValidSignature` means valid: the first word, as the token reads it. */
export const saysValid = (answer: Hex): boolean => answer.startsWith(VALID.padEnd(66, "0"));

/** The indexed topics of the AuthorizationUsed and AuthorizationCanceled events, after the event's selector. */
export const authorizationTopics = ({ from, nonce }: Authorization): [authorizer: Hex, nonce: Hex] => [
  viem.pad(from),
  nonce,
];

const isEvent = ({ token }: Network, log: LogEntry, topics: readonly Hex[]): boolean =>
  log.address === token.key && Bun.deepEquals(log.topics, topics);

/** Whether the event says that the authorization was used or cancelled. */
export function isEndOf(network: Network, authorization: Authorization, log: LogEntry): boolean {
  const topics = authorizationTopics(authorization);
  return [AUTHORIZATION_USED, AUTHORIZATION_CANCELED].some((first) => isEvent(network, log, [first, ...topics]));
}

/**
 * Whether this transaction moved the money by this authorization. "Used" is not "paid", so both events of the token must be
 * there, the transfer after the use. Other events may lie between, even other uses by the same payer: each transfer proves
 * only the last use before it that no transfer has proven yet.
 */
export function isPaidBy(network: Network, authorization: Authorization, receipt: Receipt): boolean {
  const { from, to, value, nonce } = authorization;
  if (!receipt.succeeded) return false;
  const moved = [TRANSFER, viem.pad(from), viem.pad(to)];
  const amount = viem.numberToHex(value, { size: 32 });
  const unproven: Hex[] = [];
  for (const log of receipt.logs) {
    const [, , used] = log.topics;
    if (used !== undefined && isEvent(network, log, [AUTHORIZATION_USED, viem.pad(from), used])) unproven.push(used);
    else if (isEvent(network, log, moved) && log.data === amount && unproven.pop() === nonce) return true;
  }
  return false;
}

/** Nodes' messages for a call that the EVM ended without success; a revert usually has code 3 as well. */
const HALTED =
  /revert|out of gas|gas required exceeds|invalid opcode|invalid jump|stack (under|over)flow|vm execution error/i;
const REVERTED_CODE = 3;

/** Whether the error of an eth_call or eth_estimateGas is about the call, and not about the node. */
export const isRefusal = (error: RpcError): boolean => error.code === REVERTED_CODE || HALTED.test(error.message);

const ALLOWANCE = /gas required exceeds allowance\D*(\d+)/i;
const PRICE = /insufficient funds|base ?fee|fee cap|fee per gas/i;

/** Whether the sender can't pay for that much gas, or no block would accept the price: that says nothing about the call. */
export function isAboutPrice({ code, message }: RpcError, gas: bigint): boolean {
  if (code === REVERTED_CODE) return false;
  const [, allowed] = ALLOWANCE.exec(message) ?? [];
  return PRICE.test(message) || (allowed !== undefined && BigInt(allowed) < gas);
}

/** Whether the token refused because the authorization is used or cancelled. */
export const isUsedUp = (reason: string): boolean => /used or cancell?ed/i.test(reason);

/** Whether the window was not open yet: the newest block can be older than a window that has just opened. */
export const isNotYetValid = (reason: string): boolean => /not yet valid/i.test(reason);

/** The exact reason of a refusal, for the operator: nodes include the text of `Error(string)` in their message. */
export function refusalReason({ message }: RpcError): string {
  const reason = message.replace(/^.*?execution reverted:?\s*/i, "");
  return reason === "" ? "execution reverted" : reason;
}

// Multicall3 (https://github.com/mds1/multicall), by which one transaction makes several payments: each call may fail
// without undoing the others. The contract does not change what a payment means, since the token checks only who signed it.

export const MULTICALL3_CHECKSUMMED = "0xcA11bde05977b3631167028862bE2a173976CA11";
export const MULTICALL3: Hex = "0xca11bde05977b3631167028862be2a173976ca11";

/** The Keccak-256 of the contract's code on Base, and on most chains. */
const CODE_HASH: Hex = "0xd5c15df687b16f2ff992fc8d767b4216323184a2bbc6ee2f9c398c318e770891";

/**
 * Gas that a shared transaction may need beyond the sum of its payments' limits. Each limit was estimated for a transaction
 * of its own, so it includes the base cost of 21,000 gas: more than the call's data and its part in Multicall3 (measured: 6,000).
 */
export const SHARED_GAS = 50_000n;
/** The gas limit of one shared transaction; Base allows at most 2^24 = 16,777,216 (EIP-7825). */
export const SHARED_GAS_MAX = 16_000_000n;

/** The call data of `aggregate3`: each of the calls goes to the target, and each may fail alone. */
export function aggregateData(target: Hex, calls: readonly Hex[]): Hex {
  const args = calls.map((callData) => ({ target, allowFailure: true, callData }));
  return viem.encodeFunctionData({ ...CALLS.aggregate, args: [args] });
}

/** Whether this is the code of Multicall3, and not of another contract, which might waste the gas. */
export const isMulticall3 = (code: Hex): boolean => viem.keccak256(code) === CODE_HASH;
