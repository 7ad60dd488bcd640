// Clean-up by age: captured bodies, whole records with their payments, and expired idempotency keys. What the database
// cannot drop in whole pieces goes in small groups, each its own write, so that calls pass between them.
import { and, eq, inArray, isNull, lt, notExists, or, type SQL, sql } from "drizzle-orm";
import { oneOf } from "../../../db/schema.ts";
import { idFloor } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { DAY_MS, HOUR_MS } from "../../core/time.ts";
import { removeInGroups, tenantsIn } from "../../storage/cleanup.ts";
import { type DroppedRange, keyedById, type Store, type TimedTable, type Tx } from "../../storage/store.ts";
import { REMOVED_PARTS_AT_ONCE } from "./bodies.ts";
import { countWhole } from "./counters.ts";
import { slotsOver } from "./idempotency.ts";

export interface Retention {
  /** 0 keeps for ever. */
  readonly body_days: number;
  readonly history_days: number;
}

export async function cleanUp(store: Store, clock: Clock, retention: Retention, log: Log): Promise<void> {
  const now = clock.now();
  const removed = { payments: 0, bodies: 0, invocations: 0, idempotency_keys: 0 };
  const { body_days, history_days } = retention;
  // On SQLite some totals stand beside their table.
  await store.periods.flushTotals();
  const byAge = { bodies: now - body_days * DAY_MS, history: now - history_days * DAY_MS };
  if (history_days > 0) {
    removed.payments = await ofTenants(store, "payments", byAge.history, (tx, old, limit) =>
      removePayments(tx, { ...old, now }, limit),
    );
    const before = await store.periods.drop(ENDED_CALLS, byAge.history);
    removed.invocations = await ofTenants(store, "endedInvocations", before, removeInvocations);
    // After their calls, since those of calls that stay do so too.
    const bodiesBefore = await store.periods.drop(BODIES_OF_CALLS, byAge.history);
    await ofTenants(store, "invocationBodies", bodiesBefore, removeBodiesOfNone);
    await removeParts(store, await store.periods.drop(PARTS_OF_CALLS, byAge.history), isOfNone);
  }
  if (body_days > 0) {
    const before = await store.periods.drop(BODIES, byAge.bodies);
    removed.bodies = await ofTenants(store, "invocationBodies", before, removeBodies);
    await removeParts(store, await store.periods.drop(PARTS, byAge.bodies), isMade);
  }
  const over = slotsOver(clock.now());
  if ((await store.periods.drop(IDEMPOTENCY_KEYS, over * HOUR_MS)) > 0) {
    removed.idempotency_keys = await removeInGroups(store, (tx, limit) => removeKeys(tx, over, limit));
  }
  log.debug("cleaned_up", removed);
}

/** Removes what is left of each tenant from before this time. */
async function ofTenants(
  store: Store,
  table: "payments" | "endedInvocations" | "invocationBodies",
  time: number,
  remove: (tx: Tx, old: OlderThan, limit: number) => Promise<number>,
): Promise<number> {
  if (time === 0) return 0;
  let removed = 0;
  const before = idFloor("inv", time);
  for await (const tenant of tenantsIn(store.read, table)) {
    removed += await removeInGroups(store, (tx, limit) => remove(tx, { tenant, before }, limit));
  }
  return removed;
}

interface OlderThan {
  readonly tenant: string;
  /** An ID floor. */
  readonly before: string;
}

/**
 * Only those that are settled and can't be presented again, of calls that have ended: by its payment the caller of an open
 * one comes back to it, and the payment holds its credential.
 */
async function removePayments(
  tx: Tx,
  { tenant, before, now }: OlderThan & { readonly now: number },
  limit: number,
): Promise<number> {
  const { payments: t, openInvocations: open } = tx.tables;
  const itsCall = tx.db
    .select({ id: open.id })
    .from(open)
    .where(and(eq(open.tenant, t.tenant), eq(open.id, t.invocation_id)));
  const isOver = and(isNull(t.next_attempt_at), lt(t.valid_before, Math.floor(now / 1000)), notExists(itsCall));
  const old = tx.db
    .select({ id: t.invocation_id })
    .from(t)
    .where(and(eq(t.tenant, tenant), lt(t.invocation_id, before), isOver))
    .limit(limit);
  const rows = await tx.db
    .delete(t)
    .where(and(eq(t.tenant, tenant), inArray(t.invocation_id, old), isOver))
    .returning({ id: t.invocation_id });
  return rows.length;
}

