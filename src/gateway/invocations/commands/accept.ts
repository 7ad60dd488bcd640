// The commands that accept a call: they store its idempotency key, its row among the open calls, and its body in one write.
// There are three commands: for plain calls; for calls with a key, a payment or a body of one or two parts; and for calls whose
// body was stored in parts before. The commands share the columns and the key.
import { Fault } from "../../../core/fault.ts";
import { idTime } from "../../../core/id.ts";
import { type Command, inputRows, type Prepare, perConnection, type SqliteStatement } from "../../../storage/store.ts";
import { bodyPartsOf, type CallBody, PART_BYTES } from "../../../wire/body.ts";
import { IDEMPOTENCY_MS, type Idempotency } from "../idempotency.ts";
import type { AcceptedCall } from "../service.ts";

/**
 * Compares keys so that Postgres can only use the index as a key look-up. With a plain equality, a plan made while the table
 * seemed empty reads the whole index, and stays in use when the table has grown.
 */
export const sameRow = (own: string, other: string) => `${own} between ${other} and ${other}`;

/** Finds the request of a call in `body_parts` or `orphaned_parts`. */
export const sameRequest = (own: string, { tenant, id }: { readonly tenant: string; readonly id: string }) =>
  `${sameRow(`(${own}.invocation_id, ${own}.kind)`, `(${id}, 'request')`)} and ${own}.tenant = ${tenant}`;

/**
 * Calls in a batch. Measured for accepts of 1,000 tenants with a backlog: 7.5 KB written for each call instead of 12.7 without
 * batches, and 61 µs of the main thread instead of 65. A scan passes 100 batches, which are 100,000 open calls, in 0.05 ms.
 */
const CALLS_MAX = 1_024;

/**
 * Assigns open calls to batches, by which they are clustered on SQLite. A batch is numbered by the time at which it begins, so
 * batches have the order of IDs. A new batch begins when the last one is full, and later than every stored call; a call that is
 * stored late goes into the batch of its time.
 */
function createBatches(prepare: Prepare): (id: string) => number {
  const newestStored = prepare("select max(id) as id from open_invocations");
  const batchAt = prepare("select max(batch) as batch from open_invocations where batch <= ?");
  /** The time of the newest call; null until it is read. */
  let newest: number | null = null;
  let batch = Number.POSITIVE_INFINITY;
  let calls = CALLS_MAX;
  return (id) => {
    const time = idTime(id);
    if (newest === null) {
      const stored = newestStored.get()?.["id"];
      newest = typeof stored === "string" ? idTime(stored) : 0;
    }
    if (calls >= CALLS_MAX && time > newest) [batch, calls] = [time, 0];
    newest = Math.max(newest, time);
    if (time < batch) return Number(batchAt.get(time)?.["batch"] ?? 0);
    calls++;
    return batch;
  };
}

/** Returns, for a connection, the function from a call's ID to its batch. */
export const batchesOn = perConnection(createBatches);

export interface Accepting extends Omit<AcceptedCall, "call"> {
  /** JSON of the call: agent snapshot and headers. */
  readonly call: string;
  /** The claim to make in the same write; null leaves the call pending. */
  readonly claim: { readonly owner: string; readonly token: string } | null;
}

/** A body up to this size is stored in the row of its open call. A larger one is written to its final table at once. */
export const SMALL_BODY_BYTES = 8_192;

/** Up to this many parts are stored in the write that accepts their call, which saves waiting for another commit. */
const PARTS_AT_ONCE = 2;

/** Whether a body is stored part by part, before its call is accepted. */
export const isInParts = (body: CallBody): boolean => body.byteLength > PARTS_AT_ONCE * PART_BYTES;

const COLUMNS = {
  id: ["text", ({ row }) => row.id],
  tenant: ["text", ({ row }) => row.tenant],
  agent_id: ["text", ({ row }) => row.agent_id],
  caller: ["text", ({ row }) => row.caller],
  mode: ["text", ({ row }) => row.mode],
  status: ["text", ({ claim }) => (claim === null ? "pending" : "running")],
  model: ["text", ({ row }) => row.model],
  mcp_method: ["text", ({ row }) => row.mcp_method],
  mcp_tool: ["text", ({ row }) => row.mcp_tool],
  req_size: ["bigint", ({ row }) => row.req_size],
  req_sha256: ["text", ({ row }) => row.req_sha256],
  body_captured: ["boolean", ({ row }) => row.body_captured],
  outbox: ["text", ({ row }) => row.outbox],
  accepted_by: ["text", ({ row }) => row.accepted_by],
  owner: ["text", ({ claim }) => claim?.owner ?? null],
  claim: ["text", ({ claim }) => claim?.token ?? null],
  updated_at: ["bigint", ({ row }) => row.updated_at],
  call: ["text", ({ call }) => call],
  request: ["bytea", ({ body }) => (isSmall(body) ? body : null)],
} as const satisfies Parameters<typeof inputRows<Accepting>>[0];

