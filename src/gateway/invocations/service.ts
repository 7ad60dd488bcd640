// The life of an invocation in the database: accepted, paid for, claimed, ended, abandoned. Every transition
// is a write guarded by the states that its event may start from, and it keeps the exact totals of the history.
import { and, eq, inArray, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { asBuffer } from "../../core/bytes.ts";
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { CAPTURE_BYTES_MAX } from "../../core/limits.ts";
import {
  type ErrorClass,
  INVOCATION_EVENTS,
  INVOCATION_STATUSES,
  type InvocationEvent,
  type InvocationStatus,
  SETTLEMENT_EVENTS,
} from "../../core/states.ts";
import { bind, prepared, type Reader, type Tx } from "../../storage/store.ts";
import { oweReceipt } from "../receipts/service.ts";
import { freeIdempotencyKey, type Idempotency, takeIdempotencyKey } from "./idempotency.ts";
import { countErrorClass, countMove, countSettlement, countWhole } from "./totals.ts";

export type InvocationRow = Tables["invocations"]["$inferSelect"];

export interface Accepted {
  readonly row: InvocationRow;
  readonly call: Call;
  readonly body: Uint8Array;
  readonly idempotency: Idempotency | null;
}

/** What an ended call leaves behind. */
export interface Ending {
  readonly status: "succeeded" | "failed";
  readonly error_class: ErrorClass | null;
  readonly upstream_status: number | null;
  /** The upstream call from first dial to last byte, retries included; null when there was none. */
  readonly latency_ms: number | null;
  /** Until the first byte of the body; null where it is not streamed, or none came. */
  readonly ttft_ms?: number | null;
  /** Bytes of the whole decoded response body; null when no response came. */
  readonly resp_size: number | null;
  /**
   * Lower hex, of the whole body as its caller gets it (but for a comment that opens an event stream); null when no
   * whole response came, and when no receipt will say it.
   */
  readonly resp_sha256: string | null;
  /** The first MiB of the body; null when capture is off or no response came. */
  readonly response: Uint8Array | null;
  readonly response_truncated: boolean;
  readonly response_content_type: string | null;
}

export type InvocationKey = { readonly tenant: string; readonly id: string };

export interface PendingCall {
  readonly call: Call;
  readonly body: Uint8Array;
}

/** What every accepted call has; a column that is left out is null. */
const ACCEPTED_COLUMNS = {
  tenant: sql.placeholder("tenant"),
  id: sql.placeholder("id"),
  agent_id: sql.placeholder("agent_id"),
  caller: sql.placeholder("caller"),
  mode: sql.placeholder("mode"),
  status: sql.placeholder("status"),
  model: sql.placeholder("model"),
  mcp_method: sql.placeholder("mcp_method"),
  mcp_tool: sql.placeholder("mcp_tool"),
  req_size: sql.placeholder("req_size"),
  req_sha256: sql.placeholder("req_sha256"),
  response_truncated: sql.placeholder("response_truncated"),
  body_captured: sql.placeholder("body_captured"),
  emit_receipt: sql.placeholder("emit_receipt"),
  updated_at: sql.placeholder("updated_at"),
};

const insertInvocation = prepared(({ db, tables: { invocations } }: Tx) =>
  db.insert(invocations).values(ACCEPTED_COLUMNS),
);

/** Apart from the other, so that a call that costs nothing does not bind what only a paid one has. */
const insertPaidInvocation = prepared(({ db, tables: { invocations } }: Tx) =>
  db.insert(invocations).values({
    ...ACCEPTED_COLUMNS,
    payment_network: sql.placeholder("payment_network"),
    payment_asset: sql.placeholder("payment_asset"),
    payment_amount: sql.placeholder("payment_amount"),
    payment_payer: sql.placeholder("payment_payer"),
    payment_nonce: sql.placeholder("payment_nonce"),
    settlement_status: sql.placeholder("settlement_status"),
    settlement: sql.placeholder("settlement"),
  }),
);

const insertBody = prepared(({ db, tables: { invocationBodies } }: Tx) =>
  db.insert(invocationBodies).values({
    tenant: sql.placeholder("tenant"),
    invocation_id: sql.placeholder("invocation_id"),
    call: sql.placeholder("call"),
    request: sql.placeholder("request"),
  }),
);

/** A call waits aside while its payment may still land or fail. The index of pending calls has the same words. */
export function paidFor({ settlement_status }: Tables["invocations"]) {
  return sql`coalesce(${settlement_status}, '') <> 'pending'`;
}

/** The first state-changing statement of every event: it refuses by matching no row. */
const transition = (event: InvocationEvent) =>
  prepared(({ db, tables: { invocations: t } }: Tx) =>
    db
      .update(t)
      .set({
        status: INVOCATION_EVENTS[event].to,
        owner: bind(t.owner, "owner"),
        error_class: bind(t.error_class, "error_class"),
        upstream_status: bind(t.upstream_status, "upstream_status"),
        latency_ms: bind(t.latency_ms, "latency_ms"),
        ttft_ms: bind(t.ttft_ms, "ttft_ms"),
        resp_size: bind(t.resp_size, "resp_size"),
        resp_sha256: bind(t.resp_sha256, "resp_sha256"),
        response_truncated: bind(t.response_truncated, "response_truncated"),
        response_content_type: bind(t.response_content_type, "response_content_type"),
        updated_at: bind(t.updated_at, "updated_at"),
        completed_at: bind(t.completed_at, "completed_at"),
      })
      .where(
        and(
          eq(t.tenant, sql.placeholder("tenant")),
          eq(t.id, sql.placeholder("id")),
          eq(t.status, INVOCATION_EVENTS[event].from),
          event === "claim" ? paidFor(t) : undefined,
        ),
      )
      .returning({
        body_captured: t.body_captured,
        emit_receipt: t.emit_receipt,
        settlement_status: t.settlement_status,
      }),
  );

const claimRow = transition("claim");
const succeedRow = transition("succeed");
const failRow = transition("fail");
const withdrawRow = transition("withdraw");

const callAndBody = prepared(({ db, tables: { invocationBodies: t } }: Reader) =>
  db
    .select({ call: t.call, request: t.request })
    .from(t)
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.invocation_id, sql.placeholder("id")))),
);

