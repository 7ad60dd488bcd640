// The data directory: its lock, and how files of secrets are written.
//
// At most one gateway or facilitator works on a data directory: a second one would take the first one's calls for the
// leavings of a dead process. The lock is an SQLite lock on a file of its own, so it ends with the process, however that
// ends, and commands can open the database meanwhile.
//
// A file of secrets can't be made again. It is readable by its owner only, appears under its name once it is whole and on
// the disk, and never replaces another file: a link fails if the name is taken, and a rename would not.
import { Database, SQLiteError } from "bun:sqlite";
import {
  closeSync,
  existsSync,
  fchownSync,
  fsyncSync,
  linkSync,
  mkdirSync,
  openSync,
  readFileSync,
  statSync,
  unlinkSync,
  writeFile,
  writeSync,
} from "node:fs";
import { hostname, uptime } from "node:os";
import { dirname, join } from "node:path";
import { StartupProblem } from "../core/startup.ts";
import type { Clock } from "../core/time.ts";

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
interface LockHolder {
  readonly holder: string;
  readonly host: string;
  readonly file: string;
  /** When the machine was started, by the wall clock in milliseconds: a step of that makes it another start. */
  readonly started_at: number;
}

/**
 * Takes the lock where no other process has it.
 *
 * @returns `previous`: who held it before and is therefore gone; null when nothing proves that. `note` tells the next process
 *   who holds it, once nothing is left of the one before. Without a lock `note` and `release` do nothing
 */
export function takeOver(dir: string, holder: string, { now }: Clock) {
  let lock: ReturnType<typeof acquireDataDirLock> | null = null;
  try {
    lock = acquireDataDirLock(dir);
    const { dev, ino } = statSync(join(dir, LOCK_FILE));
    const held: LockHolder = { holder, host: hostname(), file: `${dev} ${ino}`, started_at: now() - uptime() * 1000 };
    const path = join(dir, "tollgate.replica");
    ensurePrivateFile(path);
    const before = readHeld(path);
    const isSame = before?.host === held.host && before.file === held.file;
    const isOneStart = isSame && Math.abs(before.started_at - held.started_at) < 5_000;
    // Where it can't be written, the next process waits until the lease has run out.
    const note = () => writeFile(path, JSON.stringify(held), () => {});
    return { previous: isOneStart ? before.holder : null, note, release: lock.release };
  } catch {
    // Another replica has the directory, or nobody may write there: then leases run out as everywhere.
    return { previous: null, note() {}, release: () => lock?.release() };
  }
}

function readHeld(path: string): LockHolder | null {
  try {
    return JSON.parse(readFileSync(path, "utf8")) as LockHolder;
  } catch {
    return null;
  }
}

export interface Owner {
  readonly uid: number;
  readonly gid: number;
}

const ROOT = 0;

/**
 * The name is durable after `syncDirectory`.
 *
 * @param draft a name in the same directory that nobody else uses; it is gone afterwards
 * @param owner whom root makes it for; who is not root makes it for himself
 * @throws what the file system says, `EEXIST` when the name is taken
 */
export function placePrivateFile(path: string, draft: string, text: string, owner?: Owner): void {
  try {
    writeDurably(draft, text, owner);
    linkSync(draft, path);
  } finally {
    if (existsSync(draft)) unlinkSync(draft);
  }
}

/**
 * An empty file for its owner only. One that root makes belongs to whom its directory belongs to: beside a service that is
 * its user, who has to open it.
 *
 * @throws what the file system says, `EEXIST` when the name is taken, also by a link
 */
export function makePrivateFile(path: string): void {
  const file = openSync(path, "wx", 0o600);
  try {
    if (process.getuid?.() !== ROOT) return;
    const { uid, gid } = statSync(dirname(path));
    fchownSync(file, uid, gid);
  } finally {
    closeSync(file);
  }
}

/** As `makePrivateFile`, where the file may be there already. */
export function ensurePrivateFile(path: string): void {
  try {
    makePrivateFile(path);
  } catch (error) {
    if (!(error instanceof Error && "code" in error && error.code === "EEXIST")) throw error;
    closeSync(openSync(path, "a", 0o600));
  }
}

function writeDurably(path: string, text: string, owner: Owner | undefined): void {
  const file = openSync(path, "wx", 0o600);
  try {
    if (owner !== undefined && process.getuid?.() === ROOT) fchownSync(file, owner.uid, owner.gid);
    writeSync(file, text);
    fsyncSync(file);
  } finally {
    closeSync(file);
  }
}

export function syncDirectory(path: string): void {
  const directory = openSync(path, "r");
  try {
    fsyncSync(directory);
  } finally {
    closeSync(directory);
  }
}
