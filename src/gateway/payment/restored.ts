// What a gateway had under way in the state to which its database was restored. All of it may have happened since: so no
// call is made that may have been made, and no payment is sent that may not have been sent.
import { isNotNull, sql } from "drizzle-orm";
import type { Store } from "../../storage/store.ts";
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
