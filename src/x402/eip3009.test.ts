import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { domainSeparator, hashTypedData, recoverTypedDataAddress } from "viem";
import {
  anyAuthorization,
  anyHex,
  anyPrivateKey,
  CURVE_ORDER,
  signed,
  typedData,
} from "../../test/support/chain/authorizations.ts";
import { BASE } from "../../test/support/network.ts";
import { authorizationDigest, canonicalSignature, recoverSigner } from "./eip3009.ts";
import type { Authorization, Hex } from "./types.ts";

const { domain } = BASE.token;

const AUTHORIZATION: Authorization = {
  from: "0x857b06519e91e3a54538791bdbb0e22373e36b66",
  to: "0x209693bc6afc0c5328ba36faf03c514ef312287c",
  value: 10_000n,
  validAfter: 0n,
  validBefore: 1_900_000_000n,
  nonce: "0xf3746613c2d920b5fdabc0856f2aeb2d4f88ee6037b8cc5d04a71a4462f13480",
};

function hex(bytes: Uint8Array): Hex {
  return `0x${Buffer.from(bytes).toString("hex")}`;
}

function joined(r: bigint, s: bigint, v: number): Hex {
  const word = (value: bigint) => value.toString(16).padStart(64, "0");
  return `0x${word(r)}${word(s)}${v.toString(16).padStart(2, "0")}`;
}

function parts(signature: Hex) {
  return {
    r: BigInt(signature.slice(0, 66)),
    s: BigInt(`0x${signature.slice(66, 130)}`),
    v: Number.parseInt(signature.slice(130), 16),
  };
}

describe("the digest of an authorization", () => {
  test("is made under the domain of the name, version, chain and address that the row of the network has", () => {
    const { name, version, address: verifyingContract } = BASE.token;
    const named = { name, version, chainId: BASE.chainId, verifyingContract };
    expect(domainSeparator({ domain: named })).toBe(domain);
  });

  test("equals viem's, whatever was hashed before", () => {
    fc.assert(
      fc.property(anyAuthorization, (authorization) => {
        expect(hex(authorizationDigest(domain, authorization))).toBe(hashTypedData(typedData(authorization)));
      }),
    );
  });

  test("does not change when another one is made", () => {
    const first = authorizationDigest(domain, AUTHORIZATION);
    const kept = hex(first);
    authorizationDigest(domain, { ...AUTHORIZATION, value: 1n });
    expect(hex(first)).toBe(kept);
    expect(hex(authorizationDigest(domain, AUTHORIZATION))).toBe(kept);
  });

  const formless: [string, Partial<Authorization>][] = [
    ["a value over 256 bits", { value: 1n << 256n }],
    ["a value below 0", { validAfter: -1n }],
    ["a short nonce", { nonce: "0xab" }],
    ["a long nonce", { nonce: `${AUTHORIZATION.nonce}00` }],
    ["a nonce that is no hex", { nonce: `0x${"zz".repeat(32)}` }],
    ["an address that is no hex", { to: `0x${"g".repeat(40)}` }],
  ];
  test.each(formless)("is not made of %s", (_name, change) => {
    expect(() => authorizationDigest(domain, { ...AUTHORIZATION, ...change })).toThrow(TypeError);
  });
});

