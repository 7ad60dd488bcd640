// The record that a database was restored to an older state. Work that was open in that state, and work that the state does
// not know, may have happened since, so the services act by the time of the restore. It is recorded once, before any service
// starts: by `tollgate restore`, or by a service that starts on a copy made by `tollgate backup`, which carries a mark.
//
// The mark is SQLite's user_version, in the header of the file, so that a copy of any schema can carry it.
import { Database } from "bun:sqlite";
import { eq, gt, sql } from "drizzle-orm";
import { StartupProblem } from "../core/startup.ts";
import type { Store, StoreTools, Tx } from "./store.ts";

const RESTORATION_ROW = 1;
const MINUTE_MS = 60_000;

/** Marks a copy with the time at which it was made. @param path of a copy that no other process has open */
export function markCopy(path: string, now: number): void {
  withFile(path, (file) => file.run(`pragma user_version = ${Math.floor(now / MINUTE_MS)}`));
}

/** When the file was made as a copy, to the minute; null for a file without a mark. */
function copiedAt(path: string): Date | null {
  const minutes = withFile(path, (file) => file.query<{ user_version: number }, []>("pragma user_version").get());
  return minutes === null || minutes.user_version === 0 ? null : new Date(minutes.user_version * MINUTE_MS);
}

/** Removes the mark. Call this once the restore is recorded. */
export function unmarkCopy(path: string): void {
  withFile(path, (file) => file.run("pragma user_version = 0"));
}

/** Works on the file of a database, which a service may be using. */
export function withFile<T>(path: string, work: (file: Database) => T): T {
  // Reading the write-ahead log of a running service needs write access to its index.
  using file = new Database(path, { readwrite: true, create: false });
  // A service that recovers after a crash, or ends, locks the file for a moment.
  file.run("pragma busy_timeout = 10000");
  return work(file);
}

/**
 * Records that the database was restored to an older state just now. If this is cut short, no service starts until it is rerun.
 * @param settle ends the calls and payments that the copy had open; must be idempotent
 * @throws StartupProblem when a gateway or facilitator runs on the database, since it would not learn of the restore
 */
export async function recordRestore(store: Store, settle: () => Promise<void>): Promise<void> {
  await store.write(async (tx) => {
    await requireNoService(store, tx);
    const { restoration: t } = tx.tables;
    const now = sql<number>`${tx.now}`;
    await tx.db
      .insert(t)
      .values({ one: RESTORATION_ROW, restored_at: now, is_done: false })
      .onConflictDoUpdate({ target: t.one, set: { restored_at: now, is_done: false } });
  });
  // While the server was away all leases expired, and a service that was not stopped reconnects only now. Six seconds are
  // longer than the time between two renewals of a lease (storage/leases.ts).
  if (store.isShared) await Bun.sleep(6_000);
  await store.write((tx) => requireNoService(store, tx));
  await settle();
  await store.write(async ({ db, tables: { restoration: t } }) => {
    await db.update(t).set({ is_done: true }).where(eq(t.one, RESTORATION_ROW));
  });
}

/** On SQLite the lock of the data directory already excludes a running service. */
async function requireNoService({ isShared }: Store, { db, tables, now }: Tx): Promise<void> {
  if (!isShared) return;
  const { processes: t } = tables;
  const [running] = await db.select({ id: t.id }).from(t).where(gt(t.lease_until, now)).limit(1);
  if (running === undefined) return;
  throw new StartupProblem("the gateways and facilitators of this database must be stopped, for 15 seconds at least");
}

/** Whether the database itself tells that it was restored: a copy by its mark, and any other after a restore that was cut short. */
export async function tellsRestore({ read }: Store, file: string | null): Promise<boolean> {
  if (file !== null && copiedAt(file) !== null) return true;
  const [row] = await read.db.select().from(read.tables.restoration);
  return row?.is_done === false;
}

interface Start extends Pick<StoreTools, "store" | "log"> {
  /** The database's file; null for a database server. */
  readonly file: string | null;
  readonly settle: () => Promise<void>;
}

/**
 * A service calls this before it does anything else: it completes the restore of a marked copy.
 * @returns when the database was restored, in milliseconds by its own clock; null when it never was
 * @throws StartupProblem when `tollgate restore` was cut short
 */
export async function startRestored({ store, file, settle, log }: Start): Promise<number | null> {
  const copied = file === null ? null : copiedAt(file);
  if (file !== null && copied !== null) {
    await recordRestore(store, settle);
    unmarkCopy(file);
    log.warn("database_restored", { copied_at: copied.toISOString(), hint: "see Restore in tollgate help backups" });
  }
  const { db, tables } = store.read;
  const [row] = await db.select().from(tables.restoration);
  if (row?.is_done === false) throw new StartupProblem("tollgate restore must be run again: it was cut short");
  return row?.restored_at ?? null;
}
