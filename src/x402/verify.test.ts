import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import {
  anyAuthorization,
  anyHex,
  anyPrivateKey,
  anyUint256,
  signed,
} from "../../test/support/chain/authorizations.ts";
import { BASE } from "../../test/support/network.ts";
import type { Authorization, Payment, Requirements } from "./types.ts";
import { checkRequirements, checkSignature, checkWindow, keyOf } from "./verify.ts";

const TO = "0x209693bc6afc0c5328ba36faf03c514ef312287c";
const OTHER = "0x1111111111111111111111111111111111111111";
const NOW = 1_800_000_000;

const AUTHORIZATION: Authorization = {
  from: "0x857b06519e91e3a54538791bdbb0e22373e36b66",
  to: TO,
  value: 10_000n,
  validAfter: 0n,
  validBefore: BigInt(NOW + 60),
  nonce: `0x${"ab".repeat(32)}`,
};

const PAYMENT: Payment = {
  x402Version: 1,
  scheme: "exact",
  network: "base",
  authorization: AUTHORIZATION,
  signature: `0x${"11".repeat(65)}`,
};

const REQUIREMENTS: Requirements = {
  scheme: "exact",
  network: "base",
  maxAmountRequired: 10_000n,
  asset: "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913",
  payTo: TO,
  resource: "https://gateway.example/v1/proxy/agent_1",
  maxTimeoutSeconds: 60,
};

function paying(change: Partial<Authorization>): Payment {
  return { ...PAYMENT, authorization: { ...AUTHORIZATION, ...change } };
}

describe("the check of a signature", () => {
  test("knows the payer's own signature, and leaves every other to the token", async () => {
    await fc.assert(
      fc.asyncProperty(anyPrivateKey, anyAuthorization, anyHex(20), async (key, unsigned, stranger) => {
        const { authorization, signature } = await signed(key, unsigned);
        expect(checkSignature({ domain: BASE.token.domain, ...PAYMENT, authorization, signature })).toBe("payer");
        fc.pre(stranger !== authorization.from);
        const taken = { ...authorization, from: stranger };
        expect(checkSignature({ domain: BASE.token.domain, ...PAYMENT, authorization: taken, signature })).toBe(
          "other",
        );
        expect(
          checkSignature({ domain: BASE.token.domain, ...PAYMENT, authorization, signature: `${signature}00` }),
        ).toBe("other");
      }),
      { numRuns: 20 },
    );
  });
});

describe("the check of the times of a payment", () => {
  const bounds: [string, Partial<Authorization>, "not_yet_valid" | "expired" | null][] = [
    ["begins now", { validAfter: BigInt(NOW) }, null],
    ["begins in a second", { validAfter: BigInt(NOW + 1) }, "not_yet_valid"],
    ["ends after the margin", { validBefore: BigInt(NOW + 7) }, null],
    ["ends with the margin", { validBefore: BigInt(NOW + 6) }, null],
    ["ends within the margin", { validBefore: BigInt(NOW + 5) }, "expired"],
    ["has ended", { validBefore: 0n }, "expired"],
    ["never ends", { validBefore: 2n ** 256n - 1n }, null],
    ["never begins", { validAfter: 2n ** 256n - 1n, validBefore: 2n ** 256n - 1n }, "not_yet_valid"],
    ["ends before it begins", { validAfter: BigInt(NOW), validBefore: BigInt(NOW - 1) }, "expired"],
  ];
  test.each(bounds)("judges a time that %s", (_name, change, problem) => {
    expect(checkWindow({ ...AUTHORIZATION, ...change }, NOW, 6)).toBe(problem);
    expect(checkWindow({ ...AUTHORIZATION, ...change }, BigInt(NOW), 6n)).toBe(problem);
  });

  test("is the token's own rule for the block at t, when asked at t - 1 with a margin of 2", () => {
    const near = fc.bigInt(BigInt(NOW - 3), BigInt(NOW + 3));
    fc.assert(
      fc.property(near, near, near, (validAfter, validBefore, t) => {
        const holds = validAfter < t && t < validBefore;
        const problem = checkWindow({ ...AUTHORIZATION, validAfter, validBefore }, t - 1n, 2);
        expect(problem === null).toBe(holds);
      }),
    );
  });

  test("refuses a time that is no whole number rather than let it pass", () => {
    expect(() => checkWindow(AUTHORIZATION, Number.NaN, 6)).toThrow(RangeError);
  });
});

describe("the check of a payment's terms", () => {
  test("finds nothing where the price is met, by either rule", () => {
    expect(checkRequirements(BASE, PAYMENT, REQUIREMENTS, { exactValue: true })).toBeNull();
    expect(checkRequirements(BASE, PAYMENT, REQUIREMENTS, { exactValue: false })).toBeNull();
  });

  test("asks for the price itself, or for no more than it", () => {
    fc.assert(
      fc.property(anyUint256, anyUint256, (value, maxAmountRequired) => {
        const required = { ...REQUIREMENTS, maxAmountRequired };
        const exact = checkRequirements(BASE, paying({ value }), required, { exactValue: true });
        const most = checkRequirements(BASE, paying({ value }), required, { exactValue: false });
        expect(exact).toBe(value === maxAmountRequired ? null : "wrong_value");
        expect(most).toBe(value <= maxAmountRequired ? null : "value_too_high");
      }),
    );
  });

  const wrong: [string, Payment, Requirements, ReturnType<typeof checkRequirements>][] = [
    ["payment of another scheme", { ...PAYMENT, scheme: "upto" }, REQUIREMENTS, "wrong_scheme"],
    ["requirement of another scheme", PAYMENT, { ...REQUIREMENTS, scheme: "Exact" }, "wrong_scheme"],
    ["payment on another network", { ...PAYMENT, network: "base-sepolia" }, REQUIREMENTS, "wrong_network"],
    ["requirement of another network", PAYMENT, { ...REQUIREMENTS, network: "eip155:8453" }, "wrong_network"],
    ["requirement of another asset", PAYMENT, { ...REQUIREMENTS, asset: OTHER }, "wrong_asset"],
    ["payment to someone else", paying({ to: OTHER }), REQUIREMENTS, "wrong_recipient"],
    [
      "payment to someone else on another network",
      { ...paying({ to: OTHER }), network: "polygon" },
      REQUIREMENTS,
      "wrong_recipient",
    ],
  ];
  test.each(wrong)("refuses a %s", (_name, payment, requirements, problem) => {
    expect(checkRequirements(BASE, payment, requirements, { exactValue: true })).toBe(problem);
    expect(checkRequirements(BASE, payment, requirements, { exactValue: false })).toBe(problem);
  });
});

test("the key of a payment names the payer's nonce at the token on the chain, in lower case", () => {
  expect(keyOf(BASE, AUTHORIZATION)).toEqual({
    chain_id: 8453,
    token: "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913",
    payer: AUTHORIZATION.from,
    nonce: AUTHORIZATION.nonce,
  });
});
