// Calls that were refused because nobody could say whether their record was stored: the answer of the commit was lost
// or late, and the record may appear at any time. Their caller was told that they were not taken, so they must not be
// made. A note of each is kept apart: no call with a note is claimed, no payment of one is attempted, and its record
// is removed with all that hangs on it, as if the write had never been, so that the same key or payment can be sent
// again.
import { and, eq, inArray, isNull, lte, or, sql } from "drizzle-orm";
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { within } from "../../storage/deadline.ts";
import { untilStored } from "../../storage/persist.ts";
import { removeInGroups } from "../../storage/removal.ts";
import { prepared, type Reader, type Store, type Tx } from "../../storage/store.ts";
import { countWhole } from "./counters.ts";
import { freeIdempotencyKey } from "./idempotency.ts";
import type { InvocationKey } from "./service.ts";

/** What is left of the ten seconds in which a caller is answered, when a write has used up its own time. */
const DECIDE_MS_MAX = 700;
const PAUSE_MS_MOST = 500;
/** A commit that waits for a standby which is away can be as late as that is back. */
const NOTE_DAYS = 7;
const DAY_MS = 86_400_000;

export interface UnsureCall extends InvocationKey {
  /** The token of the claim that the same write made; null for a call that it left pending. */
  readonly claim: string | null;
}

export interface Refusals {
  /**
   * Whether a call was stored whose commit has no answer. If not, it never will be: it is refused, whatever appears
   * later.
   */
  wasStored(call: UnsureCall): Promise<boolean>;
  /**
   * Whether the call is one that was refused: see below.
   *
   * @throws Fault `unavailable` while that is being decided here
   */
  isRefused(key: InvocationKey): Promise<boolean>;
  /** Whether this process has refused the call and could not note it yet. */
  isUnnoted(id: string): boolean;
  /** Removes the records of refused calls that have appeared since. Gives how many they were. */
  removeAppeared(): Promise<number>;
  /** Waits for the store no longer. */
  stop(): void;
}

interface RefusalsOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
}

export function createRefusals({ store, clock, log }: RefusalsOptions): Refusals {
  let isStopped = false;
  const unnoted = new Set<string>();

  /**
   * In one write: a record that is there is accepted, and nobody ever sees a note of it; otherwise the note is there
   * from now on, and nobody claims what appears.
   */
  function decide({ tenant, id, claim }: UnsureCall, isLate: () => boolean): Promise<boolean> {
    return store.write(async (tx) => {
      const { refusedCalls: t } = tx.tables;
      await tx.db.insert(t).values({ tenant, id, claim, created_at: clock.now() }).onConflictDoNothing();
      if (isLate() || !(await isThere(tx, { tenant, id }))) return false;
      await dropNote(tx, { tenant, id });
      return true;
    });
  }

  /** What appeared while the note was written may have been claimed by somebody else: then it is accepted too. */
  async function wasAccepted(call: UnsureCall, isLate: () => boolean): Promise<boolean> {
    return (await decide(call, isLate)) || (!isLate() && !(await isRefused(store, call)));
  }

  /** The caller has been told so. */
  async function refuse(call: UnsureCall): Promise<void> {
    try {
      await untilStored(
        () => decide(call, () => true),
        () => isStopped,
        PAUSE_MS_MOST,
      );
      if (!(await isRefused(store, call))) throw new Error("it was claimed before");
    } catch (error) {
      const named = { tenant: call.tenant, invocation_id: call.id };
      log.error("refused_call_may_be_made", { ...named, error });
    } finally {
      unnoted.delete(call.id);
    }
  }

  return {
    async wasStored(call) {
      let isLate = false;
      unnoted.add(call.id);
      const deciding = wasAccepted(call, () => isLate);
      try {
        const isStored = await within(DECIDE_MS_MAX, deciding);
        unnoted.delete(call.id);
        return isStored;
      } catch {
        isLate = true;
        // Only when the first decision has ended can another one not be undone by it.
        void deciding.catch(() => {}).then(() => refuse(call));
        return false;
      }
    },
    async isRefused(key) {
      if (!unnoted.has(key.id)) return isRefused(store, key);
      throw new Fault("unavailable", "this call is in doubt: send it again", { retryAfterSeconds: 1 });
    },
    isUnnoted: (id) => unnoted.has(id),
    removeAppeared: () => removeAppeared(store),
    stop() {
      isStopped = true;
    },
  };
}