type BodyTable = Tx["tables"]["invocationBodies"] | Tx["tables"]["bodyParts"];

/** Only bodies whose call has been made, since a stored call must still be made. */
function removeBodies(tx: Tx, old: OlderThan, limit: number): Promise<number> {
  return removeSomeBodies(tx, old, limit, isMade(tx, tx.tables.invocationBodies));
}

/** Bodies whose calls have been dropped before them. */
function removeBodiesOfNone(tx: Tx, old: OlderThan, limit: number): Promise<number> {
  return removeSomeBodies(tx, old, limit, isOfNone(tx, tx.tables.invocationBodies));
}

function isMade(tx: Tx, bodies: BodyTable): SQL | undefined {
  return notExists(callOf(tx, bodies, tx.tables.openInvocations));
}

function isOfNone(tx: Tx, bodies: BodyTable): SQL | undefined {
  return and(isMade(tx, bodies), notExists(callOf(tx, bodies, tx.tables.endedInvocations)));
}

/** The parts of large bodies from before this time, of all tenants in the order of time. */
async function removeParts(store: Store, time: number, condition: typeof isMade): Promise<void> {
  const before = idFloor("inv", time);
  while ((await store.write((tx) => removeSomeParts(tx, before, condition))) === REMOVED_PARTS_AT_ONCE);
}

async function removeSomeParts(tx: Tx, before: string, condition: typeof isMade): Promise<number> {
  const { bodyParts: t } = tx.tables;
  const old = tx.db
    .select({ id: t.invocation_id, kind: t.kind, n: t.n })
    .from(t)
    .where(and(lt(t.invocation_id, before), condition(tx, t)))
    .limit(REMOVED_PARTS_AT_ONCE);
  const rows = await tx.db
    .delete(t)
    .where(inArray(sql`(${t.invocation_id}, ${t.kind}, ${t.n})`, old))
    .returning({ n: t.n });
  return rows.length;
}

function callOf(
  { db }: Tx,
  bodies: BodyTable,
  calls: Tx["tables"]["openInvocations"] | Tx["tables"]["endedInvocations"],
) {
  return db
    .select({ id: calls.id })
    .from(calls)
    .where(and(eq(calls.tenant, bodies.tenant), eq(calls.id, bodies.invocation_id)));
}

async function removeSomeBodies(tx: Tx, { tenant, before }: OlderThan, limit: number, condition: SQL | undefined) {
  const { invocationBodies: t } = tx.tables;
  const old = await tx.db
    .select({ id: t.invocation_id })
    .from(t)
    .where(and(eq(t.tenant, tenant), lt(t.invocation_id, before), condition))
    .limit(limit);
  const ids = old.map(({ id }) => id);
  if (ids.length > 0) await tx.db.delete(t).where(and(eq(t.tenant, tenant), oneOf(t.invocation_id, ids), condition));
  return ids.length;
}

async function removeInvocations(tx: Tx, { tenant, before }: OlderThan, limit: number): Promise<number> {
  const { endedInvocations: t, invocationBodies: bodies } = tx.tables;
  const isFree = and(
    or(isNull(t.payment_nonce), notExists(paymentOf(tx, t))),
    or(eq(t.emit_receipt, false), notExists(receiptOwed(tx, t))),
  );
  const old = await tx.db
    .select({ id: t.id })
    .from(t)
    .where(and(eq(t.tenant, tenant), lt(t.id, before), isFree))
    .limit(limit);
  if (old.length === 0) return 0;
  // By their IDs: a condition that finds them again would be asked for each row beside each.
  const ids = old.map(({ id }) => id);
  const rows = await tx.db
    .delete(t)
    .where(and(eq(t.tenant, tenant), oneOf(t.id, ids), isFree))
    .returning();
  for (const row of rows) countWhole(tx, row, -1);
  const gone = rows.map(({ id }) => id);
  if (gone.length > 0) {
    await tx.db.delete(bodies).where(and(eq(bodies.tenant, tenant), oneOf(bodies.invocation_id, gone)));
  }
  return ids.length;
}

