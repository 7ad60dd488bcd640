// Statements on the record of an invocation that several places need, each prepared once. What they mean, and which go
// together in one write, stands in service.ts; the statements that every call goes through are in commands/.
import { and, eq, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { SETTLEMENT_EVENTS } from "../../core/states.ts";
import { bind, prepared, type Reader, type Tx } from "../../storage/store.ts";
import { countSettlement } from "./counters.ts";
import type { InvocationKey, InvocationRow } from "./service.ts";

export const byId = prepared(({ db, tables: { invocations: t } }: Reader) =>
  db
    .select()
    .from(t)
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.id, sql.placeholder("id")))),
);

/** In the write that makes the end of a call and its settlement final, which happens once. */
export const oweReceipt = prepared(({ db, tables: { receiptsDue } }: Tx) =>
  db.insert(receiptsDue).values({
    tenant: sql.placeholder("tenant"),
    invocation_id: sql.placeholder("id"),
  }),
);

/**
 * Not a bare column: a partial index on the status would seem as good as the key until the table is analysed.
 *
 * @param status of an open call
 */
export function isIn(column: Tables["openInvocations"]["status"], status: "pending" | "running") {
  return sql`coalesce(${column}, '') = ${status}`;
}

export const heldBy = prepared(({ db, tables: { openInvocations: t } }: Reader) =>
  db
    .select({ id: t.id })
    .from(t)
    .where(
      and(
        eq(t.tenant, sql.placeholder("tenant")),
        eq(t.id, sql.placeholder("id")),
        isIn(t.status, "running"),
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

type SettlementFields = Pick<InvocationRow, "settlement" | "updated_at">;

/** Of a call that nobody has claimed yet. False when its settlement is not where the event starts from. */
export async function moveOpenSettlement(
  tx: Tx,
  key: InvocationKey,
  event: "collect" | "refuse",
  fields: SettlementFields,
): Promise<boolean> {
  const { openInvocations: t } = tx.tables;
  const { from, to } = SETTLEMENT_EVENTS[event];
  const rows = await tx.db
    .update(t)
    .set({ ...fields, settlement_status: to })
    .where(and(eq(t.tenant, key.tenant), eq(t.id, key.id), eq(t.settlement_status, from), isIn(t.status, "pending")))
    .returning({ id: t.id });
  if (rows.length > 0) countSettlement(tx, key, from, to);
  return rows.length > 0;
}

/** Of a call that has ended. */
export async function moveEndedSettlement(
  tx: Tx,
  key: InvocationKey,
  event: "collectLate" | "refuse",
  fields: SettlementFields,
): Promise<boolean> {
  const { endedInvocations: t } = tx.tables;
  const { from, to } = SETTLEMENT_EVENTS[event];
  const rows = await tx.db
    .update(t)
    .set({ ...fields, settlement_status: to })
    .where(and(eq(t.tenant, key.tenant), eq(t.id, key.id), eq(t.settlement_status, from)))
    .returning({ id: t.id });
  if (rows.length > 0) countSettlement(tx, key, from, to);
  return rows.length > 0;
}
