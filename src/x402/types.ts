// The values of x402 after parsing: integers are bigint, and addresses and other hex are lower case, so that two spellings of
// one value are equal. The spellings of the wire are known to codec.ts alone.
import type { Hex } from "../core/bytes.ts";

export type { Hex };

/** The one spelling in which hex is kept and compared. */
export const lowerHex = (text: string): Hex => `0x${text.slice(2).toLowerCase()}`;

/** Decimal digits of the largest integer of 256 bits. */
export const UINT256_DIGITS_MAX = 78;
export const UINT256_MAX = 2n ** 256n - 1n;

/** The integer in a text of decimal digits; null for any other text, and for one of more than 256 bits. */
export function parseUint256(text: string): bigint | null {
  const significant = text.replace(/^0+/, "");
  // Parsing digits takes more than linear time, so their number is bounded first.
  if (!/^[0-9]+$/.test(text) || significant.length > UINT256_DIGITS_MAX) return null;
  const integer = BigInt(significant);
  return integer <= UINT256_MAX ? integer : null;
}

/** The arguments of EIP-3009 `transferWithAuthorization` that the payer signed. */
export interface Authorization {
  readonly from: Hex;
  readonly to: Hex;
  /** Smallest units of the token. */
  readonly value: bigint;
  /** Unix seconds; both bounds are exclusive on chain. */
  readonly validAfter: bigint;
  readonly validBefore: bigint;
  /** 32 bytes. */
  readonly nonce: Hex;
}

export interface Payment {
  /** The version whose header carried the payment, and whose response header answers it. */
  readonly x402Version: 1 | 2;
  readonly scheme: string;
  /** The network's version 1 name, whichever version carried the payment. */
  readonly network: string;
  readonly authorization: Authorization;
  /** 65 bytes from a plain account; a contract wallet's may be longer. */
  readonly signature: Hex;
}

/** The fields of PaymentRequirements that decide about money. */
export interface Requirements {
  readonly scheme: string;
  readonly network: string;
  readonly maxAmountRequired: bigint;
  /** The token's address. */
  readonly asset: Hex;
  readonly payTo: Hex;
  readonly resource: string;
  readonly maxTimeoutSeconds: number;
}

/** What makes an authorization unique: a payer's nonce at one token on one chain. Lower case throughout. */
export interface PaymentKey {
  readonly chain_id: number;
  readonly token: Hex;
  readonly payer: Hex;
  readonly nonce: Hex;
}
