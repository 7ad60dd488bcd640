import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { anyAuthorization, anyHex, anyUint256 } from "../../test/support/chain/authorizations.ts";
import {
  acceptedMatches,
  challenge,
  decodePaymentHeader,
  decodePaymentSignature,
  type Parsed,
  parseSettleRequest,
  paymentResponse,
  requirementsFrom,
  requirementsOf,
  settleRequestJson,
  type WireRequirements,
} from "./codec.ts";
import type { Payment } from "./types.ts";

const SIGNATURE = `0x${"1a".repeat(64)}1b`;
const PAYER = "0x857b06519E91e3A54538791bDbb0E22373e36b66";
const PAYEE = "0x209693Bc6afc0C5328bA36FaF03C514EF312287C";
const TRANSACTION = `0x${"7e".repeat(32)}`;

const AUTHORIZATION = {
  from: PAYER,
  to: PAYEE,
  value: "10000",
  validAfter: "0",
  validBefore: "1900000000",
  nonce: `0x${"AB".repeat(32)}`,
};

const V1 = {
  x402Version: 1,
  scheme: "exact",
  network: "base",
  payload: { signature: SIGNATURE, authorization: AUTHORIZATION },
};

const WIRE = requirementsOf({
  amount: 10_000n,
  payTo: PAYEE,
  resource: "https://gateway.example/v1/proxy/agent_1",
  description: "Weather – für alle",
});

const V2 = {
  x402Version: 2,
  accepted: {
    scheme: "exact",
    network: "eip155:8453",
    amount: "10000",
    asset: WIRE.asset,
    payTo: PAYEE,
    maxTimeoutSeconds: 60,
    extra: WIRE.extra,
  },
  payload: { signature: SIGNATURE, authorization: AUTHORIZATION },
};

const READ: Payment = {
  x402Version: 1,
  scheme: "exact",
  network: "base",
  authorization: {
    from: "0x857b06519e91e3a54538791bdbb0e22373e36b66",
    to: "0x209693bc6afc0c5328ba36faf03c514ef312287c",
    value: 10_000n,
    validAfter: 0n,
    validBefore: 1_900_000_000n,
    nonce: `0x${"ab".repeat(32)}`,
  },
  signature: `0x${"1a".repeat(64)}1b`,
};

function base64(value: unknown): string {
  return Buffer.from(typeof value === "string" ? value : JSON.stringify(value)).toString("base64");
}

function unbase64(text: string): unknown {
  return JSON.parse(Buffer.from(text, "base64").toString());
}

function reason(parsed: Parsed<unknown>): string {
  return parsed.ok ? "accepted" : parsed.reason;
}

/** A copy with the value at a dotted path replaced, or without it. */
function changed(value: object, path: string, to: unknown): object {
  const copy = structuredClone(value);
  const keys = path.split(".");
  const last = keys.pop() ?? "";
  const holder = keys.reduce<Record<string, unknown>>(
    (at, key) => at[key] as Record<string, unknown>,
    copy as Record<string, unknown>,
  );
  if (to === undefined) delete holder[last];
  else holder[last] = to;
  return copy;
}

const INTEGER = "must be a string of decimal digits, of at most 256 bits";
const ADDRESS = "must be an address of 0x and 40 hexadecimal digits";

const NO_INTEGERS = [
  ...["", " ", "1 ", " 1", "+1", "-1", "1e3", "0x10", "1.0", "1_000", "1n", "٣", "1\n", "Infinity"],
  ...["9".repeat(79), (2n ** 256n).toString(), 1, 0, 1.5, null, true, [], ["1"], {}],
];
const NO_ADDRESSES = [
  ...["", "0x", PAYER.slice(2), `0X${PAYER.slice(2)}`, `${PAYER}0`, PAYER.slice(0, -1), `${PAYER}\n`, ` ${PAYER}`],
  ...[`0x${"g".repeat(40)}`, 1, null, [PAYER], {}],
];

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
    ["nothing", "", "X-PAYMENT: not valid JSON"],
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
    ["what is not JSON", base64("{"), "X-PAYMENT: not valid JSON"],
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
    expect(decodePaymentSignature(base64(V2))).toEqual({
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
    expect(reason(decodePaymentSignature(base64(changed(V2, path, value))))).toBe(message);
  });

  test("is refused in version 1's form, by its own header's name where it has no field", () => {
    expect(reason(decodePaymentSignature(base64(V1)))).toBe("x402Version: must be 2");
    expect(reason(decodePaymentSignature("%"))).toBe("PAYMENT-SIGNATURE: must be standard base64");
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
    const parsed = decodePaymentSignature(base64(changed(V2, path, value)));
    expect(parsed.ok && acceptedMatches(parsed.value.accepted, WIRE)).toBe(matches);
  });
});

