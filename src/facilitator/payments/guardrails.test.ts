import { expect, test } from "bun:test";
import fc from "fast-check";
import { BASE } from "../../../test/support/network.ts";
import { SCHEME } from "../../x402/network.ts";
import type { Hex, Payment, Requirements } from "../../x402/types.ts";
import { checkGuardrails, exceedsCeiling, limitsOf } from "./guardrails.ts";

/** Bounds that are none. */
const REST = { dailyGasAllWei: 0n, minValue: 0n };

const uint256 = fc.bigInt({ min: 0n, max: 2n ** 256n - 1n });
const limits = fc.record({
  maxPerTransaction: uint256,
  dailyCeiling: uint256,
  dailyGasWei: fc.constant(0n),
  dailyGasAllWei: fc.constant(0n),
  minValue: fc.constant(0n),
});

function presented(value: bigint): [Payment, Requirements] {
  const zero: Hex = `0x${"0".repeat(40)}`;
  const authorization = {
    from: `0x${"1".repeat(40)}` as const,
    to: zero,
    value,
    validAfter: 0n,
    validBefore: 0n,
    nonce: zero,
  };
  const kind = { scheme: SCHEME, network: BASE.name };
  return [
    { ...kind, x402Version: 1, authorization, signature: "0x" },
    {
      ...kind,
      maxAmountRequired: value,
      asset: BASE.token.key,
      payTo: zero,
      resource: "",
      maxTimeoutSeconds: 60,
    },
  ];
}

test("a payment that equals a limit is allowed, one unit more is not", () => {
  fc.assert(
    fc.property(limits, uint256, (given, part) => {
      const reserved = part % (given.dailyCeiling + 1n);
      const room = given.dailyCeiling - reserved;
      const most = room < given.maxPerTransaction ? room : given.maxPerTransaction;
      const used = { reserved, gasBurned: 10n ** 30n, gasUsed: 0n };
      expect(checkGuardrails(...presented(most), { network: BASE, used, limits: given })).toBeNull();
      const broken = room < given.maxPerTransaction ? "over_daily_ceiling" : "over_max_per_transaction";
      expect(checkGuardrails(...presented(most + 1n), { network: BASE, used, limits: given })).toBe(broken);
      expect(exceedsCeiling(reserved, room, given.dailyCeiling)).toBe(false);
      expect(exceedsCeiling(reserved, room + 1n, given.dailyCeiling)).toBe(true);
    }),
  );
});

test("gas burned up to the bound is allowed, one wei more is not, and 0 is no bound", () => {
  const limits = { maxPerTransaction: 1n, dailyCeiling: 1n, dailyGasWei: 10n, ...REST };
  const problem = (gasBurned: bigint, dailyGasWei = 10n) =>
    checkGuardrails(...presented(1n), {
      network: BASE,
      used: { reserved: 0n, gasBurned, gasUsed: 0n },
      limits: { ...limits, dailyGasWei },
    });
  expect([problem(10n), problem(11n), problem(10n ** 30n, 0n)]).toEqual([null, "over_daily_gas", null]);
});

test("an account's own limit comes before the deployment's, zero included, each for itself", () => {
  fc.assert(
    fc.property(limits, fc.option(uint256), fc.option(uint256), (defaults, max, ceiling) => {
      expect(limitsOf({ maxPerTransaction: max, dailyCeiling: ceiling }, defaults)).toEqual({
        maxPerTransaction: max === null ? defaults.maxPerTransaction : max,
        dailyCeiling: ceiling === null ? defaults.dailyCeiling : ceiling,
        dailyGasWei: defaults.dailyGasWei,
        ...REST,
      });
    }),
  );
});

test("another network or asset, in the payment or in the requirements, is not allowed whatever the amount", () => {
  const [payment, requirements] = presented(0n);
  const open = {
    network: BASE,
    used: { reserved: 0n, gasBurned: 0n, gasUsed: 0n },
    limits: { maxPerTransaction: 1n, dailyCeiling: 1n, dailyGasWei: 1n, ...REST },
  };
  expect(checkGuardrails(payment, requirements, open)).toBeNull();
  for (const [pay, require] of [
    [{ network: "base-sepolia" }, {}],
    [{ network: "eip155:8453" }, {}],
    [{}, { network: "base-sepolia" }],
    [{}, { asset: `0x${"1".repeat(40)}` as const }],
  ]) {
    expect(checkGuardrails({ ...payment, ...pay }, { ...requirements, ...require }, open)).toBe("kind_not_allowed");
  }
});
