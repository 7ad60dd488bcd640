// How the streaming path is documented.
import { Type } from "@sinclair/typebox";
import { operation, type ResponseDoc } from "../../http/openapi.ts";
import { AGENT_ID } from "./openapi.ts";

const INVOCATION = { "X-Service-Invocation-ID": "The invocation's ID, of errors after the record too." };
const SESSION = {
  "Mcp-Session-Id": {
    description:
      "The caller's session at an mcp agent, as an answer has named it to this user. Any other is a 404, as one that is " +
      "gone; the upstream gets its own ID for it.",
  },
};
const ANYTHING = Type.Unsafe({});
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
    "X-Service-Model": { description: "A model identifier, recorded; at most 256 bytes." },
    "X-PAYMENT": {
      description:
        "For a priced agent: an x402 version 1 payment, in base64. Sent again after a 503, it goes on where it stood.",
    },
    "PAYMENT-SIGNATURE": { description: "The same, of version 2, instead of `X-PAYMENT`." },
    ...SESSION,
  },
  body: { schema: ANYTHING, description: "At most 32 MiB, of any media type.", example: { hello: "world" } },
  responses: [
    {
      status: "ok",
      description: "What the upstream answers, with whatever status.",
      mediaType: "*/*",
      schema: ANYTHING,
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
        "X-PAYMENT-RESPONSE": "Of a settled payment: base64 of `{ success, transaction, network, payer }`.",
        "PAYMENT-RESPONSE": "The same, for a version 2 payment.",
        "X-Service-Policy-Warning": "What the policy warns of.",
      },
    },
  ],
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
    responses: [{ status: "ok", description: "What the upstream answers.", ...answer }],
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
