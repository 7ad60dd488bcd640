// The shapes in which an invocation is shown: list item, detail, poll view. A row becomes a view here only.
import { type Static, Type } from "@sinclair/typebox";
import { idTime } from "../../core/id.ts";
import { ERROR_CLASSES, INVOCATION_STATUSES, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import { formatDateTime } from "../../core/time.ts";
import type { InvocationRow } from "./service.ts";

const text = Type.Union([Type.String(), Type.Null()]);
const whole = Type.Union([Type.Integer(), Type.Null()]);
const dateTime = Type.String({ format: "date-time" });
const choice = <T extends string>(values: readonly T[]) => Type.Unsafe<T>({ type: "string", enum: [...values] });

const Settlement = Type.Object(
  {
    status: choice(SETTLEMENT_STATUSES),
    tx_hash: Type.Optional(Type.String()),
    settled_amount: Type.Optional(Type.String({ description: "Smallest-unit decimal string." })),
    operator_amount: Type.Optional(Type.String({ description: "settled_amount minus facilitator_fee." })),
    facilitator_fee: Type.Optional(Type.String()),
    attempts: Type.Optional(Type.Integer()),
    reason: Type.Optional(Type.String({ description: "Coarse failure reason." })),
    settled_at: Type.Optional(dateTime),
  },
  { $id: "Settlement" },
);

const shared = {
  agent_id: Type.String(),
  status: choice(INVOCATION_STATUSES),
  error_class: Type.Union([choice(ERROR_CLASSES), Type.Null()]),
  upstream_status: whole,
  latency_ms: Type.Union([Type.Integer(), Type.Null()], {
    description: "The upstream call, in milliseconds.",
  }),
  mcp_method: text,
  mcp_tool: text,
  payment_network: text,
  payment_asset: text,
  payment_amount: text,
  payment_payer: text,
  payment_nonce: text,
  created_at: dateTime,
  completed_at: Type.Union([dateTime, Type.Null()]),
};

export const Invocation = Type.Object(
  {
    id: Type.String({ description: "`inv_<uuidv7>`" }),
    mode: choice(MODES),
    model: text,
    ...shared,
    settlement: Type.Optional(Settlement),
    ttft_ms: Type.Union([Type.Integer(), Type.Null()], {
      description: "Time to first byte; streaming mode only.",
    }),
    req_size: whole,
    resp_size: whole,
  },
  { $id: "Invocation" },
);

const base64 = (description: string) =>
  Type.Optional(Type.String({ format: "byte", description: `${description}, base64, at most 1 MiB.` }));

export const InvocationDetail = Type.Composite(
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

export const InvocationPage = Type.Object(
  { data: Type.Array(Invocation), total: Type.Integer(), limit: Type.Integer(), offset: Type.Integer() },
  { $id: "InvocationPage" },
);

export const PollView = Type.Object(
  {
    invocation_id: Type.String(),
    ...shared,
    updated_at: dateTime,
    settlement: Type.Union([Settlement, Type.Null()]),
    response_content_type: text,
    response_truncated: Type.Boolean({
      description: "The upstream's body was longer than what was captured.",
    }),
    response_body_b64: base64("The captured response body; for the caller, or with the scope invocations:read_body"),
  },
  { $id: "InvocationPoll" },
);

export interface CapturedBodies {
  readonly request: Uint8Array | null;
  readonly response: Uint8Array | null;
}

function sharedView(row: InvocationRow) {
  return {
    agent_id: row.agent_id,
    status: row.status,
    error_class: row.error_class,
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

export function listItem(row: InvocationRow): Static<typeof Invocation> {
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

/** Without the bodies: see views.ts. */
export function detail(row: InvocationRow): Static<typeof InvocationDetail> {
  return { ...listItem(row), body_captured: row.body_captured };
}

/** Without the body: see views.ts. */
export function pollView(row: InvocationRow): Static<typeof PollView> {
  return {
    invocation_id: row.id,
    ...sharedView(row),
    updated_at: formatDateTime(row.updated_at),
    settlement: settlementOf(row),
    response_content_type: row.response_content_type,
    response_truncated: row.response_truncated,
  };
}
