import { describe, expect, test } from "bun:test";
import { x402Client, x402HTTPClient } from "@x402/core/client";
import {
  decodePaymentRequiredHeader,
  decodePaymentResponseHeader,
  decodePaymentSignatureHeader,
} from "@x402/core/http";
import { PaymentPayloadV2Schema, PaymentRequiredV1Schema, PaymentRequiredV2Schema } from "@x402/core/schemas";
import { ExactEvmScheme } from "@x402/evm";
import { registerExactEvmScheme } from "@x402/evm/exact/client";
import fc from "fast-check";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { createPaymentHeader } from "x402/client";
import { PaymentPayloadSchema, PaymentRequirementsSchema, SettleRequestSchema, SettleResponseSchema } from "x402/types";
import { anyAuthorization, anyHex } from "../../test/support/chain/authorizations.ts";
import { BASE } from "../../test/support/network.ts";
import {
  acceptedMatches,
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
import type { Payment } from "./types.ts";
import { checkRequirements, checkSignature, checkWindow } from "./verify.ts";

const WIRE = requirementsOf(BASE, {
  amount: 10_000n,
  payTo: "0x209693bc6afc0c5328ba36faf03c514ef312287c",
  resource: "http://127.0.0.1:8080/v1/proxy/agent_1",
  description: "Wetter für alle 🌦",
});
const { version1: body, version2 } = challenge(BASE, WIRE, "X-PAYMENT header is required");
const header = encodeBase64(version2);
const account = privateKeyToAccount(generatePrivateKey());

/** Every check that the gateway makes of a payment. */
function problemOf(payment: Payment) {
  const now = Math.floor(Date.now() / 1000);
  if (checkSignature({ domain: BASE.token.domain, ...payment }) !== "payer") return "invalid_signature";
  return (
    checkWindow(payment.authorization, now, 6) ??
    checkRequirements(BASE, payment, requirementsFrom(WIRE), { exactValue: true })
  );
}

describe("our challenges and responses", () => {
  test("are taken by the official schemas of version 1, which keep every field of them", () => {
    expect<unknown>(PaymentRequirementsSchema.parse(body.accepts[0])).toEqual(WIRE);
    expect<unknown>(PaymentRequiredV1Schema.parse(body)).toEqual(body);
  });

  test("are taken by the official schemas of version 2, which keep every field of them", () => {
    const required = decodePaymentRequiredHeader(header);
    expect<unknown>(PaymentRequiredV2Schema.parse(required)).toEqual(required);
    expect(required.resource.description).toBe(WIRE.description);
  });

  test("are read by the official request and response of a settlement", () => {
    const authorizations = anyAuthorization.map((each) => ({ ...each, value: each.value % 10n ** 18n }));
    fc.assert(
      fc.property(authorizations, anyHex(65), (authorization, signature) => {
        const payment: Payment = {
          x402Version: 2,
          scheme: "exact",
          network: "base",
          authorization,
          signature,
        };
        const request = settleRequestJson(payment, WIRE);
        expect<unknown>(SettleRequestSchema.passthrough().parse(request)).toEqual(request);
      }),
    );
    const settled = { transaction: `0x${"7e".repeat(32)}`, payer: account.address };
    const one = decodePaymentResponseHeader(paymentResponse(BASE, 1, settled).value);
    expect<unknown>(SettleResponseSchema.parse(one)).toEqual({ success: true, network: "base", ...settled });
    const two = decodePaymentResponseHeader(paymentResponse(BASE, 2, settled).value);
    expect<unknown>(two).toEqual({ success: true, network: "eip155:8453", ...settled });
  });
});

describe("a payment of an official client", () => {
  test("is read in version 1, and found good", async () => {
    const sent = await createPaymentHeader(account, 1, PaymentRequirementsSchema.parse(body.accepts[0]));
    const parsed = decodePaymentHeader(sent);
    expect(parsed.ok && problemOf(parsed.value)).toBeNull();
    const json = PaymentPayloadSchema.parse(JSON.parse(Buffer.from(sent, "base64").toString()));
    expect(parseSettleRequest({ x402Version: 1, paymentPayload: json, paymentRequirements: WIRE }).ok).toBe(true);
  });

  test("is read in version 2, answers the offer, and is found good", async () => {
    const client = new x402HTTPClient(new x402Client().register("eip155:8453", new ExactEvmScheme(account)));
    const required = client.getPaymentRequiredResponse((name) => (name === "PAYMENT-REQUIRED" ? header : null));
    const payload = await client.createPaymentPayload(required);
    const sent = client.encodePaymentSignatureHeader(payload)["PAYMENT-SIGNATURE"] ?? "";
    expect(PaymentPayloadV2Schema.safeParse(decodePaymentSignatureHeader(sent)).success).toBe(true);
    const parsed = decodePaymentSignature(BASE, sent);
    expect(parsed.ok && problemOf(parsed.value)).toBeNull();
    expect(parsed.ok && acceptedMatches(parsed.value.accepted, WIRE)).toBe(true);
  });

  test("is read in version 2 to a challenge of version 1, and found good", async () => {
    const base = new x402Client();
    registerExactEvmScheme(base, { signer: account });
    const client = new x402HTTPClient(base);
    const payload = await client.createPaymentPayload(client.getPaymentRequiredResponse(() => null, body));
    const parsed = decodePaymentHeader(client.encodePaymentSignatureHeader(payload)["X-PAYMENT"] ?? "");
    expect(parsed.ok && problemOf(parsed.value)).toBeNull();
  });
});
