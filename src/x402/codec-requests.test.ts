import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { anyAuthorization, anyHex, anyUint256 } from "../../test/support/chain/authorizations.ts";
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
  TRANSACTION,
  unbase64,
  V1,
  V2,
  WIRE,
} from "../../test/support/chain/payment-values.ts";
import { BASE } from "../../test/support/network.ts";
import {
  challenge,
  decodePaymentHeader,
  decodePaymentSignature,
  encodeBase64,
  parseSettleRequest,
  paymentResponse,
  requirementsFrom,
  requirementsOf,
  settleRequestJson,
} from "./codec.ts";
import type { WireRequirements } from "./schemas.ts";
import type { Payment } from "./types.ts";

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
        const wire = requirementsOf(BASE, { amount, payTo, resource: WIRE.resource, description: "" });
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
          const [one, two] = [decodePaymentHeader(sent), decodePaymentSignature(BASE, sent)];
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
    const { version1: body, version2 } = challenge(BASE, WIRE, "X-PAYMENT header is required");
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
    expect(version2 as unknown).toEqual({
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
    const { version1: body, version2 } = challenge(BASE, wire, "missing");
    expect(encodeBase64(version2).length).toBeLessThan(4096);
    expect(version2.resource).toMatchObject({
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
    const response = paymentResponse(BASE, version, { transaction: TRANSACTION, payer: PAYER });
    expect(response.name).toBe(name);
    expect(unbase64(response.value)).toEqual({
      success: true,
      transaction: TRANSACTION,
      network,
      payer: PAYER,
    });
  });
});
