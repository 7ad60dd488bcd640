// What a gateway had under way in the state to which its database was restored may have happened since: so no call is made
// that may have been made, and no payment is sent that may not have been sent.
import { isNotNull, sql } from "drizzle-orm";
import type { Store } from "../../storage/store.ts";
import { MAX_TIMEOUT_SECONDS } from "../../x402/codec.ts";
import { abandon } from "../invocations/service.ts";

const CALLS_AT_ONCE = 200;

/**
 * Ends all open calls, as those are ended that were running when their process died. An open payment may have
 * been collected, and is asked about for as long as any other whose outcome is unknown (see settler.ts for when).
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
      for (const key of open) await abandon(tx, key, "internal", store.clock.now());
      return open.length;
    });
    if (ended < CALLS_AT_ONCE) return;
  }
}

// Payments of a gateway whose database was restored to an older state. It has forgotten those that were taken since, and
// their facilitator would call each of them collected: so one that may have bought a call before buys none.
//
// The end of an authorization tells. A gateway takes none that is valid for longer than LONGEST_SECONDS, so after a restore
// at the time R all that were taken before are over at R + LONGEST_SECONDS. One that ends later is new. Until then callers
// are asked for such ones: the challenge demands a longer timeout, and official clients sign just that.
//
//   taken                    now + 6 s <= validBefore <= now + 660 s
//   after a restore, until R + 840 s    R + 840 s < validBefore <= now + 840 s

/** How much longer than demanded a payment may be valid, usually. */
const AHEAD_SECONDS = 600;
const LONGEST_SECONDS = 840;
/** In place of the usual: from a minute after the restore on, what is signed for it ends late enough. */
const TIMEOUT_SECONDS = 780;

/** @param restoredAt milliseconds since the epoch, by the database's clock; null for never */
export function createRestoreGuard(restoredAt: number | null) {
  const until = restoredAt === null ? Number.NEGATIVE_INFINITY : Math.ceil(restoredAt / 1000) + LONGEST_SECONDS;
  const isOver = (now: number) => now > until;
  return {
    /** What a challenge demands. @param now Unix seconds, as everywhere here */
    timeoutSeconds: (now: number) => (isOver(now) ? MAX_TIMEOUT_SECONDS : TIMEOUT_SECONDS),
    /** The latest end of a payment that is taken now. */
    latest: (now: number) => now + (isOver(now) ? MAX_TIMEOUT_SECONDS + AHEAD_SECONDS : LONGEST_SECONDS),
    /** Whether a payment with this end may have been taken before the restore. */
    mayBeOlder: (validBefore: bigint | number) => validBefore <= until,
  };
}

export type RestoreGuard = ReturnType<typeof createRestoreGuard>;
