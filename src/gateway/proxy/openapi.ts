// How the calls of agents are documented.
import { Type } from "@sinclair/typebox";
import { READ_BODY_SCOPE } from "../../core/caller.ts";
import { operation } from "../../http/openapi.ts";
import { requirementsOf } from "../../x402/codec.ts";
import { X402_VERSION } from "../../x402/kind.ts";
import { PaymentChallenge } from "../../x402/schemas.ts";
import { EXAMPLE_POLL, INVOCATION_ID, PollView } from "../invocations/routes.ts";

const WAIT = {
  Prefer: {
    description: "`wait=N` (RFC 7240) holds the answer until the call has ended, at most 60 seconds.",
    example: "wait=10",
  },
};

export const AGENT_ID = {
  id: { description: "The agent's ID.", example: EXAMPLE_POLL.agent_id },
};
const EXAMPLE_CHALLENGE = {
  x402Version: X402_VERSION,
  error: "the agent is priced: a payment is required, in X-PAYMENT or PAYMENT-SIGNATURE",
  accepts: [
    requirementsOf({
      amount: 10_000n,
      payTo: "0x2096ed1b9b1c4b4a5f8a0b7f3d1d5b6a7c8d9e0f",
      resource: `https://gateway.example.com/v1/proxy/${AGENT_ID.id.example}`,
      description: `One call of ${AGENT_ID.id.example}`,
    }),
  ],
};

export const proxyCall = operation({
  tag: "Proxy",
  summary: "Call an agent",
  description:
    "Stores the call durably, answers with its ID at once and makes the upstream call afterwards. " +
    "The body goes to the agent's upstream_url byte for byte; for an mcp agent it is one JSON-RPC 2.0 request.",
  path: AGENT_ID,
  headers: {
    "Idempotency-Key": {
      description: "The same key with the same body gives the same invocation for 24 hours.",
    },
    "X-Service-Model": { description: "A model identifier, recorded; at most 256 bytes." },
    "X-PAYMENT": {
      description:
        "For a priced agent: an x402 version 1 payment, in base64. The same payment with the same body gives the same invocation.",
    },
    "PAYMENT-SIGNATURE": {
      description: "For a priced agent: an x402 version 2 payment, in base64, instead of `X-PAYMENT`.",
    },
    ...WAIT,
  },
  body: {
    schema: Type.Unsafe({}),
    description: "At most 32 MiB, of any media type.",
    example: { hello: "world" },
  },
  responses: [
    {
      status: "accepted",
      description: "The call is stored and will be made.",
      schema: Type.Object({ invocation_id: Type.String() }),
      example: { invocation_id: INVOCATION_ID.example },
      headers: {
        "X-Service-Invocation-ID": "The invocation's ID.",
        Location: "Path of the poll endpoint.",
        "X-Service-Policy-Warning": "Why the tenant's policy warns of the call; only then.",
        "X-PAYMENT-RESPONSE":
          "Of a payment that has been settled: base64 of `{ success, transaction, network, payer }`.",
        "PAYMENT-RESPONSE": "The same, for a version 2 payment.",
      },
    },
  ],
  answers: {
    payment_required: {
      description:
        "Without a payment: the challenge, as version 1 in the body and as version 2 in the header. With one that could not be verified or settled: an Error.",
      schema: PaymentChallenge,
      example: EXAMPLE_CHALLENGE,
      headers: { "PAYMENT-REQUIRED": "The challenge in version 2, base64 of its JSON." },
    },
  },
  errors: [
    "not_found",
    "agent_not_invocable",
    "rate_limited",
    "invalid_request",
    "payload_too_large",
    "conflict",
    "denied",
    "payment_required",
  ],
});

export const poll = operation({
  tag: "Proxy",
  summary: "Poll a call",
  description: `The captured response body is there for the user who made the call, and for a token with the scope ${READ_BODY_SCOPE}.`,
  path: { ...AGENT_ID, inv_id: INVOCATION_ID },
  headers: WAIT,
  responses: [{ status: "ok", description: "The call as it stands.", schema: PollView, example: EXAMPLE_POLL }],
  errors: ["not_found"],
});

export const cancel = operation({
  tag: "Proxy",
  summary: "Cancel a call",
  description:
    "Ends a call that has not ended as failed, `cancelled`, and stops its upstream call. Any user of the tenant may.",
  path: { ...AGENT_ID, inv_id: INVOCATION_ID },
  responses: [
    {
      status: "ok",
      description: "The cancelled call.",
      schema: PollView,
      example: { ...EXAMPLE_POLL, status: "failed", error_class: "cancelled", upstream_status: null },
    },
  ],
  errors: ["not_found", "conflict"],
});