describe("recovering a signer", () => {
  test("finds whoever signed, as viem does", async () => {
    await fc.assert(
      fc.asyncProperty(anyPrivateKey, anyAuthorization, async (key, unsigned) => {
        const { authorization, signature } = await signed(key, unsigned);
        const viems = await recoverTypedDataAddress({ ...typedData(authorization), signature });
        expect(recoverSigner(domain, authorization, signature)).toBe(authorization.from);
        expect(viems.toLowerCase()).toBe(authorization.from);
      }),
      { numRuns: 40 },
    );
  });

  test("agrees with viem on signatures that nobody made", async () => {
    const scalar = fc.bigInt(1n, CURVE_ORDER >> 1n);
    await fc.assert(
      fc.asyncProperty(anyAuthorization, scalar, scalar, fc.constantFrom(27, 28), async (authorization, ...rsv) => {
        const signature = joined(...rsv);
        const viems = await recoverTypedDataAddress({ ...typedData(authorization), signature }).catch(() => null);
        expect(recoverSigner(domain, authorization, signature)).toBe((viems?.toLowerCase() as Hex | undefined) ?? null);
      }),
      { numRuns: 60 },
    );
  });

  test("of any 65 bytes gives a signer where the token's rule holds and viem finds one, and never throws", async () => {
    const [half, prime] = [CURVE_ORDER >> 1n, 2n ** 256n - 2n ** 32n - 977n];
    const edges = [0n, 1n, 2n, 5n, half, half + 1n, CURVE_ORDER - 1n, CURVE_ORDER, prime - 1n, prime, 2n ** 256n - 1n];
    const word = fc.oneof(fc.constantFrom(...edges), fc.bigInt(0n, half), fc.bigInt(0n, 2n ** 256n - 1n));
    const anyV = fc.oneof(fc.constantFrom(0, 1, 2, 3, 26, 27, 28, 29, 30), fc.nat(255));
    const outcomes = new Set<boolean>();
    await fc.assert(
      fc.asyncProperty(anyAuthorization, word, word, anyV, async (authorization, r, s, v) => {
        const signature = joined(r, s, v);
        const isPlain = r > 0n && r < CURVE_ORDER && s > 0n && s <= half && [0, 1, 27, 28].includes(v);
        const viems = await recoverTypedDataAddress({ ...typedData(authorization), signature }).catch(() => null);
        const signer = recoverSigner(domain, authorization, signature);
        expect(signer).toBe(isPlain ? ((viems?.toLowerCase() as Hex | undefined) ?? null) : null);
        outcomes.add(signer === null);
      }),
      { numRuns: 300 },
    );
    expect(outcomes).toEqual(new Set([true, false]));
  });

  test("finds the payer no more when a byte of the signature differs", async () => {
    const { authorization, signature } = await signed(`0x${"11".repeat(32)}`, AUTHORIZATION);
    const canonical = canonicalSignature(signature);
    fc.assert(
      fc.property(fc.nat(64), fc.integer({ min: 1, max: 255 }), (at, difference) => {
        const bytes = Buffer.from(signature.slice(2), "hex");
        bytes[at] = (bytes[at] ?? 0) ^ difference;
        fc.pre(canonicalSignature(hex(bytes)) !== canonical);
        expect(recoverSigner(domain, authorization, hex(bytes))).not.toBe(authorization.from);
      }),
    );
  });

  const fields: (keyof Authorization)[] = ["to", "value", "validAfter", "validBefore", "nonce"];
  test.each(fields)("finds the payer no more when %s differs", async (field) => {
    const { authorization, signature } = await signed(`0x${"12".repeat(32)}`, AUTHORIZATION);
    fc.assert(
      fc.property(anyAuthorization, (other) => {
        fc.pre(other[field] !== authorization[field]);
        const changed = { ...authorization, [field]: other[field] };
        expect(recoverSigner(domain, changed, signature)).not.toBe(authorization.from);
      }),
      { numRuns: 20 },
    );
  });

  test("does not find another payer under the same signature", async () => {
    const { authorization, signature } = await signed(`0x${"13".repeat(32)}`, AUTHORIZATION);
    fc.assert(
      fc.property(anyHex(20), (from) => {
        fc.pre(from !== authorization.from);
        expect(recoverSigner(domain, { ...authorization, from }, signature)).not.toBe(from);
      }),
      { numRuns: 20 },
    );
  });

  test("refuses the twin of a signature with a high s, which recovers to the same key", async () => {
    const { authorization, signature } = await signed(`0x${"14".repeat(32)}`, AUTHORIZATION);
    const { r, s, v } = parts(signature);
    const twin = joined(r, CURVE_ORDER - s, 55 - v);
    const viems = await recoverTypedDataAddress({ ...typedData(authorization), signature: twin });
    expect(viems.toLowerCase()).toBe(authorization.from);
    expect(recoverSigner(domain, authorization, twin)).toBeNull();
  });

  test("reads v 0 and 1 as 27 and 28, and hex in capitals", async () => {
    await fc.assert(
      fc.asyncProperty(anyPrivateKey, anyAuthorization, async (key, unsigned) => {
        const { authorization, signature } = await signed(key, unsigned);
        const { r, s, v } = parts(signature);
        const low = `0x${joined(r, s, v - 27)
          .slice(2)
          .toUpperCase()}` as const;
        expect(recoverSigner(domain, authorization, low)).toBe(authorization.from);
        expect(canonicalSignature(low)).toBe(signature);
      }),
      { numRuns: 20 },
    );
  });

  test("finds nobody where r is the x of no point", () => {
    expect(canonicalSignature(joined(5n, 1n, 27))).not.toBeNull();
    expect(recoverSigner(domain, AUTHORIZATION, joined(5n, 1n, 27))).toBeNull();
  });

  test("finds nobody where the key would be the point at infinity", () => {
    // With the base point for R and the digest for s, r⁻¹(sR − hG) is nothing.
    const baseX = 0x79be667ef9dcbbac55a06295ce870b07029bfcdb2dce28d959f2815b16f81798n;
    let authorization = AUTHORIZATION;
    let digest = CURVE_ORDER;
    for (let value = 1n; digest > CURVE_ORDER >> 1n; value++) {
      authorization = { ...AUTHORIZATION, value };
      digest = BigInt(hex(authorizationDigest(domain, authorization)));
    }
    expect(recoverSigner(domain, authorization, joined(baseX, digest, 27))).toBeNull();
    expect(recoverSigner(domain, authorization, joined(baseX, digest - 1n, 27))).not.toBeNull();
  });
});

describe("the one form of a signature", () => {
  const half = CURVE_ORDER >> 1n;
  const refused: [string, Hex][] = [
    ["nothing", "0x"],
    ["the 64 bytes of EIP-2098", `0x${"11".repeat(64)}`],
    ["66 bytes", `0x${"11".repeat(64)}1b1b`],
    ["r 0", joined(0n, 1n, 27)],
    ["s 0", joined(1n, 0n, 27)],
    ["r at the order", joined(CURVE_ORDER, 1n, 27)],
    ["s above the half", joined(1n, half + 1n, 27)],
    ["s at the order", joined(1n, CURVE_ORDER, 27)],
    ["v 2", joined(1n, 1n, 2)],
    ["v 26", joined(1n, 1n, 26)],
    ["v 29", joined(1n, 1n, 29)],
    ["the v of EIP-155", joined(1n, 1n, 37)],
    ["v 255", joined(1n, 1n, 255)],
    ["what is no hex", `0x${"zz".repeat(65)}`],
    ["a line break behind it", `${joined(1n, 1n, 27)}\n`],
  ];
  test.each(refused)("is not made of %s", (_name, signature) => {
    expect(canonicalSignature(signature)).toBeNull();
    expect(recoverSigner(domain, AUTHORIZATION, signature)).toBeNull();
  });

  test("may have the greatest r and s that there are", () => {
    const greatest = joined(CURVE_ORDER - 1n, half, 28);
    expect(canonicalSignature(greatest)).toBe(greatest);
  });
});
