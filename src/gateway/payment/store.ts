// The payments of calls in the database: recorded with their invocation, leased for each attempt to settle them, and
// closed with the write that records the outcome. Only the look-up by the payment's key has no tenant, since on chain
// an authorization can be used once by anyone.
import { and, asc, eq, exists, gt, isNotNull, isNull, lte, notExists, notInArray, type SQL, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Call } from "../../core/call.ts";
import { isEnded } from "../../core/states.ts";
import { bind, GIVEN_KEY, isOfCall, prepared, type Reader, type Store, type Tx } from "../../storage/store.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { usedAtInTurns } from "../credentials/service.ts";
import { type InvocationKey, invocationByKey, refuseSettlement } from "../invocations/service.ts";
import { askedMs, type SettleOutcome } from "./outcome.ts";

export type PaymentRow = Tables["payments"]["$inferSelect"];

/** A payment whose settlement is not over. */
export interface OpenPayment extends PaymentRow {
  readonly facilitator_url: string;
  readonly facilitator_credential_ref: string;
  readonly settle_request: string;
}

export function isOpen(row: PaymentRow): row is OpenPayment {
  const { facilitator_url, facilitator_credential_ref, settle_request } = row;
  return facilitator_url !== null && facilitator_credential_ref !== null && settle_request !== null;
}

function isKey({ payments: t }: Tables, key: PaymentKey) {
  return and(eq(t.chain_id, key.chain_id), eq(t.token, key.token), eq(t.payer, key.payer), eq(t.nonce, key.nonce));
}

const byKey = prepared(({ db, tables: { payments: t } }: Reader) => {
  const isChain = and(eq(t.chain_id, bind(t.chain_id, "chain_id")), eq(t.token, bind(t.token, "token")));
  const isPayment = and(eq(t.payer, bind(t.payer, "payer")), eq(t.nonce, bind(t.nonce, "nonce")));
  return db.select().from(t).where(and(isChain, isPayment));
});

const byInvocation = prepared(({ db, tables: { payments: t } }: Reader) => {
  return db.select().from(t).where(isOfCall(t, GIVEN_KEY));
});

/** The payment of any tenant: compare it with the caller's before anything of it is shown. */
export async function paymentByKey(reader: Reader, key: PaymentKey): Promise<PaymentRow | null> {
  const [row] = await byKey(reader).execute({ ...key });
  return row ?? null;
}

export async function paymentOf(reader: Reader, tenant: string, id: string): Promise<PaymentRow | null> {
  const [row] = await byInvocation(reader).execute({ tenant, id });
  return row ?? null;
}

/** @throws UniqueViolation when the authorization has been used here before */
export async function insertPayment(tx: Tx, row: PaymentRow): Promise<void> {
  await tx.db.insert(tx.tables.payments).values(row);
}

/**
 * Every tenant with an open payment once, one read for each, with when its first one is due: those after `last` by name, and
 * then the others.
 */
export async function* tenantsWithOpen(reader: Reader, last: string) {
  yield* tenantsBetween(reader, last, null);
  if (last !== "") yield* tenantsBetween(reader, "", last);
}

/** Names are in the database's order, which differs from that of strings here. */
async function* tenantsBetween(reader: Reader, after: string, upTo: string | null) {
  const { payments: t } = reader.tables;
  const isUpTo = upTo === null ? undefined : lte(t.tenant, upTo);
  for (let tenant = after; ; ) {
    const [row] = await reader.db
      .select({ tenant: t.tenant, next_attempt_at: t.next_attempt_at })
      .from(t)
      .where(and(isNotNull(t.next_attempt_at), gt(t.tenant, tenant), isUpTo))
      // The first of the next tenant is the one that is due first.
      .orderBy(asc(t.tenant), asc(t.next_attempt_at))
      .limit(1);
    if (row === undefined || row.next_attempt_at === null) return;
    tenant = row.tenant;
    yield { tenant, due_at: row.next_attempt_at };
  }
}

/** @param passedOver facilitators whose payments are left out */
export async function dueOf(
  reader: Reader,
  tenant: string,
  now: number,
  limit: number,
  passedOver: readonly string[] = [],
): Promise<OpenPayment[]> {
  const { payments: t } = reader.tables;
  const isDue = and(eq(t.tenant, tenant), isNotNull(t.next_attempt_at), lte(t.next_attempt_at, now));
  const isElsewhere = passedOver.length === 0 ? undefined : notInArray(t.facilitator_url, [...passedOver]);
  const found = reader.db.select().from(t).where(and(isDue, isElsewhere));
  return (await found.orderBy(asc(t.next_attempt_at)).limit(limit)).filter(isOpen);
}

/**
 * Takes a due payment for another attempt; null when another replica was faster, or its call was refused. An attempt
 * before this one that left no outcome counts as unknown, even if its process died.
 */
