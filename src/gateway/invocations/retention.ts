// Clean-up by age: captured bodies, whole records with their payments, and expired idempotency keys. All goes in small groups,
// each its own write, so that calls pass between them.
import { and, eq, gte, inArray, isNull, lt, notExists, type SQL, sql } from "drizzle-orm";
import { idFloor } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { DAY_MS, HOUR_MS } from "../../core/time.ts";
import { type KeyRange, removeInGroups, removeRanges, tenantsIn } from "../../storage/cleanup.ts";
import { isOfCall, type Store, type Tx } from "../../storage/store.ts";
import { REMOVED_PARTS_AT_ONCE } from "./bodies.ts";
import { countEnded } from "./commands/end.ts";

export interface Retention {
  /** 0 keeps for ever. */
  readonly body_days: number;
  readonly history_days: number;
}

export async function cleanUp(store: Store, clock: Clock, retention: Retention, log: Log): Promise<void> {
  const now = clock.now();
  const { body_days, history_days } = retention;
  if (history_days > 0) {
    const before = idFloor("inv", now - history_days * DAY_MS);
    for await (const tenant of tenantsIn(store.read, "payments")) {
      await removeInGroups(store, (tx, limit) => removePayments(tx, { tenant, before, now }, limit));
    }
    await removeRanges(store, "endedInvocations", before, removeCalls);
    await removeParts(store, before, isOfNone);
  }
  if (body_days > 0) {
    const before = idFloor("inv", now - body_days * DAY_MS);
    await removeRanges(store, "invocationBodies", before, (tx, range) => removeBodies(tx, range, isMade));
    await removeParts(store, before, isMade);
  }
  // Another replica's clock may be behind.
  await removeInGroups(store, (tx, limit) => removeKeys(tx, now - HOUR_MS, limit));
  log.debug("cleaned_up");
}

interface OldPayments {
  readonly tenant: string;
  /** An ID floor. */
  readonly before: string;
  readonly now: number;
}

/**
 * Only those that are settled and can't be presented again, of calls that have ended: by its payment the caller of an open
 * one comes back to it, and the payment holds its credential.
 */
async function removePayments(tx: Tx, { tenant, before, now }: OldPayments, limit: number): Promise<number> {
  const { payments: t, openInvocations: open } = tx.tables;
  const itsCall = tx.db.select({ id: open.id }).from(open).where(isOfCall(t, open));
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

/** Bodies that may go before their calls: a stored call must still be made. */
function isMade(tx: Tx, bodies: BodyTable): SQL | undefined {
  return notExists(callOf(tx, bodies, "openInvocations"));
}

/** Bodies whose calls are gone. */
function isOfNone(tx: Tx, bodies: BodyTable): SQL | undefined {
  return and(isMade(tx, bodies), notExists(callOf(tx, bodies, "endedInvocations")));
}

/** The parts of large bodies from before this time, of all tenants in the order of time. */
async function removeParts(store: Store, before: string, condition: typeof isMade): Promise<void> {
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

function callOf({ db, tables }: Tx, bodies: BodyTable, table: "openInvocations" | "endedInvocations") {
  const calls = tables[table];
  return db.select({ id: calls.id }).from(calls).where(isOfCall(bodies, calls));
}

async function removeBodies(tx: Tx, { tenant, from, below }: KeyRange, condition: typeof isMade): Promise<void> {
  const { invocationBodies: t } = tx.tables;
  const old = and(eq(t.tenant, tenant), gte(t.invocation_id, from), lt(t.invocation_id, below));
  await tx.db.delete(t).where(and(old, condition(tx, t)));
}

/** A call stays while its payment does, which is removed when it is settled and past, and while it is owed a receipt. */
async function removeCalls(tx: Tx, range: KeyRange): Promise<void> {
  const { endedInvocations: t } = tx.tables;
  const { tenant, from, below } = range;
  const old = and(eq(t.tenant, tenant), gte(t.id, from), lt(t.id, below));
  const { agent_id, mode, status, model, error_class, settlement_status } = t;
  const gone = await tx.db
    .delete(t)
    .where(and(old, notExists(neededBy(tx, "payments")), notExists(neededBy(tx, "receiptsDue"))))
    .returning({ agent_id, mode, status, model, error_class, settlement_status });
  for (const row of gone) countEnded(tx, { tenant, ...row }, -1);
  // With their calls, since those of calls that stay do so too.
  await removeBodies(tx, range, isOfNone);
}

/**
 * What needs the record of a call: its payment, which is not settled yet or could be presented again, or an owed receipt,
 * which is made from it.
 */
function neededBy({ db, tables }: Tx, table: "payments" | "receiptsDue") {
  const t = tables[table];
  return db.select({ id: t.invocation_id }).from(t).where(isOfCall(t, tables.endedInvocations));
}

/** Keys that have expired. */
async function removeKeys(tx: Tx, before: number, limit: number): Promise<number> {
  const { idempotencyKeys: t } = tx.tables;
  const isOver = lt(t.expires_at, before);
  const old = tx.db
    .select({ tenant: t.tenant, caller: t.caller, agent_id: t.agent_id, key: t.key })
    .from(t)
    .where(isOver)
    .limit(limit);
  const rows = await tx.db
    .delete(t)
    .where(and(isOver, inArray(sql`(${t.tenant}, ${t.caller}, ${t.agent_id}, ${t.key})`, old)))
    .returning({ key: t.key });
  return rows.length;
}
