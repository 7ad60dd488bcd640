// The OpenAPI documentation of the proxy routes: calls of agents, polled or streamed, and connections to mcp agents.
import { Type } from "@sinclair/typebox";
import { READ_BODY_SCOPE } from "../../core/call.ts";
import { idParameter, operation, type ResponseDoc } from "../../http/openapi.ts";
import { MAX } from "../../kernel/limits.ts";
import { requirementsOf } from "../../x402/codec.ts";
import { type Network, X402_VERSION } from "../../x402/network.ts";
import { paymentChallenge } from "../../x402/schemas.ts";
import { EXAMPLE_POLL, INVOCATION_ID, PollView } from "../invocations/routes.ts";

const UNTIL_ENDED = "`wait=N` (RFC 7240) holds the answer until the call has ended, at most 60 seconds.";
const WAIT = { Prefer: { description: UNTIL_ENDED, example: "wait=10" } };

const AGENT_ID = { id: idParameter("agt", "The agent's ID.") };
const KEY = Type.String({ minLength: 1, maxLength: MAX.idempotencyKeyCharacters, pattern: "^[\\x21-\\x7e]+$" });
const PAYMENT = Type.String({ maxLength: MAX.paymentHeaderCharacters });
/** The request headers of a call. The descriptions are those that differ between the two paths. */
const callHeaders = (key: string, payment: string, signature: string) => ({
  "Idempotency-Key": { description: key, schema: KEY },
  "X-Service-Model": {
    description: `A model identifier, recorded; at most ${MAX.serviceModelBytes} bytes.`,
    schema: Type.String({ maxLength: MAX.serviceModelBytes }),
  },
  "X-PAYMENT": { description: payment, schema: PAYMENT },
  "PAYMENT-SIGNATURE": { description: signature, schema: PAYMENT },
});
const BODY = {
  schema: Type.Unsafe({}),
  description: "At most 32 MiB, of any media type.",
  example: { hello: "world" },
};
const SETTLED = {
  "X-PAYMENT-RESPONSE": "When the payment has been settled: base64 of `{ success, transaction, network, payer }`.",
  "PAYMENT-RESPONSE": "As `X-PAYMENT-RESPONSE`, for a version 2 payment.",
};
const exampleChallenge = (network: Network) => ({
  x402Version: X402_VERSION,
  error: "the agent is priced: a payment is required, in X-PAYMENT or PAYMENT-SIGNATURE",
  accepts: [
    requirementsOf(network, {
      amount: 10_000n,
      payTo: "0x2096ed1b9b1c4b4a5f8a0b7f3d1d5b6a7c8d9e0f",
      resource: `https://gateway.example.com/v1/proxy/${EXAMPLE_POLL.agent_id}`,
      description: `One call of ${EXAMPLE_POLL.agent_id}`,
    }),
  ],
});

const CALL_ERRORS = [
  "not_found",
  "agent_not_invocable",
  "rate_limited",
  "invalid_request",
  "payload_too_large",
  "conflict",
  "denied",
  "payment_required",
] as const;

const UPSTREAM_ERRORS = ["bad_gateway", "gateway_timeout"] as const;

const CALL_ANSWERS = {
  invalid_request: { example: "X-PAYMENT: can't be sent together with PAYMENT-SIGNATURE" },
  payload_too_large: { example: `body: larger than ${MAX.bodyBytes} bytes` },
};
const challenged = (network: Network) => ({
  description:
    "Without a payment: the challenge, as version 1 in the body and as version 2 in the header. With a payment that could not be verified or settled: an Error.",
  schema: paymentChallenge(network),
  example: exampleChallenge(network),
  headers: { "PAYMENT-REQUIRED": "The challenge in version 2, base64 of its JSON." },
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
      ...callHeaders(
        "Repeating a key and body within 24 hours returns the same invocation.",
        "For a priced agent: an x402 version 1 payment, in base64. Repeating payment and body returns the same invocation.",
        "For a priced agent: an x402 version 2 payment, in base64, instead of `X-PAYMENT`.",
      ),
      ...WAIT,
    },
    body: BODY,
    response: {
      status: "accepted",
      description: "The call is stored and will be made.",
      schema: Type.Object(
        { invocation_id: Type.String({ description: "`inv_<uuidv7>`" }) },
        { $id: "InvocationAccepted" },
      ),
      example: { invocation_id: EXAMPLE_POLL.invocation_id },
      headers: {
        "X-Service-Invocation-ID": "The invocation's ID.",
        Location: "Path of the poll endpoint.",
        "X-Service-Policy-Warning": "Why the tenant's policy warns of the call; absent if it does not.",
        ...SETTLED,
      },
    },
    answers: {
      ...CALL_ANSWERS,
      conflict: { example: "Idempotency-Key: already used with another body" },
      payment_required: challenged(network),
    },
    errors: CALL_ERRORS,
  });

