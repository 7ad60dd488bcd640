// Clean-up by age: captured bodies, whole records, expired idempotency keys, and the totals of models that are
// in no record any more. In small groups, each its own write, so that calls pass between them.

import { and, asc, eq, gt, gte, inArray, isNotNull, isNull, lt, lte, notExists, or, sql } from "drizzle-orm";
import type { BodyKind } from "../../../db/schema.ts";
import type { Clock } from "../../core/clock.ts";
import { idFloor } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import { DAY_MS } from "../../core/time.ts";
import { nextTenant, removeInGroups, tenantsIn } from "../../storage/batch-delete.ts";
import type { Store, Tx } from "../../storage/store.ts";
import { SMALL_BODY_BYTES } from "./commands/accept.ts";
import { countWhole } from "./counters.ts";
import { loosenAll } from "./loose-parts.ts";
import type { InvocationRow } from "./service.ts";

const TOTALS_AT_ONCE = 200;
/** To remove one takes half a millisecond of the event loop on SQLite (measured). */
const PARTS_AT_ONCE = 4;

export interface Retention {
  /** 0 keeps for ever. */
  readonly body_days: number;
  readonly history_days: number;
}

export async function cleanUp(store: Store, clock: Clock, retention: Retention, log: Log): Promise<void> {
  const now = clock.now();
  const floor = (days: number) => idFloor("inv", now - days * DAY_MS);
  const removed = { bodies: 0, invocations: 0, idempotency_keys: 0 };
  const { body_days, history_days } = retention;
  if (body_days > 0) {
    const before = floor(body_days);
    while ((await store.write((tx) => removeParts(tx, before))) === PARTS_AT_ONCE);
  }
  for await (const tenant of tenantsIn(store.read, "endedInvocations")) {
    if (body_days > 0) {
      const old = { tenant, before: floor(body_days), now };
      removed.bodies += await removeInGroups(store, (tx, limit) => removeBodies(tx, old, limit));
    }
    if (history_days > 0) {
      const old = { tenant, before: floor(history_days), now };
      removed.invocations += await removeInGroups(store, (tx, limit) => removeInvocations(tx, old, limit));
    }
  }
  if (history_days > 0) await removeEmptyTotals(store);
  const expiry = clock.now();
  removed.idempotency_keys = await removeInGroups(store, (tx, limit) => removeIdempotencyKeys(tx, expiry, limit));
  log.debug("cleaned_up", removed);
}

interface OlderThan {
  readonly tenant: string;
  /** An ID floor. */
  readonly before: string;
  readonly now: number;
}

/** The large ones, of all tenants in the order of time. Only of calls that have been made: a stored call must still be. */
async function removeParts(tx: Tx, before: string): Promise<number> {
  const { bodyParts: t, openInvocations: open } = tx.tables;
  const toBeMade = tx.db
    .select({ id: open.id })
    .from(open)
    .where(and(eq(open.tenant, t.tenant), eq(open.id, t.invocation_id)));
  const old = tx.db
    .select({ id: t.invocation_id, kind: t.kind, n: t.n })
    .from(t)
    .where(and(lt(t.invocation_id, before), notExists(toBeMade)))
    .limit(PARTS_AT_ONCE);
  const rows = await tx.db
    .delete(t)
    .where(inArray(sql`(${t.invocation_id}, ${t.kind}, ${t.n})`, old))
    .returning({ n: t.n });
  return rows.length;
}

async function removeBodies(tx: Tx, { tenant, before }: OlderThan, limit: number): Promise<number> {
  const { invocationBodies: t } = tx.tables;
  const old = tx.db
    .select({ id: t.invocation_id })
    .from(t)
    .where(and(eq(t.tenant, tenant), lt(t.invocation_id, before)))
    .limit(limit);
  const rows = await tx.db
    .delete(t)
    .where(and(eq(t.tenant, tenant), inArray(t.invocation_id, old)))
    .returning({ id: t.invocation_id });
  return rows.length;
}

