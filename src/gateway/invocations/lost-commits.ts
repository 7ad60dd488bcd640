// Calls that were refused because it was unknown whether their record was stored: the answer of the commit was lost or
// late, and the record may appear at any time. The caller was told that the call was not taken, so it must not be made.
// A note of each such call is kept in a table of its own. A call with a note is never claimed and its payment is never
// attempted. Its record is removed with all that depends on it, so that the same key or payment can be sent again.
import { and, eq, inArray, isNull, lte, or, sql } from "drizzle-orm";
import { Fault } from "../../core/fault.ts";
import type { Clock } from "../../core/time.ts";
import { DAY_MS } from "../../core/time.ts";
import { removeInGroups } from "../../storage/cleanup.ts";
import { untilStored, within } from "../../storage/failures.ts";
import {
  GIVEN_KEY,
  hasKey,
  isOfCall,
  prepared,
  type Reader,
  type Store,
  type StoreTools,
  type Tx,
} from "../../storage/store.ts";
import { orphanRequest } from "./bodies.ts";
import { freeIdempotencyKey } from "./idempotency.ts";
import type { InvocationKey } from "./service.ts";

const PAUSE_MS_MOST = 500;

interface UnsureCall extends InvocationKey {
  /** The token of the claim that the same write made; null for a call that it left pending. */
  readonly claim: string | null;
}

export function createLostCommits({ store, clock, log }: StoreTools) {
  let isStopped = false;
  const unnoted = new Set<string>();

  /**
   * In one write: if the record is there, the call is accepted and no note is ever visible. Otherwise the note is
   * stored, and a record that appears later is never claimed.
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

  /** A record that appeared while the note was written may be claimed elsewhere. Then the call is accepted too. */
  async function wasAccepted(call: UnsureCall, isLate: () => boolean): Promise<boolean> {
    return (await decide(call, isLate)) || (!isLate() && !(await isRefused(store, call)));
  }

  /** Stores the note after the caller has been refused. */
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
    /**
     * Whether a call was stored although its commit got no answer. If not, the call is refused for good, even if its
     * record appears later.
     */
    async wasStored(call: UnsureCall): Promise<boolean> {
      let isLate = false;
      unnoted.add(call.id);
      const deciding = wasAccepted(call, () => isLate);
      try {
        // A caller is answered within ten seconds, and this is the rest after a write that used up its own time.
        const isStored = await within(700, deciding);
        unnoted.delete(call.id);
        return isStored;
      } catch {
        isLate = true;
        // Wait for the first decision to end, or it could undo the second one.
        void deciding.catch(() => {}).then(() => refuse(call));
        return false;
      }
    },
    /**
     * Whether the call is one that was refused: see below.
     *
     * @throws Fault `unavailable` while that is being decided here
     */
    async isRefused(key: InvocationKey): Promise<boolean> {
      if (!unnoted.has(key.id)) return isRefused(store, key);
      throw new Fault("unavailable", "the outcome is unknown; retry with the same Idempotency-Key", {
        retryAfterSeconds: 1,
      });
    },
    /** The calls that this process has refused and could not note yet. */
    unnoted: unnoted as ReadonlySet<string>,
    /** Removes the records of refused calls that have appeared since. Gives how many they were. */
    removeAppeared: () => removeAppeared(store),
    /** Stops waiting for the store. */
    stop() {
      isStopped = true;
    },
  };
}

export type LostCommits = ReturnType<typeof createLostCommits>;

async function isThere({ db, tables: { invocations: t } }: Reader, key: InvocationKey): Promise<boolean> {
  const rows = await db.select({ id: t.id }).from(t).where(hasKey(t, key));
  return rows.length > 0;
}

async function dropNote({ db, tables: { refusedCalls: t } }: Tx, key: InvocationKey): Promise<void> {
  await db.delete(t).where(hasKey(t, key));
}

const noteOf = prepared(({ db, tables: { refusedCalls: t } }: Reader) =>
  db.select({ claim: t.claim }).from(t).where(hasKey(t, GIVEN_KEY)),
);

class TakenUp extends Error {}

/**
 * Whether the call was refused. If so its record is removed, even if it has only just appeared. A call that was claimed
 * elsewhere before the refusal, or whose payment was sent, stays and does not count as refused.
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
  const { openInvocations: t, payments: p } = tx.tables;
  const isPayment = isOfCall(p, { tenant, id });
  const untouched = and(isPayment, lte(p.attempts, 1), isNull(p.sent_at));
  await tx.db.delete(p).where(untouched);
  const paid = await tx.db.select({ nonce: p.nonce }).from(p).where(isPayment);
  const isPending = eq(t.status, "pending");
  const isOurs = claim === null ? isPending : or(isPending, eq(t.claim, claim));
  // The idempotency key is read from the stored call, so free it before the call is removed.
  await freeIdempotencyKey(tx, { tenant, id });
  const [row] = await tx.db
    .delete(t)
    .where(and(hasKey(t, { tenant, id }), isOurs))
    .returning();
  if (paid.length > 0 || (row === undefined && (await isThere(tx, { tenant, id })))) throw new TakenUp();
  if (row === undefined) return;
  if (row.request === null) await orphanRequest(tx, { tenant, id });
}

async function removeAppeared(store: Store): Promise<number> {
  const { openInvocations: t, refusedCalls: r } = store.read.tables;
  const appeared = await store.read.db.select({ tenant: t.tenant, id: t.id }).from(r).innerJoin(t, hasKey(t, r));
  for (const key of appeared) await isRefused(store, key);
  return appeared.length;
}

/** Removes notes older than `days`, which must be more than any commit can be late. Gives how many they were. */
export function removeOldNotes(store: Store, clock: Clock, days: number): Promise<number> {
  const before = clock.now() - days * DAY_MS;
  return removeInGroups(store, async ({ db, tables: { refusedCalls: t } }, limit) => {
    const old = db.select({ tenant: t.tenant, id: t.id }).from(t).where(lte(t.created_at, before)).limit(limit);
    const rows = await db
      .delete(t)
      .where(inArray(sql`(${t.tenant}, ${t.id})`, old))
      .returning({ id: t.id });
    return rows.length;
  });
}
