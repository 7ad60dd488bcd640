// Work that one of several processes does for all: now and then, when whoever asks first has the turn, or steadily, when one
// of them keeps the turn while it goes on with the work. A turn saves work and protects nothing: a process that was held up
// in its turn goes on beside the next one, so the work must be right then too.
import { and, eq, not, or } from "drizzle-orm";
import { isOlder, type Moment, thisMoment } from "../core/age.ts";
import { whereLeaseHolds } from "./lease-end.ts";
import type { Store } from "./store.ts";

/** Parts of the time that a turn is kept, after each of which it is renewed, or asked for again. */
const RENEWALS = 3;

/**
 * Whether it is this process's turn. Nobody has the next one before `ms` have passed, but for the holder.
 *
 * @param holder who goes on with it; null when nobody does
 */
export async function takeTurn(store: Store, job: string, ms: number, holder: string | null = null): Promise<boolean> {
  const now = store.clock.now();
  const turn = { next_at: now + ms, holder };
  const rows = await store.write(({ db, tables: { turns: t } }) => {
    // Twice its length leaves room for processes whose readings of the clock differ.
    const isOver = not(whereLeaseHolds(t.next_at, now, 2 * ms));
    const setWhere = holder === null ? isOver : or(isOver, eq(t.holder, holder));
    return db
      .insert(t)
      .values({ job, ...turn })
      .onConflictDoUpdate({ target: t.job, set: turn, ...(setWhere && { setWhere }) })
      .returning({ job: t.job });
  });
  return rows.length > 0;
}

/** A turn that one process keeps: nobody else has it before `ms` after its last renewal. Where there are no others it is always held. */
export function steadyTurn(store: Store, job: string, ms: number, holder: string) {
  let isHeld = false;
  let askedAt: Moment | null = null;
  return {
    /** To be asked before each piece of the work. It asks the database now and then. */
    async isMine(): Promise<boolean> {
      if (store.dialect === "sqlite") return true;
      if (askedAt !== null && !isOlder(askedAt, ms / RENEWALS)) return isHeld;
      askedAt = thisMoment();
      isHeld = false;
      isHeld = await takeTurn(store, job, ms, holder);
      return isHeld;
    },
    /** The next one need not wait. */
    async end(): Promise<void> {
      if (!isHeld) return;
      await store.write(async ({ db, tables: { turns: t } }) => {
        await db.delete(t).where(and(eq(t.job, job), eq(t.holder, holder)));
      });
    },
  };
}
