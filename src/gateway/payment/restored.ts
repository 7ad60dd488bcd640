// Calls and payments after the database was restored to an older state. What was open then may have happened since: no open
// call is made again, open payments count as sent, and a payment that may have bought a call before the restore buys none.
import { count, eq, isNotNull, sql } from "drizzle-orm";
import type { Store } from "../../storage/store.ts";
import { MAX_TIMEOUT_SECONDS } from "../../x402/codec.ts";
import { endOpen } from "../invocations/service.ts";

const CALLS_AT_ONCE = 200;

/** How many calls wait, which `settleRestored` would end unmade, and how many of them come with a payment. */
export async function waitingCalls({ read }: Store): Promise<{ readonly calls: number; readonly paid: number }> {
  const { openInvocations: t } = read.tables;
  const counts = { calls: count(), paid: count(t.payment_nonce) };
  const [found] = await read.db.select(counts).from(t).where(eq(t.status, "pending"));
  return found ?? { calls: 0, paid: 0 };
}

/**
 * Ends all open calls, like running calls whose process died. An open payment may have been collected, so its outcome counts
 * as unknown and is asked about for as long as any other (settler.ts decides when).
 */
export async function settleRestored(store: Store): Promise<void> {
  await store.write(async (tx) => {
    const { payments: t } = tx.tables;
    await tx.db
      .update(t)
      .set({
        sent_at: sql`coalesce(${t.sent_at}, ${tx.now})`,
        unknown_since: sql`coalesce(${t.unknown_since}, ${tx.now})`,
      })
      .where(isNotNull(t.next_attempt_at));
  });
  for (;;) {
    const ended = await store.write(async (tx) => {
      const { openInvocations: t } = tx.tables;
      const open = await tx.db.select({ tenant: t.tenant, id: t.id }).from(t).limit(CALLS_AT_ONCE);
      for (const key of open) await endOpen(tx, key, "internal", store.clock.now(), null, "process_ended");
      return open.length;
    });
    if (ended < CALLS_AT_ONCE) return;
  }
}

// The restored database lacks the payments accepted after its state was saved, and a facilitator would report each of those
// as collected if it was presented again.
//
// The expiry of an authorization tells old from new. The gateway accepts none that is valid for longer than LONGEST_SECONDS,
// so all that it accepted before a restore at time R expire by R + LONGEST_SECONDS, and one that expires later is new. Until
// then the challenge asks for a longer timeout, which official clients sign exactly.
//
//   accepted                 now + 6 s <= validBefore <= now + 660 s
//   after a restore, until R + 840 s    R + 840 s < validBefore <= now + 840 s

/** How much longer than the challenge's timeout a payment may be valid, except after a restore. */
const EXTRA_SECONDS = 600;
const LONGEST_SECONDS = 840;
/** The challenge's timeout after a restore: what is signed for it expires late enough from a minute after the restore on. */
const RESTORED_TIMEOUT_SECONDS = 780;

/** @param restoredAt milliseconds since the epoch, by the database's clock; null when the database was never restored */
export function createRestoreGuard(restoredAt: number | null) {
  const until = restoredAt === null ? Number.NEGATIVE_INFINITY : Math.ceil(restoredAt / 1000) + LONGEST_SECONDS;
  const isOver = (now: number) => now > until;
  return {
    /** The timeout in a challenge. @param now unix seconds, as in all methods here */
    timeoutSeconds: (now: number) => (isOver(now) ? MAX_TIMEOUT_SECONDS : RESTORED_TIMEOUT_SECONDS),
    /** The latest expiry of a payment that is accepted now. */
    latest: (now: number) => now + (isOver(now) ? MAX_TIMEOUT_SECONDS + EXTRA_SECONDS : LONGEST_SECONDS),
    /** Whether a payment with this expiry may have been accepted before the restore. */
    mayBeOlder: (validBefore: bigint | number) => validBefore <= until,
  };
}

export type RestoreGuard = ReturnType<typeof createRestoreGuard>;
