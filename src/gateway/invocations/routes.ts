// The history over HTTP: the views of an invocation (list item, detail, poll view), their documentation, and the routes. Only
// this file turns a row into a view.
//
// Captured bodies may have a MiB each. They are read in a turn of the tenant, since many requests for such bodies at once
// would hold up all others, and encoded as base64 while they are sent.
import { type Static, Type } from "@sinclair/typebox";
import type { BodyKind } from "../../../db/schema.ts";
import { asBuffer } from "../../core/bytes.ts";
import { READ_BODY_SCOPE } from "../../core/call.ts";
import { idTime } from "../../core/id.ts";
import { ERROR_CLASSES, ERROR_DETAILS, INVOCATION_STATUSES, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import { formatDateTime } from "../../core/time.ts";
import { routes } from "../../http/elysia.ts";
import { DateTime, PAGE_FIELDS, PAGE_QUERY, queryOf, timestamp } from "../../http/input.ts";
import { idParameter, operation } from "../../http/openapi.ts";
import { json, SMALL_CHARACTERS } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { MAX, PAGE_LIMIT_DEFAULT } from "../../kernel/limits.ts";
import { inTurn } from "../../kernel/turns.ts";
import type { Reader } from "../../storage/store.ts";
import { capturedBody, findInvocation, readHistory } from "./history.ts";
import type { InvocationRow } from "./service.ts";

const text = (description: string) => Type.Union([Type.String(), Type.Null()], { description });
const whole = (description: string) => Type.Union([Type.Integer({ minimum: 0 }), Type.Null()], { description });
const choice = <T extends string>(values: readonly T[], options: { description?: string } = {}) =>
  Type.Unsafe<T>({ type: "string", enum: [...values], ...options });

const Settlement = Type.Object(
  {
    status: choice(SETTLEMENT_STATUSES, { description: "How far the settlement of the payment is." }),
    tx_hash: Type.Optional(Type.String({ description: "The transaction that collected the payment." })),
    settled_amount: Type.Optional(Type.String({ description: "In the asset's smallest units, a decimal string." })),
    operator_amount: Type.Optional(Type.String({ description: "settled_amount minus facilitator_fee." })),
    facilitator_fee: Type.Optional(Type.String({ description: "What the facilitator keeps, a decimal string." })),
    attempts: Type.Optional(Type.Integer({ minimum: 0, description: "How often the facilitator was asked." })),
    reason: Type.Optional(Type.String({ description: "Coarse failure reason." })),
    settled_at: Type.Optional(timestamp("When the payment was collected.")),
  },
  { $id: "Settlement", description: "What became of the call's payment." },
);

const shared = {
  agent_id: Type.String({ description: "The agent that was called." }),
  status: choice(INVOCATION_STATUSES, { description: "How far the call is." }),
  error_class: Type.Union([choice(ERROR_CLASSES), Type.Null()], {
    description: "What kind of failure ended the call; null unless it failed.",
  }),
  error_detail: Type.Union([choice(ERROR_DETAILS), Type.Null()], {
    description: "Why a failed call has no whole response; null when the upstream itself answered, or no value fits.",
  }),
  upstream_status: whole("The status with which the upstream answered; null without an answer."),
  latency_ms: whole("Duration of the upstream call in milliseconds."),
  mcp_method: text("The JSON-RPC method; of an mcp agent only."),
  mcp_tool: text("The tool of a `tools/call`; of an mcp agent only."),
  payment_network: text("The chain of the payment; null for a call that was not paid for."),
  payment_asset: text("The token of the payment."),
  payment_amount: text("The price that was paid, in the token's smallest units."),
  payment_payer: text("Who signed the payment."),
  payment_nonce: text("The nonce of the payment's authorization."),
  created_at: timestamp("When the call was accepted."),
  completed_at: Type.Union([DateTime, Type.Null()], { description: "When the call ended." }),
};

const Invocation = Type.Object(
  {
    id: Type.String({ description: "`inv_<uuidv7>`" }),
    mode: choice(MODES, { description: "`transactional` for a polled call, `streaming` for a streamed one." }),
    model: text("The call's `X-Service-Model`."),
    ...shared,
    settlement: Type.Optional(Settlement),
    ttft_ms: whole("Time to first byte; streaming mode only."),
    req_size: whole("Bytes of the request body."),
    resp_size: whole("Bytes of the response body."),
  },
  { $id: "Invocation" },
);

const base64 = (description: string) =>
  Type.Optional(Type.String({ format: "byte", description: `Base64, at most 1 MiB. ${description}.` }));

const InvocationDetail = Type.Composite(
  [
    Invocation,
    Type.Object({
      body_captured: Type.Boolean({ description: "Whether capture was on for this invocation." }),
      req_body: base64("The captured request body; needs the scope invocations:read_body"),
      resp_body: base64("The captured response body; needs the scope invocations:read_body"),
    }),
  ],
  { $id: "InvocationDetail" },
);

const InvocationPage = Type.Object(
  { data: Type.Array(Invocation, { description: "The invocations of this page." }), ...PAGE_FIELDS },
  { $id: "InvocationPage" },
);

export const PollView = Type.Object(
  {
    invocation_id: Type.String({ description: "`inv_<uuidv7>`" }),
    ...shared,
    updated_at: timestamp("When the record last changed."),
    settlement: Type.Union([Settlement, Type.Null()], { description: "The payment of the call; null for a free one." }),
    response_content_type: text("The media type of the upstream's response."),
    response_truncated: Type.Boolean({ description: "Whether the response body was longer than its captured part." }),
    response_body_b64: base64("The captured response body; for the caller, or with the scope invocations:read_body"),
  },
  { $id: "InvocationPoll" },
);

function sharedView(row: InvocationRow) {
  return {
    agent_id: row.agent_id,
    status: row.status,
    error_class: row.error_class,
    error_detail: row.error_detail,
    upstream_status: row.upstream_status,
    latency_ms: row.latency_ms,
    mcp_method: row.mcp_method,
    mcp_tool: row.mcp_tool,
    payment_network: row.payment_network,
    payment_asset: row.payment_asset,
    payment_amount: row.payment_amount,
    payment_payer: row.payment_payer,
    payment_nonce: row.payment_nonce,
    created_at: formatDateTime(idTime(row.id)),
    completed_at: row.completed_at === null ? null : formatDateTime(row.completed_at),
  };
}

function settlementOf(row: InvocationRow): Static<typeof Settlement> | null {
  if (row.settlement_status === null) return null;
  const details = JSON.parse(row.settlement ?? "{}") as Omit<Static<typeof Settlement>, "status">;
  return { status: row.settlement_status, ...details };
}

function listItem(row: InvocationRow): Static<typeof Invocation> {
  const settlement = settlementOf(row);
  return {
    id: row.id,
    mode: row.mode,
    model: row.model,
    ...sharedView(row),
    ...(settlement === null ? {} : { settlement }),
    ttft_ms: row.ttft_ms,
    req_size: row.req_size,
    resp_size: row.resp_size,
  };
}

/** The poll view without the response body. */
function pollView(row: InvocationRow): Static<typeof PollView> {
  return {
    invocation_id: row.id,
    ...sharedView(row),
    updated_at: formatDateTime(row.updated_at),
    settlement: settlementOf(row),
    response_content_type: row.response_content_type,
    response_truncated: row.response_truncated,
  };
}

export const INVOCATION_ID = idParameter("inv", "The invocation's ID.");

const EXAMPLE_ID = "inv_0199a7c2-6a2b-7d4c-8e01-7b1c2d3e4f50";

const EXAMPLE_SHARED = {
  agent_id: "agt_0199a7c2-5d1e-7c3a-9b62-3f0a4d5e6f70",
  status: "succeeded",
  error_class: null,
  error_detail: null,
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
  id: EXAMPLE_ID,
  mode: "transactional",
  model: null,
  ...EXAMPLE_SHARED,
  ttft_ms: null,
  req_size: 17,
  resp_size: 17,
};

export const EXAMPLE_POLL = {
  invocation_id: EXAMPLE_ID,
  ...EXAMPLE_SHARED,
  updated_at: "2026-11-21T10:00:00.050Z",
  settlement: null,
  response_content_type: "application/json",
  response_truncated: false,
  response_body_b64: "eyJoZWxsbyI6IndvcmxkIn0=",
};

const list = operation({
  tag: "Invocations",
  summary: "List invocations",
  description: "Newest first. Bodies are never in the list.",
  query: {
    agent_id: idParameter("agt", "Only calls of this agent."),
    status: { description: "Only calls in this state.", schema: choice(INVOCATION_STATUSES) },
    mode: { description: "Only calls of this mode.", schema: choice(MODES) },
    error_class: { description: "Only calls that ended with this error class; an unknown class matches nothing." },
    model: {
      description: "Only calls with this X-Service-Model.",
      schema: Type.String({ maxLength: MAX.serviceModelBytes }),
    },
    settlement: { description: "Only calls with this settlement status.", schema: choice(SETTLEMENT_STATUSES) },
    since: { description: "Created at or after, RFC 3339.", schema: DateTime },
    until: { description: "Created at or before, RFC 3339.", schema: DateTime },
    ...PAGE_QUERY,
  },
  response: {
    description: "One page, and how many match in all.",
    schema: InvocationPage,
    example: { data: [EXAMPLE_INVOCATION], total: 1, limit: PAGE_LIMIT_DEFAULT, offset: 0 },
  },
  errors: ["invalid_request"],
});

const read = operation({
  tag: "Invocations",
  summary: "Get an invocation",
  description: `Captured bodies are included for a token with the scope ${READ_BODY_SCOPE}.`,
  path: { id: INVOCATION_ID },
  response: {
    description: "The invocation.",
    schema: InvocationDetail,
    example: {
      ...EXAMPLE_INVOCATION,
      body_captured: true,
      req_body: EXAMPLE_POLL.response_body_b64,
      resp_body: EXAMPLE_POLL.response_body_b64,
    },
  },
  errors: ["not_found"],
});

/** Bodies up to this size are read without waiting for a turn. The size of a body that is not shown counts too. */
const QUICK_BYTES = 65_536;
/** A multiple of three, since three bytes make four characters: the base64 of the pieces can be joined. */
const PIECE_BYTES = 48 * 1024;

/** Answers a poll. The response body is shown to the user who made the call, and to tokens that may read all bodies. */
export async function pollAnswer(reader: Reader, request: Request, row: InvocationRow): Promise<Response> {
  const { user, scopes } = scopeOf(request).caller;
  if (row.caller !== user && !scopes.has(READ_BODY_SCOPE)) return json("ok", pollView(row));
  return withBodies(reader, request, row, pollView(row), { response_body_b64: "response" });
}

async function detailAnswer(reader: Reader, request: Request, row: InvocationRow): Promise<Response> {
  const view: Static<typeof InvocationDetail> = { ...listItem(row), body_captured: row.body_captured };
  if (!scopeOf(request).caller.scopes.has(READ_BODY_SCOPE)) return json("ok", view);
  return withBodies(reader, request, row, view, { req_body: "request", resp_body: "response" });
}

/** @param names of the captured bodies in the view, each with its kind */
function withBodies(
  reader: Reader,
  request: Request,
  row: InvocationRow,
  view: object,
  names: Readonly<Record<string, BodyKind>>,
): Promise<Response> {
  const { tenant } = row;
  const sizes = { request: row.req_size ?? 0, response: row.resp_size ?? 0 };
  const isQuick = Math.max(sizes.request, sizes.response) <= QUICK_BYTES;
  const kinds = row.body_captured ? Object.values(names) : [];
  const weight = kinds.reduce((sum, kind) => sum + Math.min(sizes[kind], MAX.capturedBytes), 0);
  async function read(): Promise<[string, Uint8Array | null][]> {
    const bodies: [string, Uint8Array | null][] = [];
    for (const [name, kind] of Object.entries(names)) bodies.push([name, await capturedBody(reader, row, kind)]);
    return bodies;
  }
  return scopeOf(request).responses.respond({ tenant, request, weight }, async () => {
    const pieces = piecesOf(view, await (isQuick ? read() : inTurn(tenant, read)));
    return weight <= SMALL_CHARACTERS ? [...pieces].join("") : { weight, pieces };
  });
}

function* piecesOf(view: object, bodies: readonly [string, Uint8Array | null][]): Generator<string, void> {
  yield JSON.stringify(view).slice(0, -1);
  for (const [key, body] of bodies) {
    if (body === null) continue;
    yield `,"${key}":"`;
    for (let at = 0; at < body.length; at += PIECE_BYTES) {
      yield asBuffer(body.subarray(at, at + PIECE_BYTES)).toString("base64");
    }
    yield '"';
  }
  yield "}";
}

export function invocationRoutes(reader: Reader) {
  return routes()
    .get(
      "/v1/invocations",
      async ({ request }) => {
        const { caller, responses } = scopeOf(request);
        const { tenant } = caller;
        const query = queryOf(request, list);
        return responses.respondJson({ tenant, request }, async () => {
          const { rows, ...rest } = await readHistory(reader, tenant, query, request.signal);
          return { data: rows.map(listItem), ...rest };
        });
      },
      { detail: list },
    )
    .get(
      "/v1/invocations/:id",
      async ({ request, params }) =>
        detailAnswer(reader, request, await findInvocation(reader, scopeOf(request).caller.tenant, params.id)),
      { detail: read },
    );
}
