// How the history is documented.
import { Type } from "@sinclair/typebox";
import { READ_BODY_SCOPE } from "../../core/caller.ts";
import { PAGE_LIMIT_DEFAULT } from "../../core/limits.ts";
import { INVOCATION_STATUSES, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import { PAGE_QUERY } from "../../http/input.ts";
import { operation } from "../../http/openapi.ts";
import { InvocationDetail, InvocationPage } from "./model.ts";

export const INVOCATION_ID = {
  description: "The invocation's ID.",
  example: "inv_0199a7c2-6a2b-7d4c-8e01-7b1c2d3e4f50",
};

const EXAMPLE_SHARED = {
  agent_id: "agt_0199a7c2-5d1e-7c3a-9b62-3f0a4d5e6f70",
  status: "succeeded",
  error_class: null,
  upstream_status: 200,
  latency_ms: 42,
  mcp_method: null,
  mcp_tool: null,
  payment_network: null,
  payment_asset: null,
  payment_amount: null,
  payment_payer: null,
  payment_nonce: null,
  created_at: "2026-11-21T10:00:00.000Z",
  completed_at: "2026-11-21T10:00:00.050Z",
};

const EXAMPLE_INVOCATION = {
  id: INVOCATION_ID.example,
  mode: "transactional",
  model: null,
  ...EXAMPLE_SHARED,
  ttft_ms: null,
  req_size: 17,
  resp_size: 17,
};

export const EXAMPLE_POLL = {
  invocation_id: INVOCATION_ID.example,
  ...EXAMPLE_SHARED,
  updated_at: "2026-11-21T10:00:00.050Z",
  settlement: null,
  response_content_type: "application/json",
  response_truncated: false,
  response_body_b64: "eyJoZWxsbyI6IndvcmxkIn0=",
};

const choice = (values: readonly string[]) => Type.Unsafe<string>({ type: "string", enum: [...values] });

export const list = operation({
  tag: "Invocations",
  summary: "List invocations",
  description: "Newest first. Bodies are never in the list.",
  query: {
    agent_id: { description: "Only calls of this agent." },
    status: { description: "Only calls in this state.", schema: choice(INVOCATION_STATUSES) },
    mode: { description: "Only calls of this mode.", schema: choice(MODES) },
    error_class: { description: "Only calls that ended with this class; an unknown one matches nothing." },
    model: { description: "Only calls with this X-Service-Model." },
    settlement: {
      description: "Only calls with this settlement status.",
      schema: choice(SETTLEMENT_STATUSES),
    },
    since: { description: "Created at or after, RFC 3339.", schema: Type.String({ format: "date-time" }) },
    until: { description: "Created at or before, RFC 3339.", schema: Type.String({ format: "date-time" }) },
    ...PAGE_QUERY,
  },
  responses: [
    {
      status: "ok",
      description: "One page, and how many match in all.",
      schema: InvocationPage,
      example: { data: [EXAMPLE_INVOCATION], total: 1, limit: PAGE_LIMIT_DEFAULT, offset: 0 },
    },
  ],
  errors: ["invalid_request"],
});

export const read = operation({
  tag: "Invocations",
  summary: "Read an invocation",
  description: `Captured bodies are included for a token with the scope ${READ_BODY_SCOPE}.`,
  path: { id: INVOCATION_ID },
  responses: [
    {
      status: "ok",
      description: "The invocation.",
      schema: InvocationDetail,
      example: {
        ...EXAMPLE_INVOCATION,
        body_captured: true,
        req_body: EXAMPLE_POLL.response_body_b64,
        resp_body: EXAMPLE_POLL.response_body_b64,
      },
    },
  ],
  errors: ["not_found"],
});
