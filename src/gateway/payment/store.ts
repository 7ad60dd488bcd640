// The payments of calls in the database: recorded with their invocation, leased for each attempt to settle them, and closed
// in the write that records the outcome. Only the look-up by the payment's key spans tenants, since an authorization can be
// used only once on chain, for one tenant among all.
import { and, eq, exists, gt, isNotNull, isNull, lte, notExists, type SQL, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Call } from "../../core/call.ts";
import { isEnded } from "../../core/states.ts";
import { inStoreTurns } from "../../kernel/turns.ts";
import { bind, GIVEN_KEY, isOfCall, preparedRow, type Reader, type Store, type Tx } from "../../storage/store.ts";
import type { CredentialUses } from "../credentials/service.ts";
import { type InvocationKey, invocationByKey, refuseSettlement } from "../invocations/service.ts";
import { askedMs, type SettleOutcome } from "./outcome.ts";

export type PaymentRow = Tables["payments"]["$inferSelect"];

export interface OpenPayment extends PaymentRow {
  readonly facilitator_url: string;
  readonly facilitator_credential_ref: string;
  readonly settle_request: string;
}

export function isOpen(row: PaymentRow): row is OpenPayment {
  const { facilitator_url, facilitator_credential_ref, settle_request } = row;
  return facilitator_url !== null && facilitator_credential_ref !== null && settle_request !== null;
}

/**
 * The start of a facilitator's URL, which tells one from another: it holds the whole host, and fits into a row of an index.
 * Written as in the indexes, with its numbers, so that they are used.
 */
export const facilitatorOf = ({ facilitator_url }: Tables["payments"]) =>
  sql<string>`substr(${facilitator_url}, 1, 300)`;
/** As `facilitatorOf` names it. */
export const facilitatorNameOf = ({ facilitator_url }: OpenPayment): string => facilitator_url.slice(0, 300);

/** A payment of any tenant: compare its tenant and caller before anything of it is shown. */
export const paymentByKey = preparedRow(({ db, tables: { payments: t } }) => {
  const isChain = and(eq(t.chain_id, bind(t.chain_id, "chain_id")), eq(t.token, bind(t.token, "token")));
  const isPayment = and(eq(t.payer, bind(t.payer, "payer")), eq(t.nonce, bind(t.nonce, "nonce")));
  return db.select().from(t).where(and(isChain, isPayment));
});

export const paymentOf = preparedRow(({ db, tables: { payments: t } }) =>
  db.select().from(t).where(isOfCall(t, GIVEN_KEY)),
);

/** @throws UniqueViolation when the authorization has been used here before */
export async function insertPayment(tx: Tx, row: PaymentRow): Promise<void> {
  await tx.db.insert(tx.tables.payments).values(row);
}

/** No tenant has this name, so the settler gets its turn whatever tenants ask for. */
const SETTLER = "";

const nextTenant = preparedRow(({ db, tables: { payments: t } }) =>
  db
    .select({ tenant: t.tenant })
    .from(t)
    .where(and(isNotNull(t.next_attempt_at), gt(t.tenant, GIVEN_KEY.tenant)))
    .orderBy(t.tenant, facilitatorOf(t))
    .limit(1),
);

const nextFacilitator = preparedRow(({ db, tables: { payments: t } }) => {
  const facilitator = facilitatorOf(t);
  const isLater = and(eq(t.tenant, GIVEN_KEY.tenant), gt(facilitator, sql.placeholder("after")));
  return db
    .select({ tenant: t.tenant, facilitator, due_at: t.next_attempt_at })
    .from(t)
    .where(and(isNotNull(t.next_attempt_at), isLater))
    .orderBy(facilitator, t.next_attempt_at)
    .limit(1);
});

/** Yields what `next` finds after the name `last`, then starts over from the first name. Names are in the database's order. */
async function* around<T>(last: string, next: (after: string) => Promise<T | null>, nameOf: (found: T) => string) {
  let first: string | undefined;
  for (const start of new Set([last, ""])) {
    let found = await next(start);
    while (found !== null && nameOf(found) !== first) {
      first ??= nameOf(found);
      yield found;
      found = await next(nameOf(found));
    }
  }
}