describe("a settle request", () => {
  const request = { x402Version: 1, paymentPayload: V1, paymentRequirements: WIRE };
  const requirements = {
    scheme: "exact",
    network: "base",
    maxAmountRequired: 10_000n,
    asset: "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913",
    payTo: READ.authorization.to,
    resource: WIRE.resource,
    maxTimeoutSeconds: 60,
  };

  test("is read, whatever official servers add to the requirements", () => {
    const bare = {
      ...requirements,
      maxAmountRequired: "10000",
      outputSchema: null,
      extra: null,
      mimeType: 1,
    };
    for (const paymentRequirements of [WIRE, bare]) {
      const parsed = parseSettleRequest({ ...request, paymentRequirements });
      expect<unknown>(parsed).toEqual({ ok: true, value: { payment: READ, requirements } });
    }
  });

  test("leaves it to the guardrails to refuse another kind", () => {
    const elsewhere = { ...WIRE, network: "polygon", asset: PAYEE, scheme: "upto" };
    const parsed = parseSettleRequest({ ...request, paymentRequirements: elsewhere });
    expect(parsed.ok && parsed.value.requirements.network).toBe("polygon");
  });

  const refused: [string, unknown[], string][] = [
    ["x402Version", ["1", 2, null], "must be 1"],
    ["paymentPayload", [null, [], "", base64(V1)], "must be a JSON object"],
    ["paymentPayload.x402Version", ["1", 2, null], "must be 1"],
    ["paymentPayload.payload.authorization.value", NO_INTEGERS, INTEGER],
    ["paymentPayload.payload.authorization.value", ["0", "000"], "must be above 0"],
    ["paymentRequirements", [null, [], [WIRE], ""], "must be a JSON object"],
    ["paymentRequirements.scheme", [null, 1], "must be a string"],
    ["paymentRequirements.network", [null, 1], "must be a string"],
    ["paymentRequirements.maxAmountRequired", NO_INTEGERS, INTEGER],
    ["paymentRequirements.asset", NO_ADDRESSES, ADDRESS],
    ["paymentRequirements.payTo", NO_ADDRESSES, ADDRESS],
    ["paymentRequirements.resource", [null, 1, []], "must be a string"],
    ["paymentRequirements.resource", ["a\0b"], "must not contain U+0000"],
    [
      "paymentRequirements.maxTimeoutSeconds",
      ["60", -1, 1.5, 2 ** 53, Number.NaN, null, [60]],
      "must be an integer, not below 0",
    ],
  ];
  test.each(refused)("is refused for a wrong %s", (path, values, problem) => {
    for (const value of values) {
      expect(reason(parseSettleRequest(changed(request, path, value)))).toBe(`${path}: ${problem}`);
    }
    expect(reason(parseSettleRequest(changed(request, path, undefined)))).toBe(`${path}: required`);
  });

  test("is refused when it is no object", () => {
    for (const value of [undefined, null, 1, "x", [], [request]]) {
      expect(reason(parseSettleRequest(value))).toBe("body: must be a JSON object");
    }
  });

  test("finds no field in what an object inherits", () => {
    expect(reason(parseSettleRequest(Object.create(request)))).toBe("x402Version: required");
  });
});

