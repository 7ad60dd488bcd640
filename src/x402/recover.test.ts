// Our recovery of a signer beside the library's, which is slower and was ours before: the same key, or none, for every
// input, those that no honest signer makes above all.
import { expect, test } from "bun:test";
import { secp256k1 } from "@noble/curves/secp256k1";
import { keccak_256 } from "@noble/hashes/sha3";
import fc from "fast-check";
import { anyAuthorization, CURVE_ORDER, signed } from "../../test/support/chain/authorizations.ts";
import { authorizationDigest, recoverSigner } from "./eip3009.ts";
import { type AffinePoint, recoverPublicKey } from "./recover.ts";
import type { Hex } from "./types.ts";

const N = CURVE_ORDER;
const P = secp256k1.CURVE.Fp.ORDER;
const UINT256_MAX = 2n ** 256n - 1n;
const word = (value: bigint) => value.toString(16).padStart(64, "0");

function byLibrary(digest: bigint, r: bigint, s: bigint, recovery: number): AffinePoint | null {
  try {
    const signature = new secp256k1.Signature(r, s).addRecoveryBit(recovery);
    const { x, y } = signature.recoverPublicKey(word(digest)).toAffine();
    return { x, y };
  } catch {
    return null;
  }
}

function expectSame(digest: bigint, r: bigint, s: bigint, recovery: 0 | 1): AffinePoint | null {
  const own = recoverPublicKey(digest, r, s, recovery);
  expect(own).toEqual(byLibrary(digest, r, s, recovery));
  return own;
}

/** As often near the ends and the powers of two, where digits and halves carry, as anywhere. */
const anyScalar = fc
  .oneof(
    fc.bigInt(1n, N - 1n),
    fc.bigInt(1n, 64n),
    fc.bigInt(1n, 64n).map((below) => N - below),
    fc.tuple(fc.integer({ min: 0, max: 255 }), fc.bigInt(-2n, 2n)).map(([bit, by]) => 2n ** BigInt(bit) + by),
  )
  .map((value) => (value <= 0n ? 1n : value % N || 1n));
const anyRecovery = fc.constantFrom<0 | 1>(0, 1);

test("any digest, r and s give the library's key, or none where it has none", () => {
  const outcomes = new Set<boolean>();
  fc.assert(
    fc.property(fc.bigInt(0n, UINT256_MAX), anyScalar, anyScalar, anyRecovery, (digest, r, s, recovery) => {
      outcomes.add(expectSame(digest, r, s, recovery) === null);
    }),
    { numRuns: 300 },
  );
  // About half of all r are the x of no point.
  expect(outcomes).toEqual(new Set([true, false]));
});

test("points whose sums meet their own multiples, each other or infinity give the library's key, or none", () => {
  let none = 0;
  for (let k = 1n; k <= 9n; k++) {
    const { x: r, y } = secp256k1.ProjectivePoint.BASE.multiply(k).toAffine();
    const recovery = (y & 1n) === 1n ? 1 : 0;
    for (const s of [1n, 2n, 5n, N - 1n]) {
      // With digest = s·k the key would be the point at infinity.
      for (const digest of [0n, 1n, k, (s * k) % N, N - ((s * k) % N), N, N + 1n, UINT256_MAX]) {
        if (expectSame(digest, r, s, recovery) === null) none++;
        expectSame(digest, r, s, recovery === 1 ? 0 : 1);
      }
    }
  }
  // One of the eight digests each time, and more where they coincide.
  expect(none).toBeGreaterThanOrEqual(36);
});

/** recoverSigner as it was with the library. */
function signerByLibrary(digest: Uint8Array, signature: Hex): Hex | null {
  const [r, s] = [BigInt(signature.slice(0, 66)), BigInt(`0x${signature.slice(66, 130)}`)];
  const v = Number.parseInt(signature.slice(130), 16);
  const recovery = v >= 27 ? v - 27 : v;
  if (signature.length !== 132 || recovery > 1 || r === 0n || r >= N || s === 0n || s > N / 2n) return null;
  try {
    const key = new secp256k1.Signature(r, s).addRecoveryBit(recovery).recoverPublicKey(digest);
    return `0x${Buffer.from(keccak_256(key.toRawBytes(false).subarray(1)).subarray(12)).toString("hex")}`;
  } catch {
    return null;
  }
}

test("a signature that breaks a rule of the token has no signer, and all others have the library's", () => {
  const edges = [0n, 1n, 2n, 5n, N / 2n, N / 2n + 1n, N - 1n, N, N + 1n, P - 1n, P, P + 1n, UINT256_MAX];
  const anyWord = fc.oneof(fc.constantFrom(...edges), fc.bigInt(0n, UINT256_MAX));
  const anyV = fc.oneof(fc.constantFrom(0, 1, 2, 3, 26, 27, 28, 29, 30, 255), fc.integer({ min: 0, max: 255 }));
  fc.assert(
    fc.property(anyAuthorization, anyWord, anyWord, anyV, (authorization, r, s, v) => {
      const signature: Hex = `0x${word(r)}${word(s)}${v.toString(16).padStart(2, "0")}`;
      const expected = signerByLibrary(authorizationDigest(authorization), signature);
      expect(recoverSigner(authorization, signature)).toBe(expected);
    }),
    { numRuns: 500 },
  );
});

test("an honest signature changed in one bit has the library's signer, and never the payer", async () => {
  const unsigned = fc.sample(anyAuthorization, 1)[0]!;
  const { authorization, signature } = await signed(`0x${"42".repeat(32)}`, unsigned);
  expect(recoverSigner(authorization, signature)).toBe(authorization.from);
  const digest = authorizationDigest(authorization);
  for (let bit = 0; bit < 520; bit += 13) {
    const changed = BigInt(signature) ^ (1n << BigInt(bit));
    const text: Hex = `0x${changed.toString(16).padStart(130, "0")}`;
    const found = recoverSigner(authorization, text);
    expect(found).toBe(signerByLibrary(digest, text));
    expect(found).not.toBe(authorization.from);
  }
});