export async function lease(tx: Tx, seen: OpenPayment, now: number, until: number): Promise<OpenPayment | null> {
  const { payments: t } = tx.tables;
  // By the row as it is now: an attempt that was paused may have marked it since it was read.
  const unknown_since = sql`case when ${t.sent_at} is null then ${t.unknown_since} else coalesce(${t.unknown_since}, ${now}) end`;
  const [row] = await tx.db
    .update(t)
    .set({
      attempts: seen.attempts + 1,
      unknown_since,
      asked_ms: askedMs(seen, now),
      next_attempt_at: until,
      updated_at: now,
    })
    .where(and(isOwnAttempt(tx, seen), isDueAt(tx, seen.next_attempt_at ?? now), notExists(refusal(tx))))
    .returning();
  return row !== undefined && isOpen(row) ? row : null;
}

/** The note that a call was refused: see invocations/lost-commits.ts. */
function refusal({ db, tables: { payments: t, refusedCalls: r } }: Tx) {
  return db.select({ id: r.id }).from(r).where(isOfCall(t, r));
}

/**
 * The attempt has left no certain outcome.
 *
 * @returns false when the outcome is known, or another replica has taken the payment for an attempt of its own since
 */
export async function postpone(
  tx: Tx,
  open: OpenPayment,
  { at, now, outcome }: { readonly at: number; readonly now: number; readonly outcome: SettleOutcome["kind"] },
): Promise<boolean> {
  const asked_ms = askedMs(open, now);
  return changed(tx, isOwnAttempt(tx, open), {
    next_attempt_at: at,
    asked_ms: outcome === "deferred" ? Math.max(asked_ms, 1) : asked_ms,
    updated_at: now,
    ...(outcome === "unsent" || outcome === "deferred"
      ? { unsent_attempts: open.unsent_attempts + 1, sent_at: open.sent_at }
      : { sent_at: open.sent_at ?? now, unknown_since: open.unknown_since ?? now }),
  });
}

/**
 * The outcome is known. False when it was before.
 *
 * @param finalInMs null when nothing is left to ask; then nothing of what was signed is kept
 */
export async function closeCollected(tx: Tx, open: OpenPayment, now: number, finalInMs: number | null) {
  const left = finalInMs === null ? closing(now) : { next_attempt_at: now + finalInMs, updated_at: now };
  return changed(tx, isThis(tx.tables, open), { ...left, final_at: now + (finalInMs ?? 0) });
}

/** Whether the payment has been collected, and is asked about once more before that is final. */
export const isConfirming = ({ final_at }: PaymentRow): boolean => final_at !== null;

/**
 * A collected payment is final, or is asked about again at `again`. False when another replica has asked since, or has
 * closed it.
 */
export function confirmPayment(tx: Tx, open: OpenPayment, now: number, again: number | null = null): Promise<boolean> {
  const changes = again === null ? closing(now) : { next_attempt_at: again, updated_at: now };
  return changedAny(tx, isOwnAttempt(tx, open), changes);
}

/** The calls of a tenant that have ended, and whose receipt waits until their payment is final. */
export async function confirmingOf(
  { db, tables: { payments: t, endedInvocations: i } }: Reader,
  tenant: string,
  id: string | null,
  limit: number,
): Promise<OpenPayment[]> {
  const rows = await db
    .select({ payment: t })
    .from(t)
    .innerJoin(i, isOfCall(t, i))
    .where(
      and(
        eq(t.tenant, tenant),
        id === null ? undefined : eq(t.invocation_id, id),
        isNotNull(t.next_attempt_at),
        isNotNull(t.final_at),
        sql`' ' || ${i.outbox} || ' ' like '% receipt %'`,
      ),
    )
    .limit(limit);
  return rows.map(({ payment }) => payment).filter(isOpen);
}

/** Also false while another replica makes an attempt of its own, since that one may still collect it. */
export async function closeRefused(tx: Tx, open: OpenPayment, now: number): Promise<boolean> {
  return changed(tx, isOwnAttempt(tx, open), closing(now));
}

function closing(now: number) {
  return { settle_request: null, next_attempt_at: null, updated_at: now };
}

function isOwnAttempt({ tables }: Tx, open: OpenPayment) {
  return and(isThis(tables, open), eq(tables.payments.attempts, open.attempts));
}

/** Matches the call too: after a refusal the same authorization may have come again for another call. */
function isThis(tables: Tables, open: OpenPayment) {
  return and(
    isKey(tables, open),
    eq(tables.payments.tenant, open.tenant),
    eq(tables.payments.invocation_id, open.invocation_id),
  );
}

/**
 * From here on the payment may leave. False when it must not: another replica has taken it over, or its call has ended
 * before anything had left.
 */