const NO_INVOCATION = { not_found: { example: "no such invocation" } };

export const poll = operation({
  tag: "Proxy",
  summary: "Poll a call",
  description: `The captured response body is included for the user who made the call, and for tokens with the scope ${READ_BODY_SCOPE}.`,
  path: { ...AGENT_ID, inv_id: INVOCATION_ID },
  headers: WAIT,
  response: { description: "The call as it stands.", schema: PollView, example: EXAMPLE_POLL },
  errors: ["not_found"],
  answers: NO_INVOCATION,
});

export const cancel = operation({
  tag: "Proxy",
  summary: "Cancel a call",
  description:
    "Ends an open call as failed (`cancelled`) and stops its upstream call. Any user of the tenant may cancel it.",
  path: { ...AGENT_ID, inv_id: INVOCATION_ID },
  response: {
    description: "The cancelled call.",
    schema: PollView,
    example: { ...EXAMPLE_POLL, status: "failed", error_class: "cancelled", upstream_status: null },
  },
  errors: ["not_found", "conflict"],
  answers: { ...NO_INVOCATION, conflict: { example: "the invocation has already ended" } },
});

const INVOCATION = { "X-Service-Invocation-ID": "The invocation's ID, also on errors after the call was recorded." };
const SESSION = {
  "Mcp-Session-Id": {
    description:
      "The session at an mcp agent, as an earlier response named it to this user. Any other session, or one that has " +
      "ended, is a 404. The upstream receives its own session ID.",
  },
};
const event = (message: object) => `event: message\ndata: ${JSON.stringify(message)}\n\n`;

export const streamCall = (network: Network) =>
  operation({
    tag: "Proxy",
    summary: "Stream a call",
    description:
      "Makes the call at once and passes on the upstream's status, headers and body as they arrive. A response that breaks " +
      "off never ends cleanly; a caller that disconnects stops the upstream call. For an mcp agent the body is one JSON-RPC " +
      "message or a batch. Messages that serve the connection (`initialize`, `ping`, `server/discover`, notifications, " +
      "responses, every `*/list`, subscriptions, tasks, completion) are free and not judged; every other message is judged by itself, and the price is the sum. This is the URL to give to an MCP client.",
    path: AGENT_ID,
    headers: {
      ...callHeaders(
        "A call that was made with this key in the last 24 hours is not made again (409).",
        "For a priced agent: an x402 version 1 payment, in base64. Sent again after a 503, it resumes the call.",
        "An x402 version 2 payment, in base64, instead of `X-PAYMENT`.",
      ),
      ...SESSION,
    },
    body: BODY,
    response: {
      description: "The upstream's response, whatever its status.",
      mediaType: "*/*",
      schema: BODY.schema,
      examples: {
        plain: { hello: "world" },
        "an event stream": event({ jsonrpc: "2.0", id: 1, result: { content: [{ type: "text", text: "5" }] } }),
      },
      headers: {
        ...INVOCATION,
        ...SETTLED,
        "X-Service-Policy-Warning": "Why the tenant's policy warns of the call; absent if it does not.",
      },
    },
    answers: {
      ...CALL_ANSWERS,
      payment_required: challenged(network),
      conflict: {
        description: "A call with this key or payment has been made already.",
        example: "this call has been made already",
        headers: INVOCATION,
      },
    },
    errors: [...CALL_ERRORS, ...UPSTREAM_ERRORS],
  });

const connection = (summary: string, description: string, answer: Pick<ResponseDoc, "mediaType" | "example"> = {}) =>
  operation({
    tag: "Proxy",
    summary,
    description: `${description} The request makes no invocation, costs nothing and is not judged by the policy.`,
    path: AGENT_ID,
    headers: SESSION,
    response: { description: "The upstream's response.", ...answer },
    errors: ["not_found", "method_not_allowed", "agent_not_invocable", "rate_limited", ...UPSTREAM_ERRORS],
  });

export const listen = connection(
  "Listen to an agent",
  "The event stream of a session at an mcp agent. `Last-Event-ID` is passed on, and needs a session (404). The stream stays open, so it can't be tried on this page.",
  { mediaType: "text/event-stream", example: event({ jsonrpc: "2.0", method: "notifications/tools/list_changed" }) },
);
export const endSession = connection("End an agent session", "Ends the session at an mcp agent that the header names.");