/**
 * What may be shown of a body. Postgres and SQLite both count `substr` and `length` of bytes in bytes; SQLite's
 * `substr` of no bytes is null, so a body that needs no cut is left as it is.
 */
export function firstBytes(column: Tables["invocationBodies"]["request"]) {
  const max = sql.raw(String(CAPTURE_BYTES_MAX));
  const first = sql<Buffer | null>`case when length(${column}) > ${max} then substr(${column}, 1, ${max}) else ${column} end`;
  return first.mapWith(column);
}

const keepBodies = prepared(({ db, tables: { invocationBodies: t } }: Tx) =>
  db
    .update(t)
    .set({
      call: null,
      request: firstBytes(t.request),
      response: bind(t.response, "response"),
    })
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.invocation_id, sql.placeholder("id")))),
);

const dropBodies = prepared(({ db, tables: { invocationBodies: t } }: Tx) =>
  db
    .delete(t)
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.invocation_id, sql.placeholder("id")))),
);

/**
 * Stores an accepted call. With an idempotency key that another call already took, nothing is stored and that
 * call's ID is the answer.
 *
 * @throws Fault `conflict` when the key was taken with another body
 */
export async function accept(tx: Tx, accepted: Accepted, now: number): Promise<string> {
  const { row, call, body, idempotency } = accepted;
  if (idempotency !== null) {
    const first = await takeIdempotencyKey(tx, row, idempotency, now);
    if (first !== row.id) return first;
  }
  const insert = row.payment_nonce === null ? insertInvocation : insertPaidInvocation;
  await insert(tx).execute(row);
  await insertBody(tx).execute({
    tenant: row.tenant,
    invocation_id: row.id,
    call: JSON.stringify(call),
    request: asBuffer(body),
  });
  countWhole(tx, row, 1);
  return row.id;
}

const NOTHING_YET = {
  error_class: null,
  upstream_status: null,
  latency_ms: null,
  ttft_ms: null,
  resp_size: null,
  resp_sha256: null,
  response_truncated: false,
  response_content_type: null,
  completed_at: null,
};

export interface Claim {
  readonly key: InvocationKey;
  /** The replica that takes the call. */
  readonly owner: string;
  readonly now: number;
  /** Spares reading back what the caller still holds. */
  readonly inHand: PendingCall | null;
  /** Whether an earlier try of this claim ended without an answer: it may have been stored all the same. */
  readonly again: boolean;
}

/**
 * Takes a pending call; from here on it is never made again. Gives the stored call, or null when someone else
 * took it or it was cancelled.
 */
export async function claim(tx: Tx, { key, owner, now, inHand, again }: Claim): Promise<PendingCall | null> {
  const claimed = await claimRow(tx).execute({ ...NOTHING_YET, ...key, owner, updated_at: now });
  if (claimed.length > 0) countMove(tx, key.tenant, "pending", "running");
  else if (!again || !(await isRunningAt(tx, key, owner))) return null;
  if (inHand !== null) return inHand;
  const [stored] = await callAndBody(tx).execute(key);
  if (stored?.call == null || stored.request === null) {
    throw new Fault("internal", "a pending call without its request");
  }
  return { call: JSON.parse(stored.call) as Call, body: stored.request };
}

async function isRunningAt(tx: Tx, key: InvocationKey, owner: string): Promise<boolean> {
  const { invocations: t } = tx.tables;
  const [row] = await tx.db
    .select({ owner: t.owner })
    .from(t)
    .where(and(eq(t.tenant, key.tenant), eq(t.id, key.id), eq(t.status, "running")));
  return row?.owner === owner;
}

/** Records how a running call ended. False when it had been ended otherwise: cancelled, or given up for dead. */
export async function finish(tx: Tx, key: InvocationKey, ending: Ending, now: number): Promise<boolean> {
  const { response, status, ...fields } = ending;
  const end = status === "succeeded" ? succeedRow : failRow;
  const [row] = await end(tx).execute({
    ...NOTHING_YET,
    ...fields,
    ...key,
    owner: null,
    updated_at: now,
    completed_at: now,
  });
  if (row === undefined) return false;
  await recordEnd(tx, key, "running", ending, row);
  return true;
}

