// Calls that were refused because their commit got no answer in time: the record may be stored, or may still appear. The
// caller was told that the call was not accepted, so it must not be made. A note of each such call is kept in
// `refused_calls`. A call with a note is never claimed and its payment is never attempted. When its record appears, it is
// removed with all that depends on it, so that the caller can use the same key or payment again.
import { and, eq, isNull, lte, or } from "drizzle-orm";
import { Fault } from "../../core/fault.ts";
import { type Clock, DAY_MS } from "../../core/time.ts";
import { outlastRequest } from "../../kernel/wait.ts";
import { deleteSome, removeInGroups } from "../../storage/cleanup.ts";
import { untilStored, within } from "../../storage/failures.ts";
import type { Reader, Store, StoreTools, Tx } from "../../storage/store.ts";
import { GIVEN_KEY, hasKey, isOfCall, preparedRow } from "../../storage/store.ts";
import { orphanRequest } from "./bodies.ts";
import { freeIdempotencyKey } from "./idempotency.ts";
import type { InvocationKey } from "./service.ts";

const PAUSE_MS_MAX = 500;

export interface UnsureCall extends InvocationKey {
  /** The token of the claim that was part of the unanswered write; null when that write left the call pending. */
  readonly claim: string | null;
}

export function createLostCommits({ store, clock, log }: StoreTools) {
  let isStopped = false;
  const unnoted = new Set<string>();

  /**
   * Decides in one write, and returns whether the call counts as accepted: if its record is stored. Otherwise a note stays, which
   * keeps a record that appears later from being claimed.
   */
  function decide({ tenant, id, claim }: UnsureCall, isLate: () => boolean): Promise<boolean> {
    return store.write(async (tx) => {
      const { refusedCalls: t } = tx.tables;
      await tx.db.insert(t).values({ tenant, id, claim, created_at: clock.now() }).onConflictDoNothing();
      if (isLate() || !(await hasRecord(tx, { tenant, id }))) return false;
      await dropNote(tx, { tenant, id });
      return true;
    });
  }

  /** A record that appeared while the note was written may have been claimed elsewhere; such a call counts as accepted. */
  const wasAccepted = async (call: UnsureCall, isLate: () => boolean): Promise<boolean> =>
    (await decide(call, isLate)) || (!isLate() && !(await removeIfRefused(store, call)));

  /** Stores the note of a call that was refused before its note could be stored. */
  async function refuse(call: UnsureCall): Promise<void> {
    try {
      await untilStored(
        () => decide(call, () => true),
        () => isStopped,
        PAUSE_MS_MAX,
      );
      if (!(await removeIfRefused(store, call))) throw new Error("the call was claimed before its note was stored");
    } catch (error) {
      const named = { tenant: call.tenant, invocation_id: call.id };
      log.error("refused_call_may_be_made", { ...named, error });
    } finally {
      unnoted.delete(call.id);
    }
  }

  return {
    /** Whether a call whose commit got no answer was stored. If not, refuse it: it is never made, even if it appears later. */
    async wasStored(call: UnsureCall): Promise<boolean> {
      let isLate = false;
      unnoted.add(call.id);
      // Deciding goes on after the response, because hardly any of the request's time is left.
      const deciding = outlastRequest(() => wasAccepted(call, () => isLate));
      try {
        // A caller must be answered within ten seconds. A write that has run into its timeout leaves 700 ms of them.
        const isStored = await within(700, deciding);
        unnoted.delete(call.id);
        return isStored;
      } catch {
        isLate = true;
        // Refuse only after the first decision has ended, since it could undo the refusal.
        void deciding.catch(() => {}).then(() => outlastRequest(() => refuse(call)));
        return false;
      }
    },
    /** Removes the record of a call that was refused, and returns whether it was. @throws Fault `unavailable` while undecided */
    async removeIfRefused(key: InvocationKey): Promise<boolean> {
      if (!unnoted.has(key.id)) return removeIfRefused(store, key);
      throw new Fault("unavailable", "the outcome is unknown; retry with the same Idempotency-Key", {
        retryAfterSeconds: 1,
      });
    },
    /** IDs of calls that this process has refused, or may refuse, and whose notes are not stored yet. */
    unnoted: unnoted as ReadonlySet<string>,
    /** Removes the records of refused calls that have appeared. Returns their number. */
    removeAppeared: () => removeAppeared(store),
    /** Stops retrying notes that can't be stored. */
    stop() {
      isStopped = true;
    },
  };
}

