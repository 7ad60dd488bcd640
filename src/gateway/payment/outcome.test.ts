import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { BASE } from "../../../test/support/network.ts";
import {
  askedMs,
  needsLook,
  outcomeBy,
  outcomeOf,
  pauseAfter,
  type SettlementWindow,
  type SettleOutcome,
  settledRecord,
  verdictOf,
} from "./outcome.ts";

const PAYER = `0x${"ab".repeat(20)}` as const;
const HASH = `0x${"Cd".repeat(32)}`;
const EXPECTED = { network: BASE, payer: PAYER, amount: 1000n };
const success = { success: true, transaction: HASH, network: "base", payer: PAYER };
const kindOf = (status: number, body: unknown) => outcomeOf({ status, body }, EXPECTED).kind;

describe("an answer of a facilitator", () => {
  test("is a collection only with a hash, and no word of another payment", () => {
    expect(outcomeOf({ status: 200, body: success }, EXPECTED)).toEqual({
      kind: "collected",
      transaction: `0x${"cd".repeat(32)}`,
      fee: null,
    });
    const same = [
      { network: undefined, payer: undefined },
      { network: null, payer: null },
      { network: "eip155:8453", payer: PAYER.toUpperCase().replace("0X", "0x") },
      { extra: "words", facilitatorFee: "x" },
    ];
    for (const fields of same) expect(kindOf(200, { ...success, ...fields })).toBe("collected");
    const other = [
      { transaction: "" },
      { transaction: HASH.slice(0, -1) },
      { transaction: `${HASH}\n` },
      { transaction: undefined },
      { transaction: [HASH] },
      { payer: `0x${"ac".repeat(20)}` },
      { payer: "" },
      { payer: 5 },
      { network: "base-sepolia" },
      { network: "" },
      { success: "true" },
      { success: 1 },
    ];
    for (const fields of other) expect(kindOf(200, { ...success, ...fields })).toBe("unknown");
    for (const status of [201, 202, 204, 206, 301, 402, 500]) expect(kindOf(status, success)).toBe("unknown");
  });

  test("is one of the three outcomes, whatever its form, and a refusal only where the rules say so", () => {
    const status = fc.oneof(fc.constantFrom(200, 400, 402, 403, 404, 429, 500, 503), fc.integer());
    const body = fc.oneof(
      fc.anything(),
      fc.record(
        {
          success: fc.oneof(fc.boolean(), fc.anything()),
          transaction: fc.oneof(fc.constantFrom("", HASH, null), fc.anything()),
          network: fc.oneof(fc.constant("base"), fc.anything()),
          payer: fc.oneof(fc.constant(PAYER), fc.anything()),
          facilitatorFee: fc.anything(),
        },
        { requiredKeys: [] },
      ),
    );
    fc.assert(
      fc.property(status, body, (code, answer) => {
        const outcome = outcomeOf({ status: code, body: answer }, EXPECTED);
        const words = (answer ?? {}) as Record<string, unknown>;
        if (outcome.kind === "collected") {
          expect([code, words["success"]]).toEqual([200, true]);
          expect(String(words["transaction"]).toLowerCase()).toBe(outcome.transaction);
        }
        if (outcome.kind === "declined" && code === 200) {
          expect(words["success"]).toBe(false);
          expect(words["transaction"] ?? "").toBe("");
        } else if (outcome.kind === "declined") {
          expect([400, 403, 429]).toContain(code);
        }
      }),
      { numRuns: 2000 },
    );
  });

  test("is no decline when its reason says that the transfer is under way, whatever the status and the transaction", () => {
    for (const status of [200, 400, 402, 403, 429, 500]) {
      for (const transaction of [undefined, null, "", HASH]) {
        for (const errorReason of ["settlement_pending", "PENDING", "transaction pending"]) {
          const body = { success: false, errorReason, transaction };
          expect(outcomeOf({ status, body, retryAfter: "1" }, EXPECTED)).toMatchObject({
            kind: "unknown",
            isPending: true,
          });
        }
      }
    }
    expect(kindOf(200, { success: false, errorReason: "insufficient_funds", transaction: null })).toBe("declined");
    expect(kindOf(400, { error: "x", transaction: HASH })).toBe("unknown");
  });

  test("asks for patience by 429 only when it says for how long", () => {
    expect(outcomeOf({ status: 429, body: {}, retryAfter: "30" }, EXPECTED).kind).toBe("deferred");
    expect(outcomeOf({ status: 429, body: {} }, EXPECTED).kind).toBe("declined");
  });

  test("is logged with the usual reasons of its status, and without its own text", () => {
    const whyOf = (status: number) => {
      const outcome = outcomeOf({ status, body: { error: "secret" } }, EXPECTED);
      return outcome.kind === "declined" ? outcome.why : outcome.kind;
    };
    expect([400, 403, 429].map(whyOf)).toEqual([
      "answered 400, usually because it is not a facilitator, or takes other requests",
      "answered 403, usually because the tenant's certificate belongs to no account that is enabled",
      "answered 429, usually because the amount is above a limit of the account, or below the facilitator's minimum",
    ]);
  });

  test("names a fee only as plain digits up to the amount", () => {
    const fee = (facilitatorFee: unknown) => {
      const outcome = outcomeOf({ status: 200, body: { ...success, facilitatorFee } }, EXPECTED);
      return outcome.kind === "collected" ? outcome.fee : "lost";
    };
    expect(["0", "007", "1000"].map(fee)).toEqual([0n, 7n, 1000n]);
    const none = ["1001", "", "-1", "1e2", "0x10", " 5", "5\n", "9".repeat(1000), 5, null, ["5"]];
    expect(none.map(fee)).toEqual(none.map(() => null));
  });
});