async function recordEnd(
  tx: Tx,
  key: InvocationKey,
  from: InvocationStatus,
  ending: Pick<Ending, "status" | "error_class" | "response">,
  ended: Pick<InvocationRow, "body_captured" | "emit_receipt" | "settlement_status">,
): Promise<void> {
  countMove(tx, key.tenant, from, ending.status);
  // A payment that is still open will be final later, and a receipt says what is final.
  if (ended.emit_receipt && ended.settlement_status !== "pending") await oweReceipt(tx, key);
  if (ending.error_class !== null) countErrorClass(tx, key.tenant, ending.error_class);
  // Whoever paid for a call that failed is to see both.
  if (ending.status === "failed" && ended.settlement_status === "settled") {
    await moveSettlement(tx, key, "lose", {});
  }
  if (!ended.body_captured) {
    await dropBodies(tx).execute(key);
    return;
  }
  const { response } = ending;
  await keepBodies(tx).execute({ ...key, response: response === null ? null : asBuffer(response) });
}

type Abandon = (tx: Tx, key: InvocationKey, error_class: ErrorClass, now: number) => Promise<boolean>;

function abandonFrom(from: "pending" | "running", end: typeof failRow): Abandon {
  return async (tx, key, error_class, now) => {
    const fields = { ...NOTHING_YET, ...key, owner: null, error_class, updated_at: now, completed_at: now };
    const [row] = await end(tx).execute(fields);
    if (row === undefined) return false;
    await recordEnd(tx, key, from, { status: "failed", error_class, response: null }, row);
    return true;
  };
}

/** Ends a call that nobody has claimed yet. False when it has been. */
export const withdraw = abandonFrom("pending", withdrawRow);
const giveUp = abandonFrom("running", failRow);

/** Ends a call that has not ended, without an answer of the upstream. False when it has ended already. */
export const abandon: Abandon = async (...call) =>
  // States only go forward, so a call that is claimed between the two attempts is met by the second.
  (await withdraw(...call)) || giveUp(...call);

type SettlementFields = Partial<Pick<InvocationRow, "settlement" | "updated_at">>;

/** Refuses by matching no row, as every transition does. */
async function moveSettlement(
  tx: Tx,
  key: InvocationKey,
  event: keyof typeof SETTLEMENT_EVENTS,
  fields: SettlementFields,
  statuses: readonly InvocationStatus[] = INVOCATION_STATUSES,
): Promise<InvocationRow | null> {
  const { invocations: t } = tx.tables;
  const { from, to } = SETTLEMENT_EVENTS[event];
  const [row] = await tx.db
    .update(t)
    .set({ ...fields, settlement_status: to })
    .where(
      and(
        eq(t.tenant, key.tenant),
        eq(t.id, key.id),
        eq(t.settlement_status, from),
        inArray(t.status, statuses),
      ),
    )
    .returning();
  if (row === undefined) return null;
  countSettlement(tx, key.tenant, from, to);
  return row;
}

/** Records what came of another attempt while the outcome stays open. `settlement` is the sub-record's JSON. */
export async function noteSettlement(
  tx: Tx,
  key: InvocationKey,
  settlement: string,
  now: number,
): Promise<void> {
  const { invocations: t } = tx.tables;
  await tx.db
    .update(t)
    .set({ settlement, updated_at: now })
    .where(and(eq(t.tenant, key.tenant), eq(t.id, key.id), eq(t.settlement_status, "pending")));
}

/**
 * The payment has been collected: the call may be made, unless it has ended meanwhile. Null when the outcome was
 * known before.
 */
export async function collectSettlement(
  tx: Tx,
  key: InvocationKey,
  settlement: string,
  now: number,
): Promise<InvocationRow | null> {
  const fields = { settlement, updated_at: now };
  const row = await moveSettlement(tx, key, "collect", fields, ["pending"]);
  if (row !== null) return row;
  const late = await moveSettlement(tx, key, "collectLate", fields, ["failed"]);
  if (late?.emit_receipt) await oweReceipt(tx, key);
  return late;
}

/**
 * The payment will not be collected: the call ends without having been made, and its idempotency key is free for
 * another. Null when the outcome was known before.
 */
export async function refuseSettlement(
  tx: Tx,
  key: InvocationKey,
  settlement: string,
  now: number,
): Promise<InvocationRow | null> {
  const row = await moveSettlement(tx, key, "refuse", { settlement, updated_at: now });
  if (row === null) return null;
  if (row.status !== "pending") {
    if (row.emit_receipt) await oweReceipt(tx, key);
    return row;
  }
  await freeIdempotencyKey(tx, row);
  const fields = { ...NOTHING_YET, ...key, owner: null, updated_at: now, completed_at: now };
  const [ended] = await withdrawRow(tx).execute(fields);
  const ending = { status: "failed", error_class: null, response: null } as const;
  if (ended !== undefined) await recordEnd(tx, key, "pending", ending, ended);
  return { ...row, ...ending, completed_at: now };
}