async function isThere({ db, tables: { invocations: t } }: Reader, key: InvocationKey): Promise<boolean> {
  const rows = await db
    .select({ id: t.id })
    .from(t)
    .where(and(eq(t.tenant, key.tenant), eq(t.id, key.id)));
  return rows.length > 0;
}

async function dropNote({ db, tables: { refusedCalls: t } }: Tx, key: InvocationKey): Promise<void> {
  await db.delete(t).where(and(eq(t.tenant, key.tenant), eq(t.id, key.id)));
}

const noteOf = prepared(({ db, tables: { refusedCalls: t } }: Reader) =>
  db
    .select({ claim: t.claim })
    .from(t)
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.id, sql.placeholder("id")))),
);

class TakenUp extends Error {}

/**
 * Whether the call is one that was refused. Its record is gone then, also if it has only just appeared. One that was
 * claimed by somebody else before it was refused, or whose payment was sent, stays and is none.
 */
async function isRefused(store: Store, { tenant, id }: InvocationKey): Promise<boolean> {
  const [note] = await noteOf(store.read).execute({ tenant, id });
  if (note === undefined) return false;
  try {
    await store.write((tx) => removeRecord(tx, { tenant, id, claim: note.claim }));
    return true;
  } catch (error) {
    if (!(error instanceof TakenUp)) throw error;
    await store.write((tx) => dropNote(tx, { tenant, id }));
    return false;
  }
}

/** @throws TakenUp when somebody else has claimed it, or has taken its payment for an attempt of its own */
async function removeRecord(tx: Tx, { tenant, id, claim }: UnsureCall): Promise<void> {
  const { invocations: t, payments: p, invocationBodies: bodies } = tx.tables;
  const isPayment = and(eq(p.tenant, tenant), eq(p.invocation_id, id));
  const untouched = and(isPayment, lte(p.attempts, 1), isNull(p.sent_at));
  await tx.db.delete(p).where(untouched);
  const paid = await tx.db.select({ nonce: p.nonce }).from(p).where(isPayment);
  const isPending = eq(t.status, "pending");
  const isOurs = claim === null ? isPending : or(isPending, eq(t.claim, claim));
  const [row] = await tx.db
    .delete(t)
    .where(and(eq(t.tenant, tenant), eq(t.id, id), isNull(t.completed_at), isOurs))
    .returning();
  if (paid.length > 0 || (row === undefined && (await isThere(tx, { tenant, id })))) throw new TakenUp();
  if (row === undefined) return;
  countWhole(tx, row, -1);
  // The key stands in the stored call.
  await freeIdempotencyKey(tx, row);
  await tx.db.delete(bodies).where(and(eq(bodies.tenant, tenant), eq(bodies.invocation_id, id)));
}

async function removeAppeared(store: Store): Promise<number> {
  const { invocations: t, refusedCalls: r } = store.read.tables;
  const appeared = await store.read.db
    .select({ tenant: t.tenant, id: t.id })
    .from(r)
    .innerJoin(t, and(eq(t.tenant, r.tenant), eq(t.id, r.id)));
  for (const key of appeared) await isRefused(store, key);
  return appeared.length;
}

/** Removes notes that are older than any commit can be late. */
export function removeOldNotes(store: Store, clock: Clock): Promise<number> {
  const before = clock.now() - NOTE_DAYS * DAY_MS;
  return removeInGroups(store, async ({ db, tables: { refusedCalls: t } }, limit) => {
    const old = db
      .select({ tenant: t.tenant, id: t.id })
      .from(t)
      .where(lte(t.created_at, before))
      .limit(limit);
    const rows = await db
      .delete(t)
      .where(inArray(sql`(${t.tenant}, ${t.id})`, old))
      .returning({ id: t.id });
    return rows.length;
  });
}
