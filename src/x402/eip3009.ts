// EIP-3009 signatures: the EIP-712 digest, written out for this one type, and the recovery of the signer's address.
// `domain` is the hash of the token's EIP-712 domain, from network.ts.
import { secp256k1 } from "@noble/curves/secp256k1";
import { keccak_256 } from "@noble/hashes/sha3";
import { type Authorization, type Hex, lowerHex } from "./types.ts";

const TRANSFER_TYPE = keccak_256(
  "TransferWithAuthorization(address from,address to,uint256 value,uint256 validAfter,uint256 validBefore,bytes32 nonce)",
).toHex();

const SIGNATURE = /^0x[0-9a-fA-F]{130}$/;
const ORDER = secp256k1.CURVE.n;
const HALF_ORDER = ORDER >> 1n;

/** A value as the 64 hex digits of 32 bytes. */
const word = (value: string | bigint): string =>
  (typeof value === "string" ? value.slice(2) : value.toString(16)).padStart(64, "0");

/** What the payer signs (EIP-712). */
export function authorizationDigest(domain: Hex, authorization: Authorization): Uint8Array {
  const { from, to, value, validAfter, validBefore, nonce } = authorization;
  const words = [from, to, value, validAfter, validBefore].map(word).join("") + nonce.slice(2);
  const struct = Buffer.from(TRANSFER_TYPE + words, "hex");
  // A character that is not a hex digit ends the buffer early.
  if (words.length !== 6 * 64 || struct.length !== 7 * 32) {
    throw new TypeError("not an authorization in the form of types.ts");
  }
  // EIP-191 version 1: 0x19 0x01, the domain separator, the struct's hash.
  return keccak_256(Buffer.from(`1901${domain.slice(2)}${keccak_256(struct).toHex()}`, "hex"));
}

/** The token's rule (and EIP-2): 65 bytes, s in the lower half of the order, v 27 or 28. Some signers write v as 0 or 1. */
function parsePlainSignature(signature: Hex) {
  if (!SIGNATURE.test(signature)) return null;
  const r = BigInt(signature.slice(0, 66));
  const s = BigInt(`0x${signature.slice(66, 130)}`);
  const v = Number.parseInt(signature.slice(130), 16);
  const recovery = v >= 27 ? v - 27 : v;
  if (recovery !== 0 && recovery !== 1) return null;
  if (r === 0n || r >= ORDER || s === 0n || s > HALF_ORDER) return null;
  return { r, s, recovery };
}

/** The signature in the form that the token accepts from a plain account; null when the token would not accept it. */
export function canonicalSignature(signature: Hex): Hex | null {
  const plain = parsePlainSignature(signature);
  if (plain === null) return null;
  return `${lowerHex(signature.slice(0, 130))}${plain.recovery === 0 ? "1b" : "1c"}`;
}

/** The signer's address; null if the signature is not a canonical plain one, or has no public key. */
export function recoverSigner(domain: Hex, authorization: Authorization, signature: Hex): Hex | null {
  const plain = parsePlainSignature(signature);
  if (plain === null) return null;
  const digest = authorizationDigest(domain, authorization);
  try {
    const key = new secp256k1.Signature(plain.r, plain.s).addRecoveryBit(plain.recovery).recoverPublicKey(digest);
    return `0x${keccak_256(key.toRawBytes(false).subarray(1)).subarray(12).toHex()}`;
  } catch {
    // Not every r is the x coordinate of a point on the curve, and for one value of s the recovered point is no public key.
    return null;
  }
}
