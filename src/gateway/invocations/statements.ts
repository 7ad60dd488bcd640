// The statements by which the record of an invocation changes, each prepared once. What they mean, and which go
// together in one write, stands in service.ts.
import { and, eq, inArray, notExists, sql } from "drizzle-orm";
import { paidFor } from "../../../db/conditions.ts";
import type { Tables } from "../../../db/schema.ts";
import { CAPTURE_BYTES_MAX } from "../../core/limits.ts";
import {
  INVOCATION_EVENTS,
  INVOCATION_STATUSES,
  type InvocationEvent,
  type InvocationStatus,
  SETTLEMENT_EVENTS,
} from "../../core/states.ts";
import { bind, prepared, type Reader, type Tx } from "../../storage/store.ts";
import { countSettlement } from "./counters.ts";
import type { InvocationKey, InvocationRow } from "./service.ts";

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
  accepted_by: sql.placeholder("accepted_by"),
  updated_at: sql.placeholder("updated_at"),
};

export const insertInvocation = prepared(({ db, tables: { invocations } }: Tx) =>
  db.insert(invocations).values(ACCEPTED_COLUMNS),
);

/** A statement of its own, so that a free call does not bind the columns of a paid one. */
export const insertPaidInvocation = prepared(({ db, tables: { invocations } }: Tx) =>
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

export const insertBody = prepared(({ db, tables: { invocationBodies } }: Tx) =>
  db.insert(invocationBodies).values({
    tenant: sql.placeholder("tenant"),
    invocation_id: sql.placeholder("invocation_id"),
    call: sql.placeholder("call"),
    request: sql.placeholder("request"),
  }),
);

/** A call that was refused to its caller is not made, even if its record appears later. */
function isNotRefused({ db, tables: { invocations: t, refusedCalls: r } }: Tx) {
  const refused = db
    .select({ id: r.id })
    .from(r)
    .where(and(eq(r.tenant, t.tenant), eq(r.id, t.id)));
  return notExists(refused);
}

/**
 * The first state-changing statement of every event: it refuses by matching no row.
 *
 * @param by "claimer": only with the token of the call's claim
 */
function transition(tx: Tx, event: InvocationEvent, by: "anyone" | "claimer") {
  const { db, tables } = tx;
  const { invocations: t } = tables;
  return db
    .update(t)
    .set({
      status: INVOCATION_EVENTS[event].to,
      owner: bind(t.owner, "owner"),
      ...(event === "claim" && { claim: bind(t.claim, "claim") }),
      ...(event === "release" && { claim: null }),
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
        // Not a bare column: a partial index on the status would seem as good as the key until the table is analysed.
        sql`coalesce(${t.status}, '') = ${INVOCATION_EVENTS[event].from}`,
        by === "claimer" ? eq(t.claim, bind(t.claim, "claim")) : undefined,
        ...(event === "claim" ? [paidFor(t), isNotRefused(tx)] : []),
      ),
    );
}

/** Columns of an ended call that its end needs, and that listeners get beside the end itself. */
const ended = (event: "succeed" | "fail" | "withdraw", by: "anyone" | "claimer" = "anyone") =>
  prepared((tx: Tx) => {
    const { invocations: t } = tx.tables;
    return transition(tx, event, by).returning({
      body_captured: t.body_captured,
      emit_receipt: t.emit_receipt,
      settlement_status: t.settlement_status,
      payment_nonce: t.payment_nonce,
      payment_network: t.payment_network,
      payment_asset: t.payment_asset,
      payment_amount: t.payment_amount,
      agent_id: t.agent_id,
      caller: t.caller,
      mode: t.mode,
      model: t.model,
      mcp_method: t.mcp_method,
      req_size: t.req_size,
    });
  });

export const claimRow = prepared((tx: Tx) =>
  transition(tx, "claim", "anyone").returning({ id: tx.tables.invocations.id }),
);
export const releaseRow = prepared((tx: Tx) =>
  transition(tx, "release", "claimer").returning({ id: tx.tables.invocations.id }),
);
export const succeedOwnRow = ended("succeed", "claimer");
export const failOwnRow = ended("fail", "claimer");
export const failRow = ended("fail");
export const withdrawRow = ended("withdraw");

/** In the write that makes the end of a call and its settlement final, which happens once. */
export const oweReceipt = prepared(({ db, tables: { receiptsDue } }: Tx) =>
  db.insert(receiptsDue).values({
    tenant: sql.placeholder("tenant"),
    invocation_id: sql.placeholder("id"),
  }),
);

export const callAndBody = prepared(({ db, tables: { invocationBodies: t } }: Reader) =>
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

export const keepBodies = prepared(({ db, tables: { invocationBodies: t } }: Tx) =>
  db
    .update(t)
    .set({
      call: null,
      request: firstBytes(t.request),
      response: bind(t.response, "response"),
    })
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.invocation_id, sql.placeholder("id")))),
);

export const dropBodies = prepared(({ db, tables: { invocationBodies: t } }: Tx) =>
  db.delete(t).where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.invocation_id, sql.placeholder("id")))),
);

export const heldBy = prepared(({ db, tables: { invocations: t } }: Reader) =>
  db
    .select({ id: t.id })
    .from(t)
    .where(
      and(
        eq(t.tenant, sql.placeholder("tenant")),
        eq(t.id, sql.placeholder("id")),
        eq(t.status, "running"),
        eq(t.claim, bind(t.claim, "claim")),
      ),
    ),
);

/** What is not known of a call before its end. */
export const NOTHING_YET = {
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

type SettlementFields = Partial<Pick<InvocationRow, "settlement" | "updated_at">>;

/** Refuses by matching no row, as every transition does. */
export async function moveSettlement(
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
    .where(and(eq(t.tenant, key.tenant), eq(t.id, key.id), eq(t.settlement_status, from), inArray(t.status, statuses)))
    .returning();
  if (row === undefined) return null;
  countSettlement(tx, key.tenant, from, to);
  return row;
}