export async function mayLeave(tx: Tx, open: OpenPayment, now: number): Promise<boolean> {
  const isWanted = open.sent_at === null ? exists(unended(tx)) : undefined;
  return changed(tx, and(isOwnAttempt(tx, open), isWanted), { sent_at: open.sent_at ?? now });
}

function unended({ db, tables: { payments: t, openInvocations: i } }: Tx) {
  const isIts = and(isOfCall(t, i), eq(i.status, "pending"));
  return db.select({ id: i.id }).from(i).where(isIts);
}

// A payment that is changed is found by its key. Said of the bare column, these two would offer the partial indexes of all
// open payments, which seem as good until the table is analysed: then one change reads every open payment of the tenant.

function isDueAt({ tables: { payments: t } }: Tx, time: number): SQL {
  return sql`coalesce(${t.next_attempt_at}, 0) = ${time}`;
}

function isOpenStill({ tables: { payments: t } }: Tx): SQL {
  return sql`coalesce(${t.next_attempt_at}, 0) <> 0`;
}

type PaymentChanges = Parameters<ReturnType<Tx["db"]["update"]>["set"]>[0];

/** Changes a payment whose outcome is not known. */
async function changed(tx: Tx, condition: SQL | undefined, changes: PaymentChanges): Promise<boolean> {
  return changedAny(tx, and(condition, isNull(tx.tables.payments.final_at)), changes);
}

async function changedAny(tx: Tx, condition: SQL | undefined, changes: PaymentChanges): Promise<boolean> {
  const { payments: t } = tx.tables;
  const rows = await tx.db
    .update(t)
    .set(changes)
    .where(and(condition, isOpenStill(tx)))
    .returning({ attempts: t.attempts });
  return rows.length > 0;
}

/**
 * Makes payments due now whose next attempt is later than `after`. A process that is the only one does this for all at
 * its start. Later it is for attempts beyond any pause and lease, which only a clock that was set back can cause.
 */
export async function makeDue(store: Store, now: number, after: number): Promise<void> {
  const { payments: t } = store.read.tables;
  const isLater = and(isNotNull(t.next_attempt_at), gt(t.next_attempt_at, after));
  const [later] = await store.read.db.select({ nonce: t.nonce }).from(t).where(isLater).limit(1);
  if (later === undefined) return;
  await store.write(async (tx) => {
    await tx.db.update(t).set({ next_attempt_at: now }).where(isLater);
  });
}

/**
 * Closes the payment of a call that ended before anything of the payment was sent: it is never sent. In the write that ends
 * the call, or later. False when the payment may have left: then it stays open.
 */
export async function closeIfUnsent(tx: Tx, key: InvocationKey, now: number): Promise<boolean> {
  const { payments: t } = tx.tables;
  const [closed] = await tx.db
    .update(t)
    .set(closing(now))
    .where(and(isOfCall(t, key), isOpenStill(tx), isNull(t.sent_at), isNull(t.final_at)))
    .returning({ attempts: t.attempts });
  if (closed === undefined) return false;
  await refuseSettlement(tx, key, JSON.stringify({ attempts: closed.attempts, reason: "cancelled" }), now);
  return true;
}

/** Takes a due payment for another attempt, like `lease`. If its call has ended and nothing was sent, it is closed. */
export async function leaseUnlessOver(tx: Tx, seen: OpenPayment, now: number, until: number) {
  const key = { tenant: seen.tenant, id: seen.invocation_id };
  const call = seen.sent_at === null ? await invocationByKey(tx, key) : null;
  const isOver = call !== null && isEnded(call.status) && (await closeIfUnsent(tx, key, now));
  return isOver ? null : lease(tx, seen, now, until);
}

// Paid calls that are still to be made and need a credential. Their callers paid because the calls can be made, so until
// then the credential is neither deleted nor kept from their hosts.

export async function paidCallNamesCredential(reader: Reader, tenant: string, id: string): Promise<boolean> {
  const { payments: t } = reader.tables;
  const isIts = and(eq(t.tenant, tenant), eq(t.call_credential_ref, id));
  return (await reader.db.select({ nonce: t.nonce }).from(t).where(isIts).limit(1)).length > 0;
}

/** What of them goes to a URL that is not allowed, for its tenant; null when nothing does. */
export const paidCallShutOut = usedAtInTurns({
  pageAfter: ({ db, tables: { payments: t, openInvocations: open } }, { tenant, credentialId }, after, limit) =>
    db
      .select({ id: t.invocation_id, call: open.call })
      .from(t)
      .innerJoin(open, isOfCall(t, open))
      .where(and(eq(t.tenant, tenant), eq(t.call_credential_ref, credentialId), gt(t.invocation_id, after)))
      .orderBy(t.invocation_id)
      .limit(limit),
  urlOf: ({ call }) => (JSON.parse(call) as Call).url,
  nameOf: ({ id }) => `a paid call that is still to be made (${id})`,
});