const COLLECTED: SettleOutcome = { kind: "collected", transaction: "0xabcd", fee: null };
const refusal = (definite: boolean): SettleOutcome => ({ kind: "declined", definite, why: "" });
const DOUBT: SettleOutcome = { kind: "unknown", why: "" };
const HOUR = 3_600_000;
const T = 1_790_000_000_000;

const FIRST: SettlementWindow = {
  valid_before: T / 1000 + 60,
  sent_at: null,
  unknown_since: null,
  asked_ms: 0,
};
/** The second attempt after one that nobody knows of. */
const UNSURE: SettlementWindow = { ...FIRST, sent_at: T - 2000, unknown_since: T - 1000, asked_ms: 1000 };
const UNSENT: SettleOutcome = { kind: "unsent", why: "" };

function verdict(outcome: SettleOutcome, window: SettlementWindow, now = T): string {
  const found = verdictOf(outcome, window, now);
  return found.kind === "refused" ? found.reason : found.kind;
}

describe("a payment", () => {
  test("is refused by the first attempt, or stays open", () => {
    expect(verdict(refusal(true), FIRST)).toBe("declined");
    expect(verdict(refusal(false), FIRST)).toBe("declined");
    expect(verdict(DOUBT, FIRST)).toBe("open");
    expect(verdict(DOUBT, { ...FIRST, valid_before: 0 }, T + 48 * HOUR)).toBe("open");
  });

  test("is refused only by a verdict on it after its time, when its outcome was unknown once", () => {
    const expiry = { ...UNSURE, valid_before: T / 1000 };
    expect(verdict(refusal(true), expiry, T)).toBe("open");
    expect(verdict(refusal(true), expiry, T + 3_999)).toBe("open");
    expect(verdict(refusal(true), expiry, T + 4_000)).toBe("declined");
    for (const outcome of [refusal(false), DOUBT, UNSENT]) {
      expect(verdict(outcome, expiry, T + 10_000)).toBe("open");
    }
  });

  test("is not refused by a sign that it landed, once an attempt ended unknown", () => {
    const signs = ["invalid_exact_evm_payload_nonce_already_used", "ALREADY_USED", "invalid_transaction_state"];
    for (const errorReason of [...signs, "duplicate_settlement"]) {
      const outcome = outcomeOf({ status: 200, body: { success: false, errorReason, transaction: "" } }, EXPECTED);
      expect(verdict(outcome, FIRST)).toBe("declined");
      expect(verdict(outcome, { ...UNSURE, valid_before: T / 1000 }, T + HOUR)).toBe("open");
    }
  });

  test("that was put off expires with its time, unless an attempt before ended unknown", () => {
    const later: SettleOutcome = { kind: "deferred", why: "" };
    const window = { ...FIRST, valid_before: T / 1000 };
    expect(verdict(later, window, T + 3_999)).toBe("open");
    expect(verdict(later, window, T + 4_000)).toBe("expired");
    expect(verdict(later, { ...UNSURE, valid_before: T / 1000 }, T + HOUR)).toBe("open");
  });

  test("that was put off is looked up on the chain when its time is over, and what that tells decides how it ends", () => {
    const later: SettleOutcome = { kind: "deferred", why: "" };
    const window = { ...FIRST, valid_before: T / 1000 };
    expect([T - 1, T].map((now) => needsLook(later, window, now))).toEqual([false, true]);
    expect([0, 1].map((asked_ms) => needsLook(UNSENT, { ...window, asked_ms }, T))).toEqual([false, true]);
    const after = (found: SettleOutcome | null | undefined, changes: Partial<SettlementWindow> = {}) =>
      verdict(outcomeBy(later, found, { ...window, ...changes }), { ...window, ...changes }, T + HOUR);
    const over: SettleOutcome = { ...refusal(true), isFinal: true } as SettleOutcome;
    expect([undefined, null, COLLECTED, over].map((found) => after(found))).toEqual([
      "expired",
      "open",
      "settled",
      "expired",
    ]);
    const unsure = { sent_at: T, unknown_since: T };
    expect([undefined, null, COLLECTED, over].map((found) => after(found, unsure))).toEqual([
      "open",
      "open",
      "settled",
      "declined",
    ]);
    expect([24 * HOUR - 1, 24 * HOUR].map((asked_ms) => after(null, { asked_ms }))).toEqual(["open", "unknown"]);
  });

  test("is not declined while the chain, once it is asked, does not tell, whatever the facilitator says after an attempt in doubt", () => {
    const window = { ...UNSURE, valid_before: T / 1000 };
    for (const told of [refusal(true), refusal(false), { ...refusal(true), mayHaveLanded: true } as SettleOutcome]) {
      const after = (found: SettleOutcome | null, asked_ms = 1000) =>
        verdict(outcomeBy(told, found, window), { ...window, asked_ms }, T + HOUR);
      expect([after(null), after(COLLECTED), after(null, 24 * HOUR)]).toEqual(["open", "settled", "unknown"]);
    }
    expect(verdict(outcomeBy(refusal(true), undefined, window), window, T + HOUR)).toBe("declined");
  });

  test("ends with its time, and not before, when it never left the gateway", () => {
    const window = { ...FIRST, valid_before: T / 1000 };
    expect(verdict(UNSENT, window, T + 3_999)).toBe("open");
    expect(verdict(UNSENT, window, T + 4_000)).toBe("expired");
    expect(verdict(UNSENT, { ...UNSURE, valid_before: T / 1000 }, T + HOUR)).toBe("open");
  });

  test("is given up after a day of asking in which nobody told its outcome", () => {
    for (const outcome of [DOUBT, UNSENT, refusal(false), refusal(true)]) {
      const window = { ...UNSURE, valid_before: T / 1000 + 1_000_000 };
      expect(verdict(outcome, { ...window, asked_ms: 24 * HOUR - 1 }, T + 48 * HOUR)).toBe("open");
      expect(verdict(outcome, { ...window, asked_ms: 24 * HOUR })).toBe("unknown");
    }
  });

  test("counts as asked for only while the gateway asked, whatever a clock did meanwhile", () => {
    const at = (updated_at: number, unknown_since: number | null = T, valid_before = T / 1000 + 60) =>
      askedMs({ asked_ms: 1000, unknown_since, updated_at, valid_before }, T);
    expect(at(T - 60_000)).toBe(61_000);
    expect(at(T - 25 * HOUR)).toBe(601_000);
    expect(at(T + HOUR)).toBe(1000);
    expect(at(T - 60_000, null)).toBe(1000);
    expect(at(T - 60_000, null, T / 1000 - 1)).toBe(61_000);
    expect(askedMs({ asked_ms: 0, unknown_since: null, updated_at: 0, valid_before: 0 }, T)).toBe(0);
  });

  test("is settled when it was collected, however late that is learned", () => {
    for (const unknown_since of [null, T - 30 * HOUR]) {
      expect(verdict(COLLECTED, { ...UNSURE, unknown_since, valid_before: 0 })).toBe("settled");
    }
  });

  test("is tried again after pauses that grow from a second to a minute", () => {
    expect([1, 2, 3, 6, 7, 50, 5000].map((attempts) => pauseAfter(attempts, 1))).toEqual([
      1_000, 2_000, 4_000, 32_000, 60_000, 60_000, 60_000,
    ]);
    expect(pauseAfter(1, 0)).toBe(500);
  });

  test("is recorded to the last unit of its amount", () => {
    fc.assert(
      fc.property(
        fc.bigInt({ min: 1n, max: 2n ** 256n - 1n }),
        fc.bigInt({ min: 0n, max: 2n ** 256n }),
        (amount, cut) => {
          const fee = cut % (amount + 1n);
          const text = settledRecord({ attempts: 1, amount, transaction: "0x1", fee, settled_at: "now" });
          const record = JSON.parse(text) as Record<string, string>;
          const [operator, taken] = [record["operator_amount"] ?? "", record["facilitator_fee"] ?? ""];
          expect(BigInt(operator) + BigInt(taken)).toBe(amount);
        },
      ),
    );
    const without = settledRecord({ attempts: 1, amount: 5n, transaction: "0x1", fee: null, settled_at: "" });
    expect(Object.keys(JSON.parse(without))).not.toContain("facilitator_fee");
  });
});
