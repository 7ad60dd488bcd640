// Accepting a call: its idempotency key, its row among the open calls, and its body, in one write.
import { IDEMPOTENCY_HOURS } from "../../../core/limits.ts";
import { type Command, inputRows } from "../../../storage/commands.ts";
import { anyShard } from "../../../storage/counts.ts";
import { countWhole } from "../counters.ts";
import type { Idempotency } from "../idempotency.ts";
import type { InvocationRow } from "../service.ts";
import { addTotals } from "./totals.ts";

export interface Accepting {
  readonly row: InvocationRow;
  /** JSON of the call: agent snapshot and headers. */
  readonly call: string;
  readonly body: Uint8Array;
  readonly idempotency: Idempotency | null;
  /** Takes the call in the same write; null leaves it pending. */
  readonly claim: { readonly owner: string; readonly token: string } | null;
}

/** Up to here a body stands in the row of its open call. A larger one is written once, where it stays. */
export const SMALL_BODY_BYTES = 8_192;

const IDEMPOTENCY_MS = IDEMPOTENCY_HOURS * 3_600_000;

const COLUMNS = {
  id: ["text", ({ row }) => row.id],
  tenant: ["text", ({ row }) => row.tenant],
  agent_id: ["text", ({ row }) => row.agent_id],
  caller: ["text", ({ row }) => row.caller],
  mode: ["text", ({ row }) => row.mode],
  status: ["text", statusOf],
  model: ["text", ({ row }) => row.model],
  mcp_method: ["text", ({ row }) => row.mcp_method],
  mcp_tool: ["text", ({ row }) => row.mcp_tool],
  payment_network: ["text", ({ row }) => row.payment_network],
  payment_asset: ["text", ({ row }) => row.payment_asset],
  payment_amount: ["text", ({ row }) => row.payment_amount],
  payment_payer: ["text", ({ row }) => row.payment_payer],
  payment_nonce: ["text", ({ row }) => row.payment_nonce],
  settlement_status: ["text", ({ row }) => row.settlement_status],
  settlement: ["text", ({ row }) => row.settlement],
  req_size: ["bigint", ({ row }) => row.req_size],
  req_sha256: ["text", ({ row }) => row.req_sha256],
  body_captured: ["boolean", ({ row }) => row.body_captured],
  emit_receipt: ["boolean", ({ row }) => row.emit_receipt],
  accepted_by: ["text", ({ row }) => row.accepted_by],
  owner: ["text", ({ claim }) => claim?.owner ?? null],
  claim: ["text", ({ claim }) => claim?.token ?? null],
  updated_at: ["bigint", ({ row }) => row.updated_at],
  call: ["text", ({ call }) => call],
  request: ["bytea", ({ body }) => (isSmall(body) ? body : null)],
} as const satisfies Parameters<typeof inputRows<Accepting>>[0];

function statusOf({ claim }: Accepting): "pending" | "running" {
  return claim === null ? "pending" : "running";
}

function isSmall(body: Uint8Array): boolean {
  return body.byteLength <= SMALL_BODY_BYTES;
}

const NAMES = Object.keys(COLUMNS).join(", ");
const VALUES = Object.values(COLUMNS).map(([, value]) => value);

const INPUT = inputRows<Accepting>(
  {
    ...COLUMNS,
    large: ["bytea", ({ body }) => (isSmall(body) ? null : body)],
    key: ["text", ({ idempotency }) => idempotency?.key ?? null],
    body_sha256: ["text", ({ idempotency }) => idempotency?.body_sha256 ?? null],
    expires_at: ["bigint", ({ idempotency }) => (idempotency === null ? null : idempotency.latest + IDEMPOTENCY_MS)],
  },
  3,
);

/** A key that has expired is taken over. `asked` stands for the earliest possible time now. */
const takenOver = (asked: string) =>
  `on conflict (tenant, caller, agent_id, key) do update
   set body_sha256 = excluded.body_sha256, invocation_id = excluded.invocation_id, expires_at = excluded.expires_at
   where idempotency_keys.expires_at <= ${asked}`;

/**
 * Stores a call among the open ones. False, and nothing is stored, when another call has its idempotency key.
 *
 * Fails with UniqueViolation for an ID that is known already.
 */
export const acceptCommand: Command<Accepting, boolean> = {
  name: "accept",
  bytesOf: ({ call, body }) => call.length + body.byteLength,
  keyOf({ row, idempotency }) {
    return idempotency === null ? null : JSON.stringify([row.tenant, row.caller, row.agent_id, idempotency.key]);
  },
  sqlite(prepare) {
    const insertKey = prepare(
      `insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at)
       values (?, ?, ?, ?, ?, ?, ?) ${takenOver("?")}`,
    );
    const insertCall = prepare(`insert into open_invocations (${NAMES}) values (${VALUES.map(() => "?").join(", ")})`);
    const insertBody = prepare("insert into invocation_bodies (tenant, invocation_id, request) values (?, ?, ?)");
    return (input, effects) => {
      const { row, body, idempotency } = input;
      const { tenant, id } = row;
      if (idempotency !== null) {
        const { key, body_sha256, latest, asked_at } = idempotency;
        const expires_at = latest + IDEMPOTENCY_MS;
        if (insertKey.run(tenant, row.caller, row.agent_id, key, body_sha256, id, expires_at, asked_at) === 0)
          return false;
      }
      insertCall.run(...VALUES.map((value) => value(input)));
      if (!isSmall(body)) insertBody.run(tenant, id, body);
      countWhole(effects, { ...row, status: statusOf(input), error_class: null }, 1);
      return true;
    };
  },
  postgres: {
    text: `
with input as (select * from ${INPUT.source}),
keys as (
  insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at)
  select tenant, caller, agent_id, key, body_sha256, id, expires_at from input where key is not null
  order by tenant, caller, agent_id, key
  ${takenOver("$2::bigint")}
  returning invocation_id
),
stored as (
  insert into open_invocations (${NAMES})
  select ${NAMES} from input where key is null or id in (select invocation_id from keys)
  returning id, tenant, agent_id, mode, status, model, settlement_status
),
totals as (${addTotals(`
    select tenant, dimension, value, 1 as delta from stored, lateral (values
      ('all', ''), ('agent', agent_id), ('mode', mode), ('status', status), ('model', model),
      ('settlement', settlement_status)) as total (dimension, value)`)}
),
bodies as (
  insert into invocation_bodies (tenant, invocation_id, request)
  select tenant, id, large from input where large is not null and id in (select id from stored)
)
select id from stored`,
    valuesOf: (inputs) => [anyShard(), earliest(inputs), ...INPUT.values(inputs)],
    outputsOf(inputs, rows) {
      const stored = new Set(rows.map(({ id }) => id));
      return inputs.map(({ row }) => stored.has(row.id));
    },
  },
};

/** The earliest time that any of them was asked at: a key that expires too early would let its call be made twice. */
function earliest(inputs: readonly Accepting[]): number {
  return Math.min(...inputs.map(({ idempotency }) => idempotency?.asked_at ?? Number.MAX_SAFE_INTEGER));
}
