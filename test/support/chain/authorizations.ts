// Random authorizations and signatures, and the typed data that viem takes for them: the oracle of our own hashing.

import fc from "fast-check";
import { privateKeyToAccount } from "viem/accounts";
import type { Authorization, Hex } from "../../../src/x402/types.ts";
import { BASE } from "../network.ts";
import { TRANSFER_TYPES } from "./payments.ts";

export const CURVE_ORDER = 0xfffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141n;

const UINT256_MAX = 2n ** 256n - 1n;

export function anyHex(bytes: number): fc.Arbitrary<Hex> {
  return fc
    .uint8Array({ minLength: bytes, maxLength: bytes })
    .map((value): Hex => `0x${Buffer.from(value).toString("hex")}`);
}

/** As often near its ends as anywhere. */
export const anyUint256 = fc.oneof(fc.bigInt(0n, 1n << 64n), fc.bigInt(0n, UINT256_MAX), fc.constant(UINT256_MAX));

export const anyAuthorization: fc.Arbitrary<Authorization> = fc.record({
  from: anyHex(20),
  to: anyHex(20),
  value: anyUint256,
  validAfter: anyUint256,
  validBefore: anyUint256,
  nonce: anyHex(32),
});

export const anyPrivateKey: fc.Arbitrary<Hex> = fc
  .bigInt(1n, CURVE_ORDER - 1n)
  .map((key): Hex => `0x${key.toString(16).padStart(64, "0")}`);

export function typedData(authorization: Authorization) {
  const { token } = BASE;
  return {
    domain: { name: token.name, version: token.version, chainId: BASE.chainId, verifyingContract: token.address },
    types: TRANSFER_TYPES,
    primaryType: "TransferWithAuthorization",
    message: authorization,
  } as const;
}

/** The authorization as an account signs it: from its own address. */
export async function signed(privateKey: Hex, unsigned: Authorization) {
  const account = privateKeyToAccount(privateKey);
  const authorization: Authorization = { ...unsigned, from: account.address.toLowerCase() as Hex };
  return { domain: BASE.token.domain, authorization, signature: await account.signTypedData(typedData(authorization)) };
}
