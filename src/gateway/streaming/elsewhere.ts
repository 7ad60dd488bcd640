// Calls that run here and were ended elsewhere: cancelled at another replica, or given up for dead by one. Their
// records say that they are over, so they are broken off for their callers too, within two seconds.
import { and, eq } from "drizzle-orm";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Streams } from "./streams.ts";

const LOOK_MS = 1_000;

export interface ElsewhereOptions {
  readonly store: Store;
  readonly log: Log;
  /** This replica's ID. */
  readonly replica: string;
  readonly streams: Pick<Streams, "running" | "stop">;
}

/** Looks for them from now on, where there may be other replicas; gives what stops it. */
export function stopEndedElsewhere(options: ElsewhereOptions): () => void {
  const { store, log } = options;
  if (store.dialect === "sqlite") return () => {};
  let timer: ReturnType<typeof setTimeout> | undefined;
  let isOver = false;
  function schedule(): void {
    timer = setTimeout(async () => {
      await stopOnce(options).catch((error) => log.warn("calls that were ended not looked at", { error }));
      if (!isOver) schedule();
    }, LOOK_MS);
  }
  schedule();
  return () => {
    isOver = true;
    clearTimeout(timer);
  };
}

export async function stopOnce({ store, replica, streams }: Omit<ElsewhereOptions, "log">): Promise<void> {
  // Listed first: each of them was running in the database before.
  const here = streams.running();
  if (here.length === 0) return;
  const { invocations: t } = store.read.tables;
  const rows = await store.read.db
    .select({ id: t.id })
    .from(t)
    .where(and(eq(t.status, "running"), eq(t.owner, replica)));
  const alive = new Set(rows.map(({ id }) => id));
  for (const id of here) if (!alive.has(id)) streams.stop(id);
}