/** These columns are null in the row of a call without a payment. */
const PAYMENT_COLUMNS = {
  payment_network: ["text", ({ row }) => row.payment_network],
  payment_asset: ["text", ({ row }) => row.payment_asset],
  payment_amount: ["text", ({ row }) => row.payment_amount],
  payment_payer: ["text", ({ row }) => row.payment_payer],
  payment_nonce: ["text", ({ row }) => row.payment_nonce],
  settlement_status: ["text", ({ row }) => row.settlement_status],
  settlement: ["text", ({ row }) => row.settlement],
} as const satisfies Parameters<typeof inputRows<Accepting>>[0];

const isSmall = (body: CallBody): body is Uint8Array => body.byteLength <= SMALL_BODY_BYTES;

const partOf = (body: CallBody, n: number): Uint8Array | null =>
  isSmall(body) ? null : (bodyPartsOf(body)[n] ?? null);

const WITH_PAYMENT = { ...COLUMNS, ...PAYMENT_COLUMNS };

const KEY_COLUMNS = {
  key: ["text", ({ idempotency }) => idempotency?.key ?? null],
  body_sha256: ["text", ({ idempotency }) => idempotency?.body_sha256 ?? null],
  expires_at: ["bigint", ({ idempotency }) => idempotency && idempotency.latest + IDEMPOTENCY_MS],
} as const satisfies Parameters<typeof inputRows<Accepting>>[0];

const PART_COLUMNS = {
  first: ["bytea", ({ body }) => partOf(body, 0)],
  second: ["bytea", ({ body }) => partOf(body, 1)],
} as const satisfies Parameters<typeof inputRows<Accepting>>[0];

/** Lets a call take over an expired key. @param asked SQL of the earliest possible time now */
const takeOverExpired = (asked: string) =>
  `on conflict (tenant, caller, agent_id, key) do update
   set body_sha256 = excluded.body_sha256, invocation_id = excluded.invocation_id, expires_at = excluded.expires_at
   where idempotency_keys.expires_at <= ${asked}`;

/** The parts of the body were stored too long ago and are being removed. */
export const partsGone = (): Fault =>
  new Fault("unavailable", "the body could not be stored in time", { retryAfterSeconds: 1 });

/** What differs between the three commands. */
interface AcceptKind {
  readonly name: string;
  /** The columns of the open call that are stored. All others stay null. */
  readonly stored: Parameters<typeof inputRows<Accepting>>[0];
  /** Further inputs of the Postgres statement. */
  readonly inputs: Parameters<typeof inputRows<Accepting>>[0];
  bytesOf(input: Accepting): number;
  /** Stores the body, or keeps its stored parts. @throws Fault `unavailable` when the parts are being removed */
  sqlite: (prepare: (text: string) => SqliteStatement) => (input: Accepting) => void;
  /** For Postgres: the CTEs before the one that stores the calls, that one's source of rows, and the CTEs after it. */
  postgres(source: string): { readonly before: string; readonly from: string; readonly after: string };
}

const STORED_KEYS = `keys as (
  insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at)
  select tenant, caller, agent_id, key, body_sha256, id, expires_at from ready where key is not null
  order by tenant, caller, agent_id, key
  ${takeOverExpired("$1::bigint")}
  returning invocation_id
),`;
const READY_WITH_KEY = "ready where key is null or id in (select invocation_id from keys)";

/** Most calls: a small body, no key, no payment. 13 µs of the server each, and 16 by `WITH_ITS_BODY` (measured with 64). */
const PLAIN: AcceptKind = {
  name: "accept_plain",
  stored: COLUMNS,
  inputs: {},
  bytesOf: ({ call, body }) => call.length + body.byteLength,
  sqlite: () => () => {},
  postgres: (source) => ({ before: "", from: source, after: "" }),
};

/** A call whose body is small, or has few parts, which are stored in the same write. */
const WITH_ITS_BODY: AcceptKind = {
  name: "accept",
  stored: WITH_PAYMENT,
  inputs: { ...PART_COLUMNS, ...KEY_COLUMNS },
  bytesOf: ({ call, body }) => call.length + body.byteLength,
  sqlite(prepare) {
    const insertPart = prepare(
      "insert into body_parts (invocation_id, tenant, kind, n, bytes) values (?, ?, 'request', ?, ?)",
    );
    return ({ row: { tenant, id }, body }) => {
      if (isSmall(body)) return;
      for (const [n, part] of bodyPartsOf(body).entries()) insertPart.run(id, tenant, n, part);
    };
  },
  postgres: (source) => ({
    before: `ready as (select * from ${source}), ${STORED_KEYS}`,
    from: READY_WITH_KEY,
    // A subquery inside `coalesce` is hashed once; the planner would turn a plain `in` into a nested loop of all pairs.
    after: `,
bodies as (
  insert into body_parts (invocation_id, tenant, kind, n, bytes)
  select id, tenant, 'request', place, bytes from ready, lateral (values (0, first), (1, second)) as part (place, bytes)
  where first is not null and bytes is not null and coalesce(id in (select id from stored), false)
)`,
  }),
};

