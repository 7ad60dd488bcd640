import { describe, expect, test } from "bun:test";
import {
  ADDRESS,
  AUTHORIZATION,
  base64,
  changed,
  INTEGER,
  NO_ADDRESSES,
  NO_INTEGERS,
  PAYEE,
  PAYER,
  READ,
  reason,
  SIGNATURE,
  V1,
  V2,
  WIRE,
} from "../../test/support/chain/payment-values.ts";
import { BASE } from "../../test/support/network.ts";
import { acceptedMatches, decodePaymentHeader, decodePaymentSignature } from "./codec.ts";

describe("a payment header of version 1", () => {
  test("is read into integers and lower-case hex", () => {
    expect(decodePaymentHeader(base64(V1))).toEqual({ ok: true, value: READ });
  });

  test("may go without its padding", () => {
    for (const spaces of ["", " ", "  "]) {
      const text = base64(`${JSON.stringify(V1)}${spaces}`);
      expect(decodePaymentHeader(text).ok).toBe(true);
      expect(decodePaymentHeader(text.replaceAll("=", "")).ok).toBe(true);
    }
  });

  test("may hold keys that nobody knows, at every level", () => {
    const more = { ["__proto__"]: { x402Version: 2 }, toString: 1, memo: "é ✓", list: [{}] };
    const { payload } = V1;
    const authorization = { ...AUTHORIZATION, ...more };
    const extended = { ...V1, ...more, payload: { ...payload, ...more, authorization } };
    expect(decodePaymentHeader(base64(extended))).toEqual({ ok: true, value: READ });
  });

  test("may carry the longer signature of a contract wallet", () => {
    const long = `0x${"6492".repeat(2048)}`;
    expect(decodePaymentHeader(base64(changed(V1, "payload.signature", long))).ok).toBe(true);
    expect(reason(decodePaymentHeader(base64(changed(V1, "payload.signature", `${long}00`))))).toBe(
      "payload.signature: must be at most 4096 bytes",
    );
  });

  test("keeps integers of 256 bits, and zeros before them", () => {
    const most = (2n ** 256n - 1n).toString();
    for (const [text, value] of [
      [most, 2n ** 256n - 1n],
      [`${"0".repeat(100)}${most}`, 2n ** 256n - 1n],
      ["0000", 0n],
      ["007", 7n],
    ] as const) {
      const parsed = decodePaymentHeader(base64(changed(V1, "payload.authorization.value", text)));
      expect(parsed.ok && parsed.value.authorization.value).toBe(value);
    }
  });

  const whole = base64(V1);
  const texts: [string, string, string][] = [
    ["nothing", "", "X-PAYMENT: not valid JSON, since it is empty"],
    ["plain JSON", JSON.stringify(V1), "X-PAYMENT: must be standard base64"],
    [
      "the URL alphabet",
      base64({ a: "??>>~~" }).replace(/\+/g, "-").replace(/\//g, "_"),
      "X-PAYMENT: must be standard base64",
    ],
    ["a space in front", ` ${whole}`, "X-PAYMENT: must be standard base64"],
    ["a line break behind", `${whole}\n`, "X-PAYMENT: must be standard base64"],
    ["a line break within", `${whole.slice(0, 76)}\n${whole.slice(76)}`, "X-PAYMENT: must be standard base64"],
    ["two headers in one", `${whole}, ${whole}`, "X-PAYMENT: must be standard base64"],
    ["too much padding", `${base64("{}")}=`, "X-PAYMENT: must be standard base64"],
    ["a lone character", "e", "X-PAYMENT: must be standard base64"],
    ["bits after the end", "e31=", "X-PAYMENT: must be standard base64"],
    ["what is not UTF-8", Buffer.of(0x22, 0xff, 0x22).toString("base64"), "X-PAYMENT: not valid UTF-8"],
    ["what is not JSON", base64("{"), "X-PAYMENT: not valid JSON at line 1, character 2"],
    ["an array", base64([V1]), "X-PAYMENT: must be a JSON object"],
    ["null", base64(null), "X-PAYMENT: must be a JSON object"],
    ["a string", base64('"x"'), "X-PAYMENT: must be a JSON object"],
    ["a key given twice", base64('{"x402Version":1,"x402Version":1}'), "x402Version: given twice"],
    ["deep nesting", base64("[".repeat(70)), "X-PAYMENT: nested deeper than 64 levels"],
    ["16 KiB and one character", "A".repeat(16_385), "X-PAYMENT: must be at most 16384 characters"],
    ["version 2", base64(V2), "x402Version: must be 1"],
  ];
  test.each(texts)("is refused as %s", (_name, text, message) => {
    expect(reason(decodePaymentHeader(text))).toBe(message);
  });

  const fields: [string, unknown[], string][] = [
    ["x402Version", ["1", 1.5, 0, -1, 3, null, true, [1]], "must be 1"],
    ["scheme", [1, null, {}, ["exact"]], "must be a string"],
    ["network", [8453, null, {}, ["base"]], "must be a string"],
    ["scheme", [""], "must not be empty"],
    ["network", ["x".repeat(65)], "must be at most 64 characters"],
    ["payload", ["", null, [], 1, [V1.payload]], "must be a JSON object"],
    ["payload.authorization", ["", null, [], 1], "must be a JSON object"],
    ["payload.authorization.from", NO_ADDRESSES, ADDRESS],
    ["payload.authorization.to", NO_ADDRESSES, ADDRESS],
    ["payload.authorization.value", NO_INTEGERS, INTEGER],
    ["payload.authorization.validAfter", NO_INTEGERS, INTEGER],
    ["payload.authorization.validBefore", NO_INTEGERS, INTEGER],
    [
      "payload.authorization.nonce",
      ["", "0x", `0x${"ab".repeat(31)}`, `0x${"ab".repeat(33)}`, "ab".repeat(32), 1, null, []],
      "must be 0x and the 64 hexadecimal digits of 32 bytes",
    ],
    [
      "payload.signature",
      ["", "0x", `0x${"11".repeat(64)}`, `${SIGNATURE}0`, SIGNATURE.slice(2), `${SIGNATURE}zz`, 1, null, {}],
      "must be 0x and the hexadecimal digits of at least 65 bytes",
    ],
  ];
  test.each(fields)("is refused for a wrong %s", (path, values, problem) => {
    for (const value of values) {
      expect(reason(decodePaymentHeader(base64(changed(V1, path, value))))).toBe(`${path}: ${problem}`);
    }
    expect(reason(decodePaymentHeader(base64(changed(V1, path, undefined))))).toBe(`${path}: required`);
  });
});

describe("a payment header of version 2", () => {
  test("is read in the words of version 1, with what it answers", () => {
    expect(decodePaymentSignature(BASE, base64(V2))).toEqual({
      ok: true,
      value: {
        ...READ,
        x402Version: 2,
        accepted: {
          scheme: "exact",
          network: "base",
          amount: 10_000n,
          asset: "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913",
          payTo: READ.authorization.to,
        },
      },
    });
  });

  const refused: [string, unknown, string][] = [
    ["x402Version", 1, "x402Version: must be 2"],
    ["accepted", [V2.accepted], "accepted: must be a JSON object"],
    ["accepted", undefined, "accepted: required"],
    ["accepted.network", "base", "accepted.network: must be a CAIP-2 network"],
    ["accepted.network", "eip155:", "accepted.network: must be a CAIP-2 network"],
    ["accepted.amount", "1e4", `accepted.amount: ${INTEGER}`],
    ["accepted.amount", 10_000, `accepted.amount: ${INTEGER}`],
    ["accepted.asset", "USDC", `accepted.asset: ${ADDRESS}`],
    ["accepted.payTo", null, `accepted.payTo: ${ADDRESS}`],
    ["payload.signature", "0x", "payload.signature: must be 0x and the hexadecimal digits of at least 65 bytes"],
    ["payload.authorization", undefined, "payload.authorization: required"],
  ];
  test.each(refused)("is refused for a wrong %s", (path, value, message) => {
    expect(reason(decodePaymentSignature(BASE, base64(changed(V2, path, value))))).toBe(message);
  });

  test("is refused in version 1's form, by its own header's name where it has no field", () => {
    expect(reason(decodePaymentSignature(BASE, base64(V1)))).toBe("x402Version: must be 2");
    expect(reason(decodePaymentSignature(BASE, "%"))).toBe("PAYMENT-SIGNATURE: must be standard base64");
  });

  const offers: [string, string, unknown, boolean][] = [
    ["the offer itself", "accepted.amount", "10000", true],
    ["the offer in lower case", "accepted.payTo", PAYEE.toLowerCase(), true],
    ["another scheme", "accepted.scheme", "upto", false],
    ["another network", "accepted.network", "eip155:84532", false],
    ["another amount", "accepted.amount", "9999", false],
    ["another asset", "accepted.asset", PAYEE, false],
    ["another payee", "accepted.payTo", PAYER, false],
  ];
  test.each(offers)("answers, or does not answer, %s", (_name, path, value, matches) => {
    const parsed = decodePaymentSignature(BASE, base64(changed(V2, path, value)));
    expect(parsed.ok && acceptedMatches(parsed.value.accepted, WIRE)).toBe(matches);
  });
});
