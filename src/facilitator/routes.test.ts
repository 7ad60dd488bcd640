import { expect, test } from "bun:test";
import { account, request } from "../../test/support/chain/settling.ts";
import { BASE } from "../../test/support/network.ts";
import { Fault } from "../core/fault.ts";
import type { Hex } from "../x402/types.ts";
import { keyOf } from "../x402/verify.ts";
import { limitsOf } from "./payments/guardrails.ts";
import { x402V1 } from "./routes.ts";
import * as outcome from "./settle/outcome.ts";

const HASH: Hex = `0x${"ab".repeat(32)}`;
const NONE = { maxPerTransaction: 1n, dailyCeiling: 10_000n, dailyGasWei: 0n, dailyGasAllWei: 0n, minValue: 0n };

/** The body, or the Fault, that an outcome is answered with. */
async function shown(of: (asked: ReturnType<typeof outcome.settlementRequest>) => outcome.CollectionOutcome) {
  const asked = await request();
  const limits = limitsOf(account(), NONE);
  try {
    const body = x402V1(BASE).answer(asked, of(outcome.settlementRequest(BASE, account(), asked, limits, "payer")));
    return JSON.stringify(body).replace(keyOf(BASE, asked.payment.authorization).payer, "PAYER");
  } catch (error) {
    if (!(error instanceof Fault)) throw error;
    return [error.kind, error.message, error.retryAfterSeconds ?? null];
  }
}

const failure = (transaction: string) =>
  `{"success":false,"errorReason":"payment could not be collected","transaction":"${transaction}","network":"base","payer":"PAYER"}`;
const OUTSIDE = "the payment is outside the limits of this account";
const BUSY = "the account has its share of the settlements under way";

test.each([
  [
    "settled",
    () => outcome.settledBy(HASH),
    `{"success":true,"transaction":"${HASH}","network":"base","payer":"PAYER"}`,
  ],
  ["declined for good", () => outcome.declined("expired"), failure("")],
  ["declined on these terms", () => outcome.declined("claimed_on_other_terms", HASH), failure(HASH)],
  [
    "not included in time",
    () => ({ kind: "pending", reason: "not included in time", hash: HASH, retryAfterSeconds: null }) as const,
    failure(HASH),
  ],
  ["being settled", () => outcome.BEING_SETTLED, ["unavailable", "this payment is being settled", 2]],
  ["not possible now", () => outcome.notNow("gas wallet low"), ["unavailable", "no settlement is possible now", 5]],
  [
    "behind the payer's others",
    () => outcome.putOff("held"),
    ["unavailable", "other payments of this payer come first", 2],
  ],
  ["behind the account's others", () => outcome.putOff("gas held"), ["over_limit", "other payments come first", 2]],
  ["over the account's share", () => outcome.overShare("too many"), ["over_limit", BUSY, 5]],
] as const)("as x402 version 1 has it: %s", async (_, of, expected) => {
  expect<unknown>(await shown(of)).toEqual(expected);
});

test("as x402 version 1 has it: a limit says when to ask again only if it passes by itself", async () => {
  expect(await shown((asked) => outcome.overLimit("over_max_per_transaction", asked))).toEqual([
    "over_limit",
    OUTSIDE,
    null,
  ]);
  expect(await shown((asked) => outcome.overLimit("over_daily_ceiling", asked))).toEqual(["over_limit", OUTSIDE, 3600]);
  const small = (asked: ReturnType<typeof outcome.settlementRequest>) => ({
    ...asked,
    limits: { ...asked.limits, dailyCeiling: 1n },
  });
  expect(await shown((asked) => outcome.overLimit("over_daily_ceiling", small(asked)))).toEqual([
    "over_limit",
    OUTSIDE,
    null,
  ]);
});