/** The payment of an invocation: it is not settled yet, or could be presented again. */
function paymentOf({ db, tables: { payments: t } }: Tx, invocations: Tx["tables"]["endedInvocations"]) {
  return db
    .select({ id: t.invocation_id })
    .from(t)
    .where(and(eq(t.tenant, invocations.tenant), eq(t.invocation_id, invocations.id)));
}

/** An owed receipt, which is made from the record. */
function receiptOwed({ db, tables: { receiptsDue: t } }: Tx, invocations: Tx["tables"]["endedInvocations"]) {
  return db
    .select({ id: t.invocation_id })
    .from(t)
    .where(and(eq(t.tenant, invocations.tenant), eq(t.invocation_id, invocations.id)));
}

/** Slots that are over, which the database could not drop. */
async function removeKeys(tx: Tx, before: number, limit: number): Promise<number> {
  const { idempotencyKeys: t } = tx.tables;
  const place = sql`(${t.tenant}, ${t.caller}, ${t.agent_id}, ${t.key}, ${t.slot})`;
  const isOver = lt(t.slot, before);
  const old = tx.db
    .select({ tenant: t.tenant, caller: t.caller, agent_id: t.agent_id, key: t.key, slot: t.slot })
    .from(t)
    .where(isOver)
    .limit(limit);
  const rows = await tx.db
    .delete(t)
    .where(and(isOver, inArray(place, old)))
    .returning({ key: t.key });
  return rows.length;
}

const among = (column: string, { from, to }: DroppedRange) => `${column} >= ${from} and ${column} < ${to}`;

/** Tenant by tenant, along the index of its payments. */
const paidCalls = (range: DroppedRange) => `
  with recursive tenants (tenant) as (
    select min(tenant) from payments
    union all
    select (select min(p.tenant) from payments p where p.tenant > t.tenant) from tenants t where t.tenant is not null
  )
  select p.tenant, p.invocation_id as id from tenants t
    join payments p on p.tenant = t.tenant and ${among("p.invocation_id", range)}`;

/** A call stays while its payment does, which is removed when it is settled and past, and while it is owed a receipt. */
export const ENDED_CALLS: TimedTable = {
  name: "ended_invocations",
  key: "id",
  ...keyedById("inv"),
  isCounted: true,
  kept: (range) => `select tenant, id from (${paidCalls(range)}) as paid
    union select tenant, invocation_id as id from receipts_due where ${among("invocation_id", range)}`,
};

/** A call that has not ended must still be made, and its body may be there. */
const openCalls = (range: DroppedRange) =>
  `select tenant, id as invocation_id from open_invocations where ${among("id", range)}`;

/** Bodies that go before their calls. */
export const BODIES: TimedTable = {
  name: "invocation_bodies",
  key: "invocation_id",
  ...keyedById("inv"),
  isCounted: false,
  kept: openCalls,
};

/** Bodies that go with their calls, and so after them. */
export const BODIES_OF_CALLS: TimedTable = {
  ...BODIES,
  kept: (range) =>
    `${openCalls(range)} union select tenant, id as invocation_id from ended_invocations where ${among("id", range)}`,
};

/** Large bodies. */
export const PARTS: TimedTable = { ...BODIES, name: "body_parts" };
const PARTS_OF_CALLS: TimedTable = { ...BODIES_OF_CALLS, name: "body_parts" };

/** See idempotency.ts. */
export const IDEMPOTENCY_KEYS: TimedTable = {
  name: "idempotency_keys",
  key: "slot",
  keyAt: (time) => String(Math.floor(time / HOUR_MS)),
  timeAt: (key) => Number(key) * HOUR_MS,
  isCounted: false,
  kept: null,
};
