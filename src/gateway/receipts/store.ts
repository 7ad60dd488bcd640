// Receipts in the database: the calls for which a receipt is due, the head of each tenant's chain, and the receipts in the
// order of the chain. One write stores a receipt, moves the head and removes the due entry.
import { and, asc, eq, gte, lte, sql } from "drizzle-orm";
import { oneOf, type Tables } from "../../../db/schema.ts";
import { idFloor } from "../../core/id.ts";
import { type Clock, DAY_MS } from "../../core/time.ts";
import { nextTenant, removeInGroups, tenantsIn } from "../../storage/cleanup.ts";
import { GIVEN_KEY, isOfCall, preparedRow, type Reader, type Store, type Tx } from "../../storage/store.ts";
import type { InvocationRow } from "../invocations/service.ts";
import { linkOf } from "./claims.ts";

export type ReceiptRow = Tables["receipts"]["$inferSelect"];

/** The newest receipt of a tenant; null before the first. */
export type ChainHead = Pick<Tables["receiptChains"]["$inferSelect"], "sequence" | "sha256"> | null;

export const chainHeadOf = preparedRow(({ db, tables: { receiptChains: t } }) =>
  db.select({ sequence: t.sequence, sha256: t.sha256 }).from(t).where(eq(t.tenant, GIVEN_KEY.tenant)),
);

export const findReceipt = preparedRow(({ db, tables: { receipts: t } }) =>
  db.select({ jws: t.jws }).from(t).where(isOfCall(t, GIVEN_KEY)),
);

const isReceipt = ({ tables }: Reader) => eq(tables.outbox.kind, "receipt");

/** The next tenants with due receipts, whose names come after `after`. Takes one index seek per tenant. */
export async function tenantsDue(reader: Reader, after: string, limit: number): Promise<string[]> {
  const tenants: string[] = [];
  while (tenants.length < limit) {
    const tenant = await nextTenant(reader, reader.tables.outbox, tenants.at(-1) ?? after, isReceipt(reader));
    if (tenant === null) break;
    tenants.push(tenant);
  }
  return tenants;
}

export async function isDue(reader: Reader, tenant: string, id: string): Promise<boolean> {
  const { outbox: t } = reader.tables;
  const isReceiptOfCall = and(isReceipt(reader), isOfCall(t, { tenant, id }));
  const rows = await reader.db.select({ id: t.invocation_id }).from(t).where(isReceiptOfCall);
  return rows.length > 0;
}

/** The invocations of a tenant for which receipts are due, oldest first. */
export async function receiptsDueOf(reader: Reader, tenant: string, limit: number): Promise<InvocationRow[]> {
  const { outbox: due, invocations: t } = reader.tables;
  const oldest = await reader.db
    .select({ id: due.invocation_id })
    .from(due)
    // Postgres takes two equalities for so rare that it would sort all of a tenant's rows until the table is analysed.
    .where(sql`(${due.kind}, ${due.tenant}) between ('receipt', ${tenant}) and ('receipt', ${tenant})`)
    .orderBy(asc(due.kind), asc(due.tenant), asc(due.invocation_id))
    .limit(limit);
  if (oldest.length === 0) return [];
  const ids = oldest.map(({ id }) => id);
  return await reader.db
    .select()
    .from(t)
    .where(and(eq(t.tenant, tenant), oneOf(t.id, ids)))
    .orderBy(asc(t.id));
}

/** Appends receipts. False, with no change, when the chain has grown. @param after its head when they were signed */
export async function append(tx: Tx, tenant: string, after: ChainHead, receipts: readonly ReceiptRow[]) {
  const last = receipts.at(-1);
  if (last === undefined) return false;
  const head = { sequence: last.sequence, sha256: linkOf(last.jws) };
  const { receiptChains: chains, outbox: due, receipts: t } = tx.tables;
  const moved =
    after === null
      ? await tx.db
          .insert(chains)
          .values({ tenant, ...head })
          .onConflictDoNothing()
          .returning({ sequence: chains.sequence })
      : await tx.db
          .update(chains)
          .set(head)
          .where(and(eq(chains.tenant, tenant), eq(chains.sequence, after.sequence)))
          .returning({ sequence: chains.sequence });
  if (moved.length === 0) return false;
  await tx.db.insert(t).values([...receipts]);
  const made = receipts.map(({ invocation_id }) => invocation_id);
  await tx.db.delete(due).where(and(isReceipt(tx), eq(due.tenant, tenant), oneOf(due.invocation_id, made)));
  return true;
}

/** A page of receipts, oldest first. The sequence of a chain has no gaps, so a page costs the same at any offset. */
export async function receiptPage(
  reader: Reader,
  tenant: string,
  { limit, offset }: { readonly limit: number; readonly offset: number },
): Promise<string[]> {
  const { receipts: t } = reader.tables;
  const [first] = await reader.db
    .select({ sequence: t.sequence })
    .from(t)
    .where(eq(t.tenant, tenant))
    .orderBy(asc(t.sequence))
    .limit(1);
  if (first === undefined) return [];
  const rows = await reader.db
    .select({ jws: t.jws })
    .from(t)
    .where(and(eq(t.tenant, tenant), gte(t.sequence, first.sequence + offset)))
    .orderBy(asc(t.sequence))
    .limit(limit);
  return rows.map(({ jws }) => jws);
}

/** Removes receipts older than `days` (0 keeps all), a chain's oldest first, so without a gap. Returns their number. */
export async function removeOldReceipts(store: Store, clock: Clock, days: number): Promise<number> {
  if (days === 0) return 0;
  const before = idFloor("rcpt", clock.now() - days * DAY_MS);
  let removed = 0;
  for await (const tenant of tenantsIn(store.read, store.read.tables.receiptChains)) {
    removed += await removeInGroups(store, (tx, limit) => removeSome(tx, tenant, before, limit));
  }
  return removed;
}

async function removeSome(tx: Tx, tenant: string, before: string, limit: number): Promise<number> {
  const { receipts: t } = tx.tables;
  const oldest = await tx.db
    .select({ id: t.id, sequence: t.sequence })
    .from(t)
    .where(eq(t.tenant, tenant))
    .orderBy(asc(t.sequence))
    .limit(limit);
  const kept = oldest.findIndex(({ id }) => id >= before);
  const old = kept === -1 ? oldest : oldest.slice(0, kept);
  const last = old.at(-1);
  if (last === undefined) return 0;
  await tx.db.delete(t).where(and(eq(t.tenant, tenant), lte(t.sequence, last.sequence)));
  return old.length;
}