describe("reading payments and requests", () => {
  const anyPayment: fc.Arbitrary<Payment> = fc.record({
    x402Version: fc.constantFrom(1, 2),
    scheme: fc.constant("exact"),
    network: fc.constant("base"),
    authorization: anyAuthorization,
    signature: fc.integer({ min: 65, max: 300 }).chain(anyHex),
  });

  test("gives back what the settle request was made of", () => {
    const collectable = anyPayment.filter(({ authorization }) => authorization.value > 0n);
    fc.assert(
      fc.property(collectable, anyUint256, anyHex(20), (payment, amount, payTo) => {
        const wire = requirementsOf({ amount, payTo, resource: WIRE.resource, description: "" });
        const sent = JSON.parse(JSON.stringify(settleRequestJson(payment, wire)));
        const parsed = parseSettleRequest(sent);
        expect(parsed).toEqual({
          ok: true,
          value: { payment: { ...payment, x402Version: 1 }, requirements: requirementsFrom(wire) },
        });
        expect(decodePaymentHeader(base64(sent.paymentPayload))).toEqual({
          ok: true,
          value: { ...payment, x402Version: 1 },
        });
      }),
    );
  });

  test("never throws, and never repeats what it was sent", () => {
    const secret = "5ec2e7";
    const anything = fc.oneof(fc.jsonValue(), fc.string(), fc.constant(`${secret}x`));
    const paths = fc.constantFrom(
      ...["x402Version", "scheme", "network", "payload", "payload.signature", "payload.authorization"],
      ...Object.keys(AUTHORIZATION).map((key) => `payload.authorization.${key}`),
    );
    fc.assert(
      fc.property(fc.string(), fc.jsonValue(), paths, anything, (text, json, path, value) => {
        for (const sent of [text, base64(text), base64(json), base64(changed(V1, path, value))]) {
          const [one, two] = [decodePaymentHeader(sent), decodePaymentSignature(sent)];
          expect(reason(one) + reason(two)).not.toContain(secret);
        }
        expect(typeof parseSettleRequest(json).ok).toBe("boolean");
        const request = {
          x402Version: 1,
          paymentPayload: changed(V1, path, value),
          paymentRequirements: WIRE,
        };
        expect(reason(parseSettleRequest(request))).not.toContain(secret);
      }),
      { numRuns: 500 },
    );
  });
});

describe("a challenge", () => {
  test("asks in both versions for the same", () => {
    const { body, header } = challenge(WIRE, "X-PAYMENT header is required");
    const accepts: WireRequirements = {
      scheme: "exact",
      network: "base",
      maxAmountRequired: "10000",
      resource: "https://gateway.example/v1/proxy/agent_1",
      description: "Weather – für alle",
      mimeType: "application/json",
      payTo: PAYEE,
      maxTimeoutSeconds: 60,
      asset: "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
      extra: { name: "USD Coin", version: "2" },
    };
    expect(body).toEqual({ x402Version: 1, error: "X-PAYMENT header is required", accepts: [accepts] });
    expect(unbase64(header)).toEqual({
      x402Version: 2,
      error: "X-PAYMENT header is required",
      resource: {
        url: "https://gateway.example/v1/proxy/agent_1",
        description: "Weather – für alle",
        mimeType: "application/json",
      },
      accepts: [V2.accepted],
    });
  });

  test("stays below what clients take as headers, however long the description", () => {
    const wire = { ...WIRE, description: "🌦".repeat(4096) };
    const { body, header } = challenge(wire, "missing");
    expect(header.length).toBeLessThan(4096);
    expect((unbase64(header) as { resource: unknown }).resource).toMatchObject({
      description: `${"🌦".repeat(255)}…`,
    });
    expect(body.accepts[0]?.description).toBe(wire.description);
  });
});

describe("a payment response", () => {
  test.each([
    [1, "X-PAYMENT-RESPONSE", "base"],
    [2, "PAYMENT-RESPONSE", "eip155:8453"],
  ] as const)("has the header and the name of the network of version %d", (version, name, network) => {
    const response = paymentResponse(version, { transaction: TRANSACTION, payer: PAYER });
    expect(response.name).toBe(name);
    expect(unbase64(response.value)).toEqual({
      success: true,
      transaction: TRANSACTION,
      network,
      payer: PAYER,
    });
  });
});