/** Each tenant with an open payment, from the one after `last` on. */
export function tenantsWithOpen(reader: Reader, last: string) {
  const next = (tenant: string) => nextTenant(reader, { tenant });
  return around(last, next, ({ tenant }) => tenant);
}

/**
 * The facilitators of a tenant's open payments from the one after `last` on, each with the time at which its first payment is
 * due. Found in a turn of the event loop: the settler asks for those of one tenant after the other.
 */
export function facilitatorsWithOpen(reader: Reader, tenant: string, last: string, limit: number) {
  const next = (after: string) => nextFacilitator(reader, { tenant, after });
  return inStoreTurns(SETTLER, async () => {
    const found: OpenFacilitator[] = [];
    for await (const each of around(last, next, ({ facilitator }) => facilitator)) {
      if (found.push(each) === limit) break;
    }
    return found;
  });
}

export type OpenFacilitator = Awaited<ReturnType<typeof nextFacilitator>> & object;

type AtFacilitator = Pick<OpenFacilitator, "tenant" | "facilitator">;

const isAt = (t: Tables["payments"], { tenant, facilitator }: AtFacilitator) =>
  and(eq(t.tenant, tenant), eq(facilitatorOf(t), facilitator));

/** The tenant's due payments at a facilitator, earliest first. */
export async function dueOf(reader: Reader, at: AtFacilitator, now: number, limit: number): Promise<OpenPayment[]> {
  const { payments: t } = reader.tables;
  const isDue = and(isAt(t, at), isNotNull(t.next_attempt_at), lte(t.next_attempt_at, now));
  const due = () => reader.db.select().from(t).where(isDue).orderBy(t.next_attempt_at).limit(limit);
  return (await inStoreTurns(SETTLER, async () => due())).filter(isOpen);
}

/**
 * Leases a due payment for another attempt; null when another replica was faster, or the call was refused. An earlier attempt
 * that recorded no outcome counts as unknown, even if its process died.
 */
export async function lease(tx: Tx, seen: OpenPayment, now: number, until: number): Promise<OpenPayment | null> {
  const { payments: t, refusedCalls: r } = tx.tables;
  // Computed from the current row: an attempt that was held up may have set `sent_at` since `seen` was read.
  const unknown_since = sql`case when ${t.sent_at} is null then ${t.unknown_since} else coalesce(${t.unknown_since}, ${now}) end`;
  // The record that a call was refused: see invocations/lost-commits.ts.
  const refusal = tx.db.select({ id: r.id }).from(r).where(isOfCall(t, r));
  const [row] = await tx.db
    .update(t)
    .set({
      attempts: seen.attempts + 1,
      unknown_since,
      asked_ms: askedMs(seen, now),
      next_attempt_at: until,
      updated_at: now,
    })
    .where(and(isOwnAttempt(tx, seen), isDueAt(tx, seen.next_attempt_at ?? now), notExists(refusal)))
    .returning();
  return row !== undefined && isOpen(row) ? row : null;
}

/** Schedules the next attempt. @returns false when the outcome is known by now, or another replica has the lease */
export async function postpone(
  tx: Tx,
  open: OpenPayment,
  { at, now, outcome }: { readonly at: number; readonly now: number; readonly outcome: SettleOutcome["kind"] },
): Promise<boolean> {
  const asked_ms = askedMs(open, now);
  return updateUndecided(tx, isOwnAttempt(tx, open), {
    next_attempt_at: at,
    asked_ms: outcome === "deferred" ? Math.max(asked_ms, 1) : asked_ms,
    updated_at: now,
    ...(outcome === "unsent" || outcome === "deferred"
      ? { unsent_attempts: open.unsent_attempts + 1, sent_at: open.sent_at }
      : { sent_at: open.sent_at ?? now, unknown_since: open.unknown_since ?? now }),
  });
}

