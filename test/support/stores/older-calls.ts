// A database of schema version 9, as the program of that version has left it: calls of two tenants in every state, in SQL
// that both databases understand but for the few words that stand here.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

export type Dialect = "sqlite" | "postgres";

/** The calls of versions up to this one stand in one table. */
const LAST_VERSION = 9;

/** A body of the old schema: the last two are stored apart from their open call since. */
export const BODY_BYTES = { none: 0, small: 5, limit: 8_192, above: 8_193, large: 1_100_000 } as const;

export interface OlderCall {
  readonly name: string;
  readonly tenant: string;
  readonly mode: "transactional" | "streaming";
  readonly status: "pending" | "running" | "succeeded" | "failed";
  readonly body: keyof typeof BODY_BYTES;
  readonly captured: boolean;
  readonly model: string | null;
  readonly error_class: string | null;
  readonly settlement_status: string | null;
  readonly receipt: boolean;
  /** What accepting it needed, which no row of its own should be without. */
  readonly hasCall: boolean;
}

const call = (name: string, fields: Partial<OlderCall> = {}): OlderCall => ({
  name,
  tenant: "acme",
  mode: "transactional",
  status: "pending",
  body: "small",
  captured: true,
  model: null,
  error_class: null,
  settlement_status: null,
  receipt: false,
  hasCall: true,
  ...fields,
});

export const OLDER_CALLS: readonly OlderCall[] = [
  call("pending"),
  call("pending without a body", { body: "none", model: "m-1" }),
  call("pending at the limit", { body: "limit" }),
  call("pending above the limit", { body: "above", model: "m-1" }),
  call("pending large", { body: "large", receipt: true }),
  call("pending not captured", { body: "large", captured: false }),
  call("running", { status: "running", model: "m-2" }),
  call("running large", { status: "running", body: "large" }),
  call("running stream", { status: "running", mode: "streaming", settlement_status: "settled" }),
  call("waiting for its payment", { settlement_status: "pending" }),
  call("declined", { settlement_status: "pending", body: "large" }),
  call("paid", { settlement_status: "settled" }),
  call("paid stream", { settlement_status: "settled", mode: "streaming", body: "above" }),
  call("succeeded", { status: "succeeded", model: "m-1" }),
  call("succeeded paid", { status: "succeeded", settlement_status: "settled", receipt: true, body: "large" }),
  call("succeeded not captured", { status: "succeeded", captured: false, mode: "streaming" }),
  call("failed", { status: "failed", error_class: "timeout", model: "m-2" }),
  call("failed unpaid", { status: "failed", settlement_status: "pending", receipt: true }),
  call("lost", { hasCall: false, body: "small" }),
  call("pending of a rival", { tenant: "rival" }),
  call("running of a rival", { tenant: "rival", status: "running", body: "limit" }),
  call("succeeded of a rival", { tenant: "rival", status: "succeeded" }),
];

export const AGENT = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
export const OLDER_AT = 1_763_700_000_000;
export const OLD_OWNER = "rep_old";

export const isOpen = ({ status }: OlderCall) => status === "pending" || status === "running";
export const idOf = (older: OlderCall) =>
  `inv_019aa4d2-7c1e-7000-8000-${String(OLDER_CALLS.indexOf(older)).padStart(12, "0")}`;
export const keyOf = (older: OlderCall) => `key of ${older.name}`;
export const claimOf = ({ name }: OlderCall) => `claim of ${name}`;
/** Bytes that differ from call to call. */
export const bodyOf = (older: OlderCall) => Buffer.alloc(BODY_BYTES[older.body], `${older.name} `);
export const responseOf = ({ name }: OlderCall) => Buffer.from(`answer to ${name}`);
export const storedCallOf = (older: OlderCall) => ({
  url: "https://example.com/",
  protocol: "http",
  mcp_protocol_version: null,
  credential_ref: null,
  capture: older.captured,
  receipt: older.receipt,
  headers: [
    ["content-type", "text/plain"],
    ["idempotency-key", keyOf(older)],
  ],
  request_id: `request of ${older.name}`,
});

/** The first MiB of a body is shown when its call has ended. */
const CAPTURE_BYTES_MAX = 1_048_576;

function literals(dialect: Dialect) {
  const text = (value: string | null) => (value === null ? "null" : `'${value.replaceAll("'", "''")}'`);
  return {
    text,
    bytes: (value: Uint8Array | null) => {
      if (value === null) return "null";
      const hex = Buffer.from(value).toString("hex");
      return dialect === "sqlite" ? `x'${hex}'` : `'\\x${hex}'::bytea`;
    },
    flag: (value: boolean) => (dialect === "sqlite" ? String(Number(value)) : String(value)),
  };
}

