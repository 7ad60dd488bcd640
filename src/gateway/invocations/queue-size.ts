// How many calls wait to be made by any replica, and for how long, along the index of pending calls. On SQLite it is walked
// in steps, since a read there holds the event loop; on Postgres one statement counts at the server.
import { and, count, min, type SQL, sql } from "drizzle-orm";
import { idTime } from "../../core/id.ts";
import type { QueueSize } from "../../core/meters.ts";
import type { Reader, Store } from "../../storage/store.ts";

/** A millisecond on SQLite (measured). */
const CALLS_AT_ONCE = 2_048;

/** As isQueued in commands/queued.ts, whoever takes them. The index has the same text. */
const WAITS = sql.raw("status = 'pending' and mode = 'transactional' and coalesce(settlement_status, '') <> 'pending'");

/** @param atOnce tests lower it */
export async function queueSize(store: Store, atOnce: number = CALLS_AT_ONCE): Promise<QueueSize> {
  const { calls, oldest } = store.dialect === "sqlite" ? await walked(store.read, atOnce) : await counted(store.read);
  return { calls, oldestMs: oldest === null ? 0 : Math.max(store.clock.now() - idTime(oldest), 0) };
}

interface Queue {
  readonly calls: number;
  /** The lowest ID; null when none waits. */
  readonly oldest: string | null;
}

async function counted({ db, tables: { openInvocations: t } }: Reader): Promise<Queue> {
  const [found] = await db
    .select({ calls: count(), oldest: min(t.id) })
    .from(t)
    .where(WAITS);
  return { calls: Number(found?.calls ?? 0), oldest: found?.oldest ?? null };
}

async function walked(reader: Reader, atOnce: number): Promise<Queue> {
  let calls = 0;
  let oldest: string | null = null;
  for (let behind: SQL | undefined; ; ) {
    const step = await stepBehind(reader, behind, atOnce);
    calls += step.calls;
    if (step.oldest !== null && (oldest === null || step.oldest < oldest)) oldest = step.oldest;
    if (step.calls < atOnce || step.agent === null) return { calls, oldest };
    behind = sql`(agent_id, id) > (${step.agent}, ${step.id})`;
    await Bun.sleep(0);
  }
}

/** The last one is that with the highest agent, since the walk goes by agent and then by call; so its ID is the highest there. */
async function stepBehind({ db, tables: { openInvocations: t } }: Reader, behind: SQL | undefined, atOnce: number) {
  const step = db
    .select({ agent_id: t.agent_id, id: t.id })
    .from(t)
    .where(and(WAITS, behind))
    .orderBy(t.agent_id, t.id)
    .limit(atOnce)
    .as("step");
  const [found] = await db
    .select({
      calls: count(),
      oldest: min(step.id),
      agent: sql<string | null>`max(agent_id)`,
      // All IDs are equally long, so the last of both together is the last.
      id: sql<string | null>`substr(max(agent_id || id), length(max(agent_id)) + 1)`,
    })
    .from(step);
  return found ?? { calls: 0, oldest: null, agent: null, id: null };
}