/** Records that the payment was collected; false if its outcome was known. @param finalInMs null for no confirmation */
export async function closeCollected(tx: Tx, open: OpenPayment, now: number, finalInMs: number | null) {
  const left = finalInMs === null ? closedFields(now) : { next_attempt_at: now + finalInMs, updated_at: now };
  return updateUndecided(tx, isSamePayment(tx.tables, open), { ...left, final_at: now + (finalInMs ?? 0) });
}

/** Whether the payment has been collected, and awaits the confirmation that makes this final. */
export const isConfirming = ({ final_at }: PaymentRow): boolean => final_at !== null;

/** Closes a collected payment as final, or schedules a confirmation at `again`. False if another replica leased or closed it. */
export function confirmPayment(tx: Tx, open: OpenPayment, now: number, again: number | null = null): Promise<boolean> {
  const changes = again === null ? closedFields(now) : { next_attempt_at: again, updated_at: now };
  return updateOpen(tx, isOwnAttempt(tx, open), changes);
}

/** The tenant's collected payments of ended calls whose receipts wait until the payment is final. */
export async function confirmingOf(reader: Reader, tenant: string, id: string | null, limit: number) {
  const { payments: t, endedInvocations: i } = reader.tables;
  /** A page of those that await their confirmation, each with the outbox of its call, if that has ended. */
  async function pageAfter(after: string) {
    const isNext = and(gt(t.invocation_id, after), id === null ? undefined : eq(t.invocation_id, id));
    return reader.db
      .select({ payment: t, outbox: i.outbox })
      .from(t)
      .leftJoin(i, isOfCall(t, i))
      .where(and(eq(t.tenant, tenant), isNext, isNotNull(t.next_attempt_at), isNotNull(t.final_at)))
      .orderBy(t.invocation_id)
      .limit(limit);
  }
  const found: OpenPayment[] = [];
  for (let after = ""; ; ) {
    const from = after;
    const page = await inStoreTurns(tenant, () => pageAfter(from));
    const waiting = page.filter(({ outbox }) => ` ${outbox} `.includes(" receipt "));
    found.push(...waiting.map(({ payment }) => payment).filter(isOpen));
    if (page.length < limit || found.length >= limit) return found.slice(0, limit);
    after = page.at(-1)?.payment.invocation_id ?? "";
  }
}

/** Closes a payment as refused. False if it is closed, or leased by another replica, whose attempt may still collect it. */
export const closeRefused = async (tx: Tx, open: OpenPayment, now: number): Promise<boolean> =>
  updateUndecided(tx, isOwnAttempt(tx, open), closedFields(now));

const closedFields = (now: number) => ({ settle_request: null, next_attempt_at: null, updated_at: now });

const isOwnAttempt = ({ tables }: Tx, open: OpenPayment) =>
  and(isSamePayment(tables, open), eq(tables.payments.attempts, open.attempts));

/** Matches the call too: after a refusal the same authorization may have been presented for another call. */
function isSamePayment({ payments: t }: Tables, open: OpenPayment) {
  const { chain_id, token, payer, nonce, tenant, invocation_id } = open;
  const isKey = and(eq(t.chain_id, chain_id), eq(t.token, token), eq(t.payer, payer), eq(t.nonce, nonce));
  return and(isKey, eq(t.tenant, tenant), eq(t.invocation_id, invocation_id));
}

/** Records that the payment is sent from now on. False if it was leased elsewhere, or if its call ended before any sending. */
export async function markSending(tx: Tx, open: OpenPayment, now: number): Promise<boolean> {
  const { payments: t, openInvocations: i } = tx.tables;
  const pendingCall = tx.db
    .select({ id: i.id })
    .from(i)
    .where(and(isOfCall(t, i), eq(i.status, "pending")));
  const isWanted = open.sent_at === null ? exists(pendingCall) : undefined;
  return updateUndecided(tx, and(isOwnAttempt(tx, open), isWanted), { sent_at: open.sent_at ?? now });
}

// An update finds its payment by the key. On the bare column, these two conditions would let the planner use a partial index of
// open payments, which looks as good until the table is analysed: one update then reads every open payment of the tenant.