function rowsOf(dialect: Dialect, older: OlderCall): string[] {
  const { text, bytes, flag } = literals(dialect);
  const id = idOf(older);
  const { tenant, status } = older;
  const open = isOpen(older);
  const completed = open ? "null" : OLDER_AT + 42;
  const [owner, claim] = status === "running" ? [OLD_OWNER, claimOf(older)] : [null, null];
  const isPaid = older.settlement_status !== null;
  const statements = [
    `insert into invocations (tenant, id, agent_id, caller, mode, status, error_class, model, payment_network, payment_nonce,
       settlement_status, upstream_status, req_size, response_truncated, body_captured, emit_receipt, owner, claim,
       updated_at, completed_at)
     values ('${tenant}', '${id}', '${AGENT}', 'ada', '${older.mode}', '${status}', ${text(older.error_class)},
       ${text(older.model)}, ${isPaid ? "'base'" : "null"}, ${isPaid ? text(`nonce of ${older.name}`) : "null"},
       ${text(older.settlement_status)}, ${open ? "null" : 200}, ${BODY_BYTES[older.body]}, ${flag(false)},
       ${flag(older.captured)}, ${flag(older.receipt)}, ${text(owner)}, ${text(claim)}, ${OLDER_AT}, ${completed})`,
    `insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at)
     values ('${tenant}', 'ada', '${AGENT}', ${text(keyOf(older))}, 'sha', '${id}', ${OLDER_AT + 86_400_000})`,
  ];
  const storedCall = open && older.hasCall ? JSON.stringify(storedCallOf(older)) : null;
  if (open || older.captured) {
    const body = open ? bodyOf(older) : bodyOf(older).subarray(0, CAPTURE_BYTES_MAX);
    statements.push(
      `insert into invocation_bodies (tenant, invocation_id, call, request, response)
       values ('${tenant}', '${id}', ${text(storedCall)}, ${bytes(body)}, ${bytes(open ? null : responseOf(older))})`,
    );
  }
  if (!open && older.receipt && older.settlement_status !== "pending") {
    statements.push(`insert into receipts_due (tenant, invocation_id) values ('${tenant}', '${id}')`);
  }
  return statements;
}

/** Counted as the older version did, open calls among them. */
const TOTALS = Object.entries({
  all: "''",
  agent: "agent_id",
  mode: "mode",
  status: "status",
  model: "model",
  error_class: "error_class",
  settlement: "settlement_status",
}).map(
  ([dimension, column]) =>
    `insert into invocation_counts (tenant, dimension, value, shard, count)
     select tenant, '${dimension}', ${column}, 0, count(*) from invocations where ${column} is not null group by 1, 2, 3, 4`,
);

/** The statements that make the older database, without any call. */
export function olderSchema(dialect: Dialect): string[] {
  const dir = join(import.meta.dir, "../../../db", dialect);
  const files = readdirSync(dir).filter((name) => Number(name.slice(0, 4)) <= LAST_VERSION);
  return [
    "create table schema_migrations (version integer not null primary key, applied_at bigint not null)",
    ...files.sort().map((name) => readFileSync(join(dir, name), "utf8")),
    ...files.map((_, index) => `insert into schema_migrations values (${index + 1}, 1)`),
  ];
}

export function olderDatabase(dialect: Dialect): string[] {
  return [...olderSchema(dialect), ...OLDER_CALLS.flatMap((older) => rowsOf(dialect, older)), ...TOTALS];
}

/**
 * The statements that add many calls of 50 tenants to the older schema, each with bodies of 250 bytes.
 *
 * @param open so many of them, the latest, are pending, or running, one in ten
 */
export function manyOlderCalls(dialect: Dialect, { ended, open }: { ended: number; open: number }): string[] {
  const { flag } = literals(dialect);
  const numbers = `with recursive numbers (i) as (
    select cast(1 as bigint) union all select i + 1 from numbers where i < ${ended + open})`;
  const id = `'inv_019a' || substr(cast(100000000 + i as text), 2, 4) || '-' || substr(cast(100000000 + i as text), 6, 4)
    || '-7000-8000-000000000000'`;
  const tenant = "'tenant-' || cast(i % 50 as text)";
  const [isLate, isRunning] = [`i > ${ended}`, `i > ${ended} and i % 10 = 0`];
  const body = dialect === "sqlite" ? "zeroblob(250)" : "convert_to(repeat('x', 250), 'UTF8')";
  const stored = JSON.stringify(storedCallOf(call("many"))).replaceAll("'", "''");
  return [
    `insert into invocations (tenant, id, agent_id, caller, mode, status, model, req_size, resp_size, response_truncated,
       body_captured, emit_receipt, owner, updated_at, completed_at)
     ${numbers} select ${tenant}, ${id}, '${AGENT}', 'ada', 'transactional',
       case when ${isRunning} then 'running' when ${isLate} then 'pending' else 'succeeded' end, 'm-' || cast(i % 30 as text),
       250, 250, ${flag(false)}, ${flag(true)}, ${flag(false)}, case when ${isRunning} then '${OLD_OWNER}' end, ${OLDER_AT},
       case when ${isLate} then null else ${OLDER_AT + 42} end from numbers`,
    `insert into invocation_bodies (tenant, invocation_id, call, request, response)
     ${numbers} select ${tenant}, ${id}, case when ${isLate} then '${stored}' end, ${body},
       case when ${isLate} then null else ${body} end from numbers`,
    ...TOTALS,
  ];
}
