// Ends paid streaming calls that their caller never fetched: the outcome of the payment was unknown, the caller was told to
// retry, and meanwhile it was collected. The time is measured by this process alone: it starts again with each start
// and each try of the caller (which changes `updated_at`), and no clock can shorten it.

import { and, asc, eq, sql } from "drizzle-orm";
import { paidFor } from "../../../db/schema.ts";
import { MAX } from "../../kernel/limits.ts";
import { every } from "../../kernel/loop.ts";
import { hasKey, type StoreTools, type Tx } from "../../storage/store.ts";
import { type InvocationKey, withdraw } from "../invocations/service.ts";

/** Counted from the last change of the call: twice the longest `Retry-After`, including that of the rate limit. */
export const KEPT_MS = 2 * MAX.retryAfterSeconds * 1000;
const LOOK_MS = 5_000;
const PAUSE_MS_MAX = 4 * LOOK_MS;
/** Calls looked at per round. If there are more, the longest unchanged go first and the others come later. */
const CALLS_AT_ONCE = 1_000;

export interface ReaperOptions extends StoreTools {
  readonly monotonic?: () => number;
}

interface Seen {
  readonly updatedAt: number;
  /** For how long it has been seen unchanged. */
  readonly waitedMs: number;
}

/** Starts looking for such calls. Returns a function that stops it. */
export function startReaper(options: ReaperOptions): () => void {
  const { log } = options;
  const endOnce = createReaper(options);
  return every(LOOK_MS, () => endOnce().catch((error) => log.warn("unclaimed_calls_not_read", { error })));
}

export function createReaper(options: ReaperOptions): () => Promise<InvocationKey[]> {
  const { store, clock, log, monotonic = () => performance.now() } = options;
  let known = new Map<string, Seen>();
  let lookedAt = monotonic();

  async function overdue(): Promise<UnclaimedCall[]> {
    // Callers could not reach this process while it was paused, so a pause does not count.
    const passed = Math.min(monotonic() - lookedAt, PAUSE_MS_MAX);
    lookedAt = monotonic();
    const { openInvocations: t } = store.read.tables;
    const rows = await store.read.db
      .select({ tenant: t.tenant, id: t.id, updated_at: t.updated_at })
      .from(t)
      // Same condition as the partial index on these calls.
      .where(and(sql`${t.status} = 'pending'`, sql`${t.mode} = 'streaming'`, paidFor(t)))
      .orderBy(asc(t.updated_at))
      .limit(CALLS_AT_ONCE);
    const before = known;
    known = new Map();
    return rows.filter(({ id, updated_at }) => {
      const seen = before.get(id);
      const waitedMs = seen?.updatedAt === updated_at ? seen.waitedMs + passed : 0;
      known.set(id, { updatedAt: updated_at, waitedMs });
      return waitedMs >= KEPT_MS;
    });
  }

  return async () => {
    const ended: InvocationKey[] = [];
    for (const call of await overdue()) {
      const key = { tenant: call.tenant, id: call.id };
      const isGone = await store.write(
        async (tx) => (await isUnchanged(tx, call)) && withdraw(tx, key, "cancelled", clock.now()),
      );
      if (!isGone) continue;
      log.info("paid_call_not_fetched", { tenant: key.tenant, invocation_id: key.id });
      ended.push(key);
    }
    return ended;
  };
}

type UnclaimedCall = InvocationKey & { readonly updated_at: number };

/** False when the caller has come back meanwhile. The row stays locked until the end of the write. */
async function isUnchanged(
  { db, tables: { openInvocations: t } }: Tx,
  { tenant, id, updated_at }: UnclaimedCall,
): Promise<boolean> {
  const rows = await db
    .update(t)
    .set({ updated_at })
    .where(and(hasKey(t, { tenant, id }), eq(t.updated_at, updated_at)))
    .returning({ id: t.id });
  return rows.length > 0;
}
