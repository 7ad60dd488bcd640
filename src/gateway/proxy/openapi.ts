// How the calls of agents are documented.
import { Type } from "@sinclair/typebox";
import { READ_BODY_SCOPE } from "../../core/call.ts";
import { operation, type ResponseDoc } from "../../http/openapi.ts";
import { requirementsOf } from "../../x402/codec.ts";
import { type Network, X402_VERSION } from "../../x402/network.ts";
import { paymentChallenge } from "../../x402/schemas.ts";
import { EXAMPLE_POLL, INVOCATION_ID, PollView } from "../invocations/routes.ts";

const WAIT = {
  Prefer: {
    description: "`wait=N` (RFC 7240) holds the answer until the call has ended, at most 60 seconds.",
    example: "wait=10",
  },
};

const AGENT_ID = {
  id: { description: "The agent's ID.", example: EXAMPLE_POLL.agent_id },
};
const MODEL = { "X-Service-Model": { description: "A model identifier, recorded; at most 256 bytes." } };
const BODY = {
  schema: Type.Unsafe({}),
  description: "At most 32 MiB, of any media type.",
  example: { hello: "world" },
};
const SETTLED = {
  "X-PAYMENT-RESPONSE": "Of a payment that has been settled: base64 of `{ success, transaction, network, payer }`.",
  "PAYMENT-RESPONSE": "The same, for a version 2 payment.",
};
const exampleChallenge = (network: Network) => ({
  x402Version: X402_VERSION,
  error: "the agent is priced: a payment is required, in X-PAYMENT or PAYMENT-SIGNATURE",
  accepts: [
    requirementsOf(network, {
      amount: 10_000n,
      payTo: "0x2096ed1b9b1c4b4a5f8a0b7f3d1d5b6a7c8d9e0f",
      resource: `https://gateway.example.com/v1/proxy/${AGENT_ID.id.example}`,
      description: `One call of ${AGENT_ID.id.example}`,
    }),
  ],
});

export const proxyCall = (network: Network) =>
  operation({
    tag: "Proxy",
    summary: "Call an agent",
    description:
      "Stores the call durably, answers with its ID at once and makes the upstream call afterwards. " +
      "The body goes to the agent's upstream_url byte for byte; for an mcp agent it is one JSON-RPC 2.0 request.",
    path: AGENT_ID,
    headers: {
      "Idempotency-Key": { description: "The same key with the same body gives the same invocation for 24 hours." },
      ...MODEL,
      "X-PAYMENT": {
        description:
          "For a priced agent: an x402 version 1 payment, in base64. The same payment with the same body gives the same invocation.",
      },
      "PAYMENT-SIGNATURE": {
        description: "For a priced agent: an x402 version 2 payment, in base64, instead of `X-PAYMENT`.",
      },
      ...WAIT,
    },
    body: BODY,
    response: {
      status: "accepted",
      description: "The call is stored and will be made.",
      schema: Type.Object({ invocation_id: Type.String() }),
      example: { invocation_id: INVOCATION_ID.example },
      headers: {
        "X-Service-Invocation-ID": "The invocation's ID.",
        Location: "Path of the poll endpoint.",
        "X-Service-Policy-Warning": "Why the tenant's policy warns of the call; only then.",
        ...SETTLED,
      },
    },
    answers: {
      payment_required: {
        description:
          "Without a payment: the challenge, as version 1 in the body and as version 2 in the header. With one that could not be verified or settled: an Error.",
        schema: paymentChallenge(network),
        example: exampleChallenge(network),
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
  response: { description: "The call as it stands.", schema: PollView, example: EXAMPLE_POLL },
  errors: ["not_found"],
});

export const cancel = operation({
  tag: "Proxy",
  summary: "Cancel a call",
  description:
    "Ends a call that has not ended as failed, `cancelled`, and stops its upstream call. Any user of the tenant may.",
  path: { ...AGENT_ID, inv_id: INVOCATION_ID },
  response: {
    description: "The cancelled call.",
    schema: PollView,
    example: { ...EXAMPLE_POLL, status: "failed", error_class: "cancelled", upstream_status: null },
  },
  errors: ["not_found", "conflict"],
});

const INVOCATION = { "X-Service-Invocation-ID": "The invocation's ID, of errors after the record too." };
const SESSION = {
  "Mcp-Session-Id": {
    description:
      "The caller's session at an mcp agent, as an answer has named it to this user. Any other is a 404, as one that is " +
      "gone; the upstream gets its own ID for it.",
  },
};
const event = (message: object) => `event: message\ndata: ${JSON.stringify(message)}\n\n`;

export const streamCall = operation({
  tag: "Proxy",
  summary: "Stream a call",
  description:
    "Makes the call at once and answers with the upstream's status, headers and body as they arrive. An answer that " +
    "breaks off never ends cleanly; a caller that leaves stops the upstream call. For an mcp agent the body is one " +
    "JSON-RPC message or a batch: what the connection needs (`initialize`, `ping`, `server/discover`, notifications, " +
    "responses, every `*/list`, subscriptions, tasks, completion) is free and not judged, everything else is, each message by itself, and the price is the sum. This is the URL of an MCP client.",
  path: AGENT_ID,
  headers: {
    "Idempotency-Key": {
      description: "A call that was made with the key in the last 24 hours is not made again (409).",
    },
    ...MODEL,
    "X-PAYMENT": {
      description:
        "For a priced agent: an x402 version 1 payment, in base64. Sent again after a 503, it goes on where it stood.",
    },
    "PAYMENT-SIGNATURE": { description: "The same, of version 2, instead of `X-PAYMENT`." },
    ...SESSION,
  },
  body: BODY,
  response: {
    description: "What the upstream answers, with whatever status.",
    mediaType: "*/*",
    schema: BODY.schema,
    examples: {
      plain: { hello: "world" },
      "an event stream": event({
        jsonrpc: "2.0",
        id: 1,
        result: { content: [{ type: "text", text: "5" }] },
      }),
    },
    headers: {
      ...INVOCATION,
      ...SETTLED,
      "X-Service-Policy-Warning": "What the policy warns of.",
    },
  },
  answers: {
    conflict: {
      description: "This call has been made already: its key or its payment stands for that one.",
      example: "this call has been made already",
      headers: INVOCATION,
    },
  },
  errors: [
    "not_found",
    "agent_not_invocable",
    "rate_limited",
    "invalid_request",
    "payload_too_large",
    "denied",
    "payment_required",
    "conflict",
    "bad_gateway",
    "gateway_timeout",
  ],
});

const connection = (summary: string, description: string, answer: Pick<ResponseDoc, "mediaType" | "example">) =>
  operation({
    tag: "Proxy",
    summary,
    description: `${description} It makes no invocation, costs nothing and is not judged.`,
    path: AGENT_ID,
    headers: SESSION,
    response: { description: "What the upstream answers.", ...answer },
    errors: [
      "not_found",
      "method_not_allowed",
      "agent_not_invocable",
      "rate_limited",
      "bad_gateway",
      "gateway_timeout",
    ],
  });

export const listen = connection(
  "Listen to an mcp agent",
  "The event stream of a session; `Last-Event-ID` passes, and needs a session (404).",
  {
    mediaType: "text/event-stream",
    example: event({ jsonrpc: "2.0", method: "notifications/tools/list_changed" }),
  },
);
export const endSession = connection("End a session of an mcp agent", "Ends the session that the header names.", {});