async function removeInvocations(tx: Tx, { tenant, before, now }: OlderThan, limit: number): Promise<number> {
  const { endedInvocations: t, invocationBodies: bodies, payments } = tx.tables;
  const old = tx.db
    .select({ id: t.id })
    .from(t)
    .where(
      and(
        eq(t.tenant, tenant),
        lt(t.id, before),
        or(isNull(t.payment_nonce), notExists(keptPayment(tx, t, now))),
        or(eq(t.emit_receipt, false), notExists(receiptOwed(tx, t))),
      ),
    )
    .limit(limit);
  const rows = await tx.db
    .delete(t)
    .where(and(eq(t.tenant, tenant), inArray(t.id, old)))
    .returning();
  for (const row of rows) {
    countWhole(tx, row, -1);
    await loosenAll(tx, row, largeBodiesOf(row));
    await tx.db.delete(bodies).where(and(eq(bodies.tenant, tenant), eq(bodies.invocation_id, row.id)));
    if (row.payment_nonce === null) continue;
    await tx.db.delete(payments).where(and(eq(payments.tenant, tenant), eq(payments.invocation_id, row.id)));
  }
  return rows.length;
}

function largeBodiesOf({ body_captured, req_size, resp_size }: InvocationRow): BodyKind[] {
  const kinds: BodyKind[] = [];
  if (body_captured && (req_size ?? 0) > SMALL_BODY_BYTES) kinds.push("request");
  if (body_captured && (resp_size ?? 0) > SMALL_BODY_BYTES) kinds.push("response");
  return kinds;
}

/** The payment of an invocation that must stay: it is not settled yet, or could be presented again. */
function keptPayment({ db, tables: { payments: t } }: Tx, invocations: Tx["tables"]["endedInvocations"], now: number) {
  return db
    .select({ id: t.invocation_id })
    .from(t)
    .where(
      and(
        eq(t.tenant, invocations.tenant),
        eq(t.invocation_id, invocations.id),
        or(isNotNull(t.next_attempt_at), gte(t.valid_before, Math.floor(now / 1000))),
      ),
    );
}

/** An owed receipt, which is made from the record. */
function receiptOwed({ db, tables: { receiptsDue: t } }: Tx, invocations: Tx["tables"]["endedInvocations"]) {
  return db
    .select({ id: t.invocation_id })
    .from(t)
    .where(and(eq(t.tenant, invocations.tenant), eq(t.invocation_id, invocations.id)));
}

interface ModelCursor {
  readonly tenant: string;
  readonly model: string;
}

/** Callers choose the names of models, so totals of zero would pile up. All other totals have few values. */
async function removeEmptyTotals(store: Store): Promise<void> {
  let at: ModelCursor | null = { tenant: "", model: "" };
  while (at !== null) {
    const after: ModelCursor = at;
    at = await store.write((tx) => removeEmptyTotalsAfter(tx, after));
  }
}

/** Looks at the next models of the tenant, or goes on to the next tenant; null at the end. */
async function removeEmptyTotalsAfter(tx: Tx, { tenant, model }: ModelCursor): Promise<ModelCursor | null> {
  const { invocationCounts: t } = tx.tables;
  const ofTenant = and(eq(t.tenant, tenant), eq(t.dimension, "model"));
  const totals = await tx.db
    .select({ model: t.value, total: sql`sum(${t.count})`.mapWith(Number) })
    .from(t)
    .where(and(ofTenant, gt(t.value, model)))
    .groupBy(t.value)
    .orderBy(asc(t.value))
    .limit(TOTALS_AT_ONCE);
  const empty = totals.filter(({ total }) => total === 0).map((row) => row.model);
  if (empty.length > 0) {
    const rows = await tx.db
      .delete(t)
      .where(and(ofTenant, inArray(t.value, empty)))
      .returning({ model: t.value, count: t.count });
    // Put back what another transaction has added since the read, so that the total stays exact.
    for (const row of rows) tx.count(tenant, "model", row.model, row.count);
  }
  const last = totals.at(-1);
  if (last !== undefined) return { tenant, model: last.model };
  const next = await nextTenant(tx, "invocationCounts", tenant);
  return next === null ? null : { tenant: next, model: "" };
}

async function removeIdempotencyKeys(tx: Tx, now: number, limit: number): Promise<number> {
  const { idempotencyKeys: t } = tx.tables;
  const place = sql`(${t.tenant}, ${t.caller}, ${t.agent_id}, ${t.key})`;
  const old = tx.db
    .select({ tenant: t.tenant, caller: t.caller, agent_id: t.agent_id, key: t.key })
    .from(t)
    .where(lte(t.expires_at, now))
    .limit(limit);
  const rows = await tx.db.delete(t).where(inArray(place, old)).returning({ key: t.key });
  return rows.length;
}