const isDueAt = ({ tables: { payments: t } }: Tx, time: number) => sql`coalesce(${t.next_attempt_at}, 0) = ${time}`;

const isOpenStill = ({ tables: { payments: t } }: Tx): SQL => sql`coalesce(${t.next_attempt_at}, 0) <> 0`;

type PaymentChanges = Parameters<ReturnType<Tx["db"]["update"]>["set"]>[0];

/** Updates an open payment whose outcome is not known. */
const updateUndecided = async (tx: Tx, condition: SQL | undefined, changes: PaymentChanges): Promise<boolean> =>
  updateOpen(tx, and(condition, isNull(tx.tables.payments.final_at)), changes);

async function updateOpen(tx: Tx, condition: SQL | undefined, changes: PaymentChanges): Promise<boolean> {
  const { payments: t } = tx.tables;
  const rows = await tx.db
    .update(t)
    .set(changes)
    .where(and(condition, isOpenStill(tx)))
    .returning({ attempts: t.attempts });
  return rows.length > 0;
}

/**
 * Makes payments due now whose next attempt is later than `after`. A process that is alone with its database does this for
 * all at its start. Later it repairs attempts beyond any backoff or lease, which only a clock that was set back can cause.
 */
export async function makeDue(store: Store, now: number, after: number, at?: AtFacilitator): Promise<void> {
  const { payments: t } = store.read.tables;
  const isAnywhere = at === undefined ? undefined : isAt(t, at);
  const isLater = and(isAnywhere, isNotNull(t.next_attempt_at), gt(t.next_attempt_at, after));
  const [later] = await store.read.db.select({ nonce: t.nonce }).from(t).where(isLater).limit(1);
  if (later === undefined) return;
  await store.write(async (tx) => {
    await tx.db.update(t).set({ next_attempt_at: now }).where(isLater);
  });
}

/** Closes the unsent payment of a call that ends, in that write or later, so it is never sent. False if it may have been. */
export async function closeIfUnsent(tx: Tx, key: InvocationKey, now: number): Promise<boolean> {
  const { payments: t } = tx.tables;
  const [closed] = await tx.db
    .update(t)
    .set(closedFields(now))
    .where(and(isOfCall(t, key), isOpenStill(tx), isNull(t.sent_at), isNull(t.final_at)))
    .returning({ attempts: t.attempts });
  if (closed === undefined) return false;
  await refuseSettlement(tx, key, JSON.stringify({ attempts: closed.attempts, reason: "cancelled" }), now);
  return true;
}

/** Leases a due payment as `lease` does, but closes it instead if its call has ended and nothing was sent. */
export async function leaseUnlessOver(tx: Tx, seen: OpenPayment, now: number, until: number) {
  const key = { tenant: seen.tenant, id: seen.invocation_id };
  const call = seen.sent_at === null ? await invocationByKey(tx, key) : null;
  const isOver = call !== null && isEnded(call.status) && (await closeIfUnsent(tx, key, now));
  return isOver ? null : lease(tx, seen, now, until);
}

// Paid calls that are still to be made with a credential. Their callers have paid for them, so until then the credential can
// neither be deleted nor be forbidden to go to their hosts.

/** A call that is being moved to the ended calls is no longer among the open ones, so it has no URL. */
export const paidCallsOfCredential: CredentialUses = async (reader, { tenant, credentialId }, after, limit) => {
  const { payments: t, openInvocations: open } = reader.tables;
  const found = await reader.db
    .select({ id: t.invocation_id, call: open.call })
    .from(t)
    .leftJoin(open, isOfCall(t, open))
    .where(and(eq(t.tenant, tenant), eq(t.call_credential_ref, credentialId), gt(t.invocation_id, after)))
    .orderBy(t.invocation_id)
    .limit(limit);
  const urlOf = (call: string) => (JSON.parse(call) as Call).url;
  return found.map(({ id, call }) => {
    return { id, url: call === null ? null : urlOf(call), name: `a paid call that is still to be made (${id})` };
  });
};
