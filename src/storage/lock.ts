// At most one gateway or facilitator on a data directory: a second one would take the first one's work under way for the
// leavings of a dead process. The lock is an SQLite lock on a file of its own, so it ends with the process, however that
// ends, and commands can open the database meanwhile.
import { Database, SQLiteError } from "bun:sqlite";
import { mkdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { hostname, uptime } from "node:os";
import { join } from "node:path";
import type { Clock } from "../core/clock.ts";
import { StartupProblem } from "../core/startup.ts";
import { ensurePrivateFile } from "./private-file.ts";

const LOCK_FILE = "tollgate.lock";

/** @throws StartupProblem when another process holds the directory. */
export function acquireDataDirLock(dir: string) {
  mkdirSync(dir, { recursive: true, mode: 0o700 });
  const path = join(dir, LOCK_FILE);
  ensurePrivateFile(path);
  const file = new Database(path, { readwrite: true });
  try {
    file.run("begin exclusive");
  } catch (error) {
    file.close();
    if (!(error instanceof SQLiteError) || !error.code?.startsWith("SQLITE_BUSY")) throw error;
    throw new StartupProblem(`another tollgate runs on the data directory ${dir}`, { cause: error });
  }
  return { release: () => file.close() };
}

/** Where and when a process held the lock. A copy of the directory, or the one of another machine, shows another file or start. */
interface Held {
  readonly holder: string;
  readonly host: string;
  readonly file: string;
  /** When the machine was started, by the wall clock in milliseconds: a step of that makes it another start. */
  readonly started_at: number;
}

const STARTED_MS_APART_MAX = 5_000;

/**
 * Takes the lock where no other process has it, and notes who holds it.
 *
 * @returns who held it before and is therefore gone; null when nothing proves that. `release` does nothing without a lock
 */
export function takeOver(dir: string, holder: string, { now }: Clock): { previous: string | null; release(): void } {
  let lock: ReturnType<typeof acquireDataDirLock> | null = null;
  try {
    lock = acquireDataDirLock(dir);
    const { dev, ino } = statSync(join(dir, LOCK_FILE));
    const held: Held = { holder, host: hostname(), file: `${dev} ${ino}`, started_at: now() - uptime() * 1000 };
    const path = join(dir, "tollgate.replica");
    ensurePrivateFile(path);
    const before = readHeld(path);
    writeFileSync(path, JSON.stringify(held));
    const isSame = before?.host === held.host && before.file === held.file;
    const isOneStart = isSame && Math.abs(before.started_at - held.started_at) < STARTED_MS_APART_MAX;
    return { previous: isOneStart ? before.holder : null, release: lock.release };
  } catch {
    // Another replica has the directory, or nobody may write there: then leases run out as everywhere.
    return { previous: null, release: () => lock?.release() };
  }
}

function readHeld(path: string): Held | null {
  try {
    return JSON.parse(readFileSync(path, "utf8")) as Held;
  } catch {
    return null;
  }
}