export type LostCommits = ReturnType<typeof createLostCommits>;

async function hasRecord({ db, tables: { invocations: t } }: Reader, key: InvocationKey): Promise<boolean> {
  const rows = await db.select({ id: t.id }).from(t).where(hasKey(t, key));
  return rows.length > 0;
}

async function dropNote({ db, tables: { refusedCalls: t } }: Tx, key: InvocationKey): Promise<void> {
  await db.delete(t).where(hasKey(t, key));
}

const noteOf = preparedRow(({ db, tables: { refusedCalls: t } }) =>
  db.select({ claim: t.claim }).from(t).where(hasKey(t, GIVEN_KEY)),
);

class AlreadyClaimed extends Error {}

/**
 * Whether the call was refused. If so, its record is removed should it have appeared. A call that another process claimed
 * before the note was stored, or whose payment was sent, stays and does not count as refused.
 */
async function removeIfRefused(store: Store, { tenant, id }: InvocationKey): Promise<boolean> {
  const note = await noteOf(store.read, { tenant, id });
  if (note === null) return false;
  try {
    await store.write((tx) => removeRecord(tx, { tenant, id, claim: note.claim }));
    return true;
  } catch (error) {
    if (!(error instanceof AlreadyClaimed)) throw error;
    await store.write((tx) => dropNote(tx, { tenant, id }));
    return false;
  }
}

/** @throws AlreadyClaimed when another process has claimed the call, or has begun to settle its payment */
async function removeRecord(tx: Tx, { tenant, id, claim }: UnsureCall): Promise<void> {
  const { openInvocations: t, payments: p } = tx.tables;
  const isPayment = isOfCall(p, { tenant, id });
  const untouched = and(isPayment, lte(p.attempts, 1), isNull(p.sent_at));
  await tx.db.delete(p).where(untouched);
  const paid = await tx.db.select({ nonce: p.nonce }).from(p).where(isPayment);
  const isPending = eq(t.status, "pending");
  const isOurs = claim === null ? isPending : or(isPending, eq(t.claim, claim));
  // The idempotency key is read from the stored call, so it must be freed before the call is removed.
  await freeIdempotencyKey(tx, { tenant, id });
  const [row] = await tx.db
    .delete(t)
    .where(and(hasKey(t, { tenant, id }), isOurs))
    .returning();
  if (paid.length > 0 || (row === undefined && (await hasRecord(tx, { tenant, id })))) throw new AlreadyClaimed();
  if (row === undefined) return;
  if (row.request === null) await orphanRequest(tx, { tenant, id });
}

async function removeAppeared(store: Store): Promise<number> {
  const { openInvocations: t, refusedCalls: r } = store.read.tables;
  const appeared = await store.read.db.select({ tenant: t.tenant, id: t.id }).from(r).innerJoin(t, hasKey(t, r));
  for (const key of appeared) await removeIfRefused(store, key);
  return appeared.length;
}

/** Removes notes older than `days`, which must be longer than any commit can be late. Returns their number. */
export function removeOldNotes(store: Store, clock: Clock, days: number): Promise<number> {
  const before = clock.now() - days * DAY_MS;
  const { refusedCalls: t } = store.read.tables;
  const isOld = lte(t.created_at, before);
  return removeInGroups(store, (tx, limit) => deleteSome(tx, t, [t.tenant, t.id], isOld, limit));
}
