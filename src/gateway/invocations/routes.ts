// The routes of proxy calls and of the history.
import { Type } from "@sinclair/typebox";
import { READ_BODY_SCOPE } from "../../core/caller.ts";
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import { PAGE_LIMIT_DEFAULT, PROXY_BODY_BYTES_MAX } from "../../core/limits.ts";
import { INVOCATION_STATUSES, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import type { UnderWay } from "../../core/under-way.ts";
import { giveJson } from "../../edge/giving.ts";
import { json, routes, scopeOf } from "../../edge/http.ts";
import { PAGE_QUERY, queryOf } from "../../edge/input.ts";
import { readBytes } from "../../edge/intake.ts";
import { operation } from "../../edge/openapi.ts";
import type { Store } from "../../storage/store.ts";
import { requirementsOf } from "../../x402/codec.ts";
import { X402_VERSION } from "../../x402/kind.ts";
import { PaymentChallenge } from "../../x402/schemas.ts";
import { type AdmitOptions, type Admitted, admit } from "./admit.ts";
import { waitSeconds } from "./command.ts";
import type { Endings } from "./endings.ts";
import { findInvocation, readHistory } from "./history.ts";
import { InvocationDetail, InvocationPage, listItem, PollView } from "./model.ts";
import { abandon, type InvocationKey, type InvocationRow } from "./service.ts";
import { detailAnswer, pollAnswer } from "./shown.ts";

export interface InvocationRoutesOptions extends AdmitOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly endings: Endings;
  /** Told of each call that is being admitted. */
  readonly admitting: Pick<UnderWay, "enter">;
  /** Stops the upstream call of an invocation that has been ended otherwise. */
  stop(id: string): void;
}

const WAIT = {
  Prefer: {
    description: "`wait=N` (RFC 7240) holds the answer until the call has ended, at most 60 seconds.",
    example: "wait=10",
  },
};

const AGENT_ID = {
  id: { description: "The agent's ID.", example: "agt_0199a7c2-5d1e-7c3a-9b62-3f0a4d5e6f70" },
};
const INVOCATION_ID = {
  description: "The invocation's ID.",
  example: "inv_0199a7c2-6a2b-7d4c-8e01-7b1c2d3e4f50",
};

const EXAMPLE_SHARED = {
  agent_id: AGENT_ID.id.example,
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

const EXAMPLE_POLL = {
  invocation_id: INVOCATION_ID.example,
  ...EXAMPLE_SHARED,
  updated_at: "2026-11-21T10:00:00.050Z",
  settlement: null,
  response_content_type: "application/json",
  response_truncated: false,
  response_body_b64: "eyJoZWxsbyI6IndvcmxkIn0=",
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

const proxyCall = operation({
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

const poll = operation({
  tag: "Proxy",
  summary: "Poll a call",
  description: `The captured response body is there for the user who made the call, and for a token with the scope ${READ_BODY_SCOPE}.`,
  path: { ...AGENT_ID, inv_id: INVOCATION_ID },
  headers: WAIT,
  responses: [
    { status: "ok", description: "The call as it stands.", schema: PollView, example: EXAMPLE_POLL },
  ],
  errors: ["not_found"],
});

const cancel = operation({
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

const choice = (values: readonly string[]) => Type.Unsafe<string>({ type: "string", enum: [...values] });

const list = operation({
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

const read = operation({
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

/** @throws Fault `conflict` when it has ended */
async function cancelCall(
  { store, clock, payments }: InvocationRoutesOptions,
  key: InvocationKey,
): Promise<void> {
  const now = clock.now();
  const isCancelled = await store.write(async (tx) => {
    if (!(await abandon(tx, key, "cancelled", now))) return false;
    await payments.cancelled(tx, key, now);
    return true;
  });
  if (!isCancelled) throw new Fault("conflict", "the invocation has already ended");
}

/** Its body counts as coming in until it is stored, and a stop waits until the call is admitted or refused. */
async function admitted(
  options: InvocationRoutesOptions,
  request: Request,
  agentId: string,
): Promise<Admitted> {
  const { caller, requestId, note } = scopeOf(request);
  const { promise: held, resolve: stored } = Promise.withResolvers<void>();
  const readBody = () => readBytes(request, caller.tenant, PROXY_BODY_BYTES_MAX, { until: held });
  const leave = options.admitting.enter();
  try {
    return await admit(options, {
      caller,
      agentId,
      headers: request.headers,
      requestId,
      readBody,
      stored,
      note,
    });
  } finally {
    stored();
    leave();
  }
}

export function invocationRoutes(options: InvocationRoutesOptions) {
  const { store, endings } = options;

  const findCall = async (tenant: string, params: { id: string; inv_id: string }): Promise<InvocationRow> => {
    const row = await findInvocation(store.read, tenant, params.inv_id);
    if (row.agent_id !== params.id) throw new Fault("not_found", "no such invocation");
    return row;
  };

  return routes()
    .post(
      "/v1/proxy/:id",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const { id, headers } = await admitted(options, request, params.id);
        const seconds = waitSeconds(request.headers);
        if (seconds > 0) {
          const look = () => findInvocation(store.read, caller.tenant, id);
          // The call is accepted: when the store fails while it is waited for, saying so is all the more urgent.
          await endings.wait({ tenant: caller.tenant, id }, seconds, request.signal, look).catch(() => null);
        }
        const location = `/v1/proxy/${params.id}/invocations/${id}`;
        const own = { "x-service-invocation-id": id, location };
        return json("accepted", { invocation_id: id }, { ...own, ...headers });
      },
      { parse: "none", detail: proxyCall },
    )
    .get(
      "/v1/proxy/:id/invocations/:inv_id",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const seconds = waitSeconds(request.headers);
        if (seconds === 0) return pollAnswer(store.read, request, await findCall(caller.tenant, params));
        const look = () => findCall(caller.tenant, params);
        const key = { tenant: caller.tenant, id: params.inv_id };
        return pollAnswer(store.read, request, await endings.wait(key, seconds, request.signal, look));
      },
      { detail: poll },
    )
    .post(
      "/v1/proxy/:id/invocations/:inv_id/cancel",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const key = { tenant: caller.tenant, id: (await findCall(caller.tenant, params)).id };
        await cancelCall(options, key);
        options.stop(key.id);
        endings.announce(key.id);
        return pollAnswer(store.read, request, await findCall(caller.tenant, params));
      },
      { parse: "none", detail: cancel },
    )
    .get(
      "/v1/invocations",
      async ({ request }) => {
        const { tenant } = scopeOf(request).caller;
        return giveJson({ tenant, request }, async () => {
          const { rows, ...rest } = await readHistory(store.read, tenant, queryOf(request), request.signal);
          return { data: rows.map(listItem), ...rest };
        });
      },
      { detail: list },
    )
    .get(
      "/v1/invocations/:id",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const row = await findInvocation(store.read, caller.tenant, params.id);
        return detailAnswer(store.read, request, row);
      },
      { detail: read },
    );
}
