// Work that one of several processes does for all, now and then: whoever asks first has the turn.
import { lte } from "drizzle-orm";
import type { Store } from "./store.ts";

/** Whether it is this process's turn. Nobody has the next one before `ms` have passed. */
export async function takeTurn(store: Store, job: string, ms: number): Promise<boolean> {
  const now = store.clock.now();
  const next_at = now + ms;
  const rows = await store.write(({ db, tables: { turns: t } }) =>
    db
      .insert(t)
      .values({ job, next_at })
      .onConflictDoUpdate({ target: t.job, set: { next_at }, setWhere: lte(t.next_at, now) })
      .returning({ job: t.job }),
  );
  return rows.length > 0;
}
