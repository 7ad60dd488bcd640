// Ends paid streaming calls whose caller did not come back: the outcome of the payment was unknown, so the caller was told to
// retry, and then the payment was collected. Each process measures the waiting time by its own monotonic clock, so no change of
// a clock can shorten it. It starts again with the process and with each retry of the caller, which changes `updated_at`.
import { and, asc, eq, sql } from "drizzle-orm";
import { awaitsNoPayment } from "../../../db/schema.ts";
import { MAX } from "../../kernel/limits.ts";
import { every } from "../../kernel/loop.ts";
import { hasKey, type StoreTools, type Tx } from "../../storage/store.ts";
import { endPending, type InvocationKey } from "../invocations/service.ts";

/** How long a call waits after its last change: twice the longest `Retry-After`, including that of the rate limit. */
export const KEPT_MS = 2 * MAX.retryAfterSeconds * 1000;
const SWEEP_MS = 5_000;
/** The most that counts between two sweeps, since callers could not reach this process while it was paused. */
const ELAPSED_MS_MAX = 4 * SWEEP_MS;
/** How many calls one sweep reads, those first that have been unchanged for longest. */
const CALLS_AT_ONCE = 1_000;

export interface ReaperOptions extends StoreTools {
  readonly monotonic?: () => number;
}

/** Starts ending such calls. Returns a function that stops it. */
export function startReaper(options: ReaperOptions): () => void {
  const { log } = options;
  const endOnce = createReaper(options);
  return every(SWEEP_MS, () => endOnce().catch((error) => log.warn("unclaimed_calls_not_read", { error })));
}

export function createReaper(options: ReaperOptions): () => Promise<InvocationKey[]> {
  const { store, clock, log, monotonic = () => performance.now() } = options;
  /** For how long this process has seen each call unchanged. */
  let waiting = new Map<string, { readonly updatedAt: number; readonly waitedMs: number }>();
  let sweptAt = monotonic();

  async function overdue(): Promise<UnclaimedCall[]> {
    const elapsed = Math.min(monotonic() - sweptAt, ELAPSED_MS_MAX);
    sweptAt = monotonic();
    const { openInvocations: t } = store.read.tables;
    const rows = await store.read.db
      .select({ tenant: t.tenant, id: t.id, updated_at: t.updated_at })
      .from(t)
      // Written like the condition of the partial index on these calls, so that the index is used.
      .where(and(sql`${t.status} = 'pending'`, sql`${t.mode} = 'streaming'`, awaitsNoPayment(t)))
      .orderBy(asc(t.updated_at))
      .limit(CALLS_AT_ONCE);
    const previous = waiting;
    waiting = new Map();
    return rows.filter(({ id, updated_at }) => {
      const known = previous.get(id);
      const waitedMs = known?.updatedAt === updated_at ? known.waitedMs + elapsed : 0;
      waiting.set(id, { updatedAt: updated_at, waitedMs });
      return waitedMs >= KEPT_MS;
    });
  }

  return async () => {
    const ended: InvocationKey[] = [];
    for (const call of await overdue()) {
      const key = { tenant: call.tenant, id: call.id };
      const isEnded = await store.write(
        async (tx) => (await isUnchanged(tx, call)) && endPending(tx, key, "cancelled", clock.now()),
      );
      if (!isEnded) continue;
      log.info("paid_call_not_fetched", { tenant: key.tenant, invocation_id: key.id });
      ended.push(key);
    }
    return ended;
  };
}

type UnclaimedCall = InvocationKey & { readonly updated_at: number };

/** False if the caller has come back meanwhile. Locks the row until the end of the write. */
async function isUnchanged({ db, tables: { openInvocations: t } }: Tx, { tenant, id, updated_at }: UnclaimedCall) {
  const rows = await db
    .update(t)
    .set({ updated_at })
    .where(and(hasKey(t, { tenant, id }), eq(t.updated_at, updated_at)))
    .returning({ id: t.id });
  return rows.length > 0;
}