/** A call whose body was stored in parts before. Deleting their row of `orphaned_parts` keeps them, unless removal has begun. */
const STORED_IN_PARTS: AcceptKind = {
  name: "accept_in_parts",
  stored: WITH_PAYMENT,
  inputs: KEY_COLUMNS,
  bytesOf: ({ call }) => call.length,
  sqlite(prepare) {
    const keep = prepare(
      "delete from orphaned_parts where invocation_id = ? and kind = 'request' and tenant = ? and due_at <> 0",
    );
    return ({ row: { tenant, id } }) => {
      if (keep.run(id, tenant) === 0) throw partsGone();
    };
  },
  postgres: (source) => ({
    before: `
input as (select * from ${source}),
ready as (
  select input.* from input, lateral (
    select 1 from orphaned_parts l
    where ${sameRequest("l", { tenant: "input.tenant", id: "input.id" })} and l.due_at <> 0
    for update
  ) held
), ${STORED_KEYS}`,
    from: READY_WITH_KEY,
    after: `,
kept as (
  delete from orphaned_parts l using stored s where ${sameRequest("l", { tenant: "s.tenant", id: "s.id" })}
)`,
  }),
};

function acceptAs({ name, stored, inputs, bytesOf, sqlite, postgres }: AcceptKind): Command<Accepting, boolean> {
  const isKeyed = "key" in inputs;
  const names = Object.keys(stored).join(", ");
  const values = Object.values(stored).map(([, value]) => value);
  const input = inputRows<Accepting>({ ...stored, ...inputs }, isKeyed ? 2 : 1);
  const { before, from, after } = postgres(input.source);
  return {
    name,
    tenantOf: ({ row }) => row.tenant,
    bytesOf,
    keyOf({ row, idempotency }) {
      return idempotency === null ? null : JSON.stringify([row.tenant, row.caller, row.agent_id, idempotency.key]);
    },
    sqlite(prepare) {
      const insertKey = prepare(
        `insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at)
         values (?, ?, ?, ?, ?, ?, ?) ${takeOverExpired("?")}`,
      );
      const insertCall = prepare(
        `insert into open_invocations (${names}, batch) values (${values.map(() => "?").join(", ")}, ?)`,
      );
      const batchOf = batchesOn(prepare);
      const storeBody = sqlite(prepare);
      /** False when another call has the key. */
      function takeKey({ row }: Accepting, { key, body_sha256, asked_at, latest }: Idempotency): boolean {
        const { tenant, caller, agent_id, id } = row;
        const until = latest + IDEMPOTENCY_MS;
        return insertKey.run(tenant, caller, agent_id, key, body_sha256, id, until, asked_at) > 0;
      }

      return (accepting) => {
        const { row, idempotency } = accepting;
        if (idempotency !== null && !takeKey(accepting, idempotency)) return false;
        insertCall.run(...values.map((value) => value(accepting)), batchOf(row.id));
        storeBody(accepting);
        return true;
      };
    },
    postgres: {
      text: `
with ${before}
stored as (
  insert into open_invocations (${names})
  select ${names} from ${from}
  returning id, tenant
)${after}
select id from stored`,
      valuesOf: (inputs) => [...(isKeyed ? [earliest(inputs)] : []), ...input.values(inputs)],
      outputsOf(inputs, rows) {
        const stored = new Set(rows.map(({ id }) => id));
        return inputs.map(({ row }) => stored.has(row.id));
      },
    },
  };
}

/** Stores an open call; false, with nothing stored, when its key is taken. @throws UniqueViolation for a used ID */
export const acceptCommand = acceptAs(WITH_ITS_BODY);

/** As `acceptCommand`, for a call with a small body, and without a key or a payment. */
export const acceptPlainCommand = acceptAs(PLAIN);

/** As `acceptCommand`, for a body stored in parts. If they are being removed: false on Postgres, and a Fault on SQLite. */
export const acceptInPartsCommand = acceptAs(STORED_IN_PARTS);

/** The cheapest command that can store the call. */
export function acceptOf({ row, body, idempotency }: Pick<Accepting, "row" | "body" | "idempotency">) {
  if (isInParts(body)) return acceptInPartsCommand;
  const isPaid = row.payment_network !== null || row.settlement_status !== null;
  return idempotency === null && !isPaid && isSmall(body) ? acceptPlainCommand : acceptCommand;
}

/** The earliest time of the batch's requests: a key that expired too early would let its call be made twice. */
const earliest = (inputs: readonly Accepting[]): number =>
  Math.min(...inputs.map(({ idempotency }) => idempotency?.asked_at ?? Number.MAX_SAFE_INTEGER));
