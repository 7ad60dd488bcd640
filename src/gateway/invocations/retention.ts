// Clean-up by age: captured bodies, whole records with their payments, and expired idempotency keys. Rows are removed in small
// groups, each in a write of its own, so that calls get through in between.
import { and, eq, gte, inArray, isNull, lt, notExists, type SQL } from "drizzle-orm";
import { OUTBOX_KINDS } from "../../../db/schema.ts";
import { idFloor } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import { type Clock, DAY_MS, HOUR_MS } from "../../core/time.ts";
import { deleteSome, type KeyRange, removeInGroups, removeRanges, tenantsIn } from "../../storage/cleanup.ts";
import { isOfCall, type Store, type Tx } from "../../storage/store.ts";
import { REMOVED_PARTS_AT_ONCE } from "./bodies.ts";
import { countEnded } from "./commands/end.ts";

export interface Retention {
  /** Both ages are in days; 0 keeps for ever. */
  readonly body_days: number;
  readonly history_days: number;
}

export async function cleanUp(store: Store, clock: Clock, retention: Retention, log: Log): Promise<void> {
  const now = clock.now();
  const { body_days, history_days } = retention;
  const { payments, endedInvocations, invocationBodies } = store.read.tables;
  if (history_days > 0) {
    const before = idFloor("inv", now - history_days * DAY_MS);
    for await (const tenant of tenantsIn(store.read, payments)) {
      await removeInGroups(store, (tx, limit) => removePayments(tx, tenant, before, now, limit));
    }
    await removeRanges(store, endedInvocations, endedInvocations.id, before, removeCalls);
    await removeParts(store, before, isWithoutCall);
  }
  if (body_days > 0) {
    const before = idFloor("inv", now - body_days * DAY_MS);
    await removeRanges(store, invocationBodies, invocationBodies.invocation_id, before, (tx, range) =>
      removeBodies(tx, range, isNotOpen),
    );
    await removeParts(store, before, isNotOpen);
  }
  // The hour allows for another replica's clock that is behind.
  await removeInGroups(store, (tx, limit) => removeKeys(tx, now - HOUR_MS, limit));
  log.debug("cleaned_up");
}

/**
 * Removes payments that are settled and can't be presented again, of calls that have ended. The caller of an open call needs
 * its payment to resume it, and the payment keeps the call's credential from being deleted.
 * @param before an ID floor
 */
async function removePayments(tx: Tx, tenant: string, before: string, now: number, limit: number): Promise<number> {
  const { payments: t, openInvocations: open } = tx.tables;
  const itsCall = tx.db.select({ id: open.id }).from(open).where(isOfCall(t, open));
  const isOver = and(isNull(t.next_attempt_at), lt(t.valid_before, Math.floor(now / 1000)), notExists(itsCall));
  const isOld = and(eq(t.tenant, tenant), lt(t.invocation_id, before));
  return deleteSome(tx, t, [t.tenant, t.invocation_id], and(isOld, isOver), limit);
}

type BodyTable = Tx["tables"]["invocationBodies"] | Tx["tables"]["bodyParts"];

/** Bodies whose calls are not open: an open call may still need its body. */
const isNotOpen = (tx: Tx, bodies: BodyTable): SQL | undefined => notExists(callOf(tx, bodies, "openInvocations"));

const isWithoutCall = (tx: Tx, bodies: BodyTable): SQL | undefined =>
  and(isNotOpen(tx, bodies), notExists(callOf(tx, bodies, "endedInvocations")));

/** Removes parts of large bodies, of all tenants in the order of time. @param before an ID floor */
async function removeParts(store: Store, before: string, condition: typeof isNotOpen): Promise<void> {
  const { bodyParts: t } = store.read.tables;
  const key = [t.invocation_id, t.kind, t.n] as const;
  const removeSome = (tx: Tx) =>
    deleteSome(tx, t, key, and(lt(t.invocation_id, before), condition(tx, t)), REMOVED_PARTS_AT_ONCE);
  while ((await store.write(removeSome)) === REMOVED_PARTS_AT_ONCE);
}

function callOf({ db, tables }: Tx, bodies: BodyTable, table: "openInvocations" | "endedInvocations") {
  const calls = tables[table];
  return db.select({ id: calls.id }).from(calls).where(isOfCall(bodies, calls));
}

async function removeBodies(tx: Tx, { tenant, from, below }: KeyRange, condition: typeof isNotOpen): Promise<void> {
  const { invocationBodies: t } = tx.tables;
  const old = and(eq(t.tenant, tenant), gte(t.invocation_id, from), lt(t.invocation_id, below));
  await tx.db.delete(t).where(and(old, condition(tx, t)));
}

/** Removes ended calls of a range, but for those whose payment is still stored or whose outbox is not empty. */
async function removeCalls(tx: Tx, range: KeyRange): Promise<void> {
  const { endedInvocations: t } = tx.tables;
  const { tenant, from, below } = range;
  const old = and(eq(t.tenant, tenant), gte(t.id, from), lt(t.id, below));
  const { agent_id, mode, status, model, error_class, settlement_status } = t;
  const gone = await tx.db
    .delete(t)
    .where(and(old, notExists(neededBy(tx, "payments")), notExists(neededBy(tx, "outbox"))))
    .returning({ agent_id, mode, status, model, error_class, settlement_status });
  for (const row of gone) countEnded(tx, { tenant, ...row }, -1);
  // Bodies go with their calls; the bodies of the calls that stay are kept.
  await removeBodies(tx, range, isWithoutCall);
}

/** The rows that need the record of a call: its payment, or its outbox, whose consumers read the record. */
function neededBy({ db, tables }: Tx, table: "payments" | "outbox") {
  const t = tables[table];
  // The key of the outbox begins with the kind.
  const ofKind = table === "outbox" ? inArray(tables.outbox.kind, OUTBOX_KINDS) : undefined;
  const isOfEndedCall = and(ofKind, isOfCall(t, tables.endedInvocations));
  return db.select({ id: t.invocation_id }).from(t).where(isOfEndedCall);
}

async function removeKeys(tx: Tx, before: number, limit: number): Promise<number> {
  const { idempotencyKeys: t } = tx.tables;
  return deleteSome(tx, t, [t.tenant, t.caller, t.agent_id, t.key], lt(t.expires_at, before), limit);
}
