// The data directory: its lock, and how secret files are written into it.
//
// At most one gateway or facilitator works on a data directory: a second one would take the first one's calls for those of a
// dead process. The lock is an SQLite lock on a file of its own: it ends with the process, and commands can open the database.
//
// A secret file can't be recreated. It is readable by its owner only, appears under its name only when it is complete and on
// disk, and never replaces another file: it is linked into place, which fails if the name is taken, while a rename would not.
// Some file systems have no hard links (exFAT, some network shares); `giveName` does without.
import { Database, SQLiteError } from "bun:sqlite";
import * as fs from "node:fs";
import { hostname, uptime } from "node:os";
import { dirname, join } from "node:path";
import { errorCode } from "../core/fault.ts";
import { pathProblem, StartupProblem } from "../core/startup.ts";
import type { Clock } from "../core/time.ts";

const LOCK_FILE = "tollgate.lock";

/** @param advice follows the problem. @throws StartupProblem when another process holds the directory. */
export function acquireDataDirLock(dir: string, advice = "") {
  fs.mkdirSync(dir, { recursive: true, mode: 0o700 });
  const path = join(dir, LOCK_FILE);
  ensurePrivateFile(path);
  const file = new Database(path, { readwrite: true });
  try {
    file.run("begin exclusive");
  } catch (error) {
    file.close();
    if (!(error instanceof SQLiteError) || !error.code?.startsWith("SQLITE_BUSY")) throw error;
    throw new StartupProblem(`another tollgate runs on the data directory ${dir}${advice}`, { cause: error });
  }
  return { release: () => file.close() };
}

/** A process that held the lock. In a copy of the directory, or on another machine, the file or the machine's start differs. */
interface LockHolder {
  readonly holder: string;
  readonly host: string;
  readonly file: string;
  /** When the machine was booted, by the wall clock in milliseconds; after a step of the clock it counts as another boot. */
  readonly started_at: number;
}

/**
 * Takes the lock if no other process has it.
 * @returns `previous`: the holder before, which is proven dead; null when that can't be proven. `note` records this holder for
 *   the next process; call it when nothing is left of the previous one. Without the lock `note` and `release` do nothing
 */
export function takeOver(dir: string, holder: string, { now }: Clock) {
  let lock: ReturnType<typeof acquireDataDirLock> | null = null;
  try {
    lock = acquireDataDirLock(dir);
    const { dev, ino } = fs.statSync(join(dir, LOCK_FILE));
    const held: LockHolder = { holder, host: hostname(), file: `${dev} ${ino}`, started_at: now() - uptime() * 1000 };
    const path = join(dir, "tollgate.replica");
    ensurePrivateFile(path);
    const before = readHolder(path);
    const isSame = before?.host === held.host && before.file === held.file;
    const isOneBoot = isSame && Math.abs(before.started_at - held.started_at) < 5_000;
    // If the write fails, the next process waits until the leases have run out.
    const note = () => fs.writeFile(path, JSON.stringify(held), () => {});
    return { previous: isOneBoot ? before.holder : null, note, release: lock.release };
  } catch {
    // Another replica has the directory, or it is not writable: then leases run out as on other databases.
    return { previous: null, note() {}, release: () => lock?.release() };
  }
}

function readHolder(path: string): LockHolder | null {
  try {
    return JSON.parse(fs.readFileSync(path, "utf8")) as LockHolder;
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
 * Writes a secret file. Its name is durable after `syncToDisk`.
 * @param draft an unused name in the same directory for the time of writing
 * @param owner the file's owner, if this process runs as root; otherwise the process's user
 * @throws the file system's error, `EEXIST` when the name is taken
 */
export function placePrivateFile(path: string, draft: string, text: string, owner?: Owner): void {
  try {
    createPrivately(draft, owner, (file) => {
      fs.writeSync(file, text);
      fs.fsyncSync(file);
    });
    giveName(draft, path);
  } finally {
    if (fs.existsSync(draft)) fs.unlinkSync(draft);
  }
}

/**
 * Gives a complete file its name, which must be free. The draft's own name may remain, for the caller to remove. Without hard
 * links an empty file takes the name first, and the draft replaces it.
 * @throws the file system's error, `EEXIST` when the name is taken
 */
export function giveName(draft: string, path: string): void {
  try {
    fs.linkSync(draft, path);
  } catch (error) {
    if (errorCode(error) === "EEXIST") throw error;
    fs.closeSync(fs.openSync(path, "wx", 0o600));
    try {
      fs.renameSync(draft, path);
    } catch (cause) {
      fs.unlinkSync(path);
      throw cause;
    }
  }
}

/** Keeps a file under a second name: as a link, or without hard links as a copy. @throws the file system's error */
export function keepAs(path: string, kept: string): void {
  try {
    fs.linkSync(path, kept);
  } catch {
    const draft = `${kept}.${crypto.randomUUID()}`;
    try {
      makePrivateFile(draft);
      fs.copyFileSync(path, draft);
      syncToDisk(draft);
      giveName(draft, kept);
    } finally {
      fs.rmSync(draft, { force: true });
    }
  }
}

/**
 * Creates an empty file for its owner alone. If root creates it, it belongs to its directory's owner, as whom the service runs.
 * @throws the file system's error, `EEXIST` when the name is taken, also by a link
 */
export function makePrivateFile(path: string): void {
  createPrivately(path, fs.statSync(dirname(path)), () => {});
}

/** As `makePrivateFile`, but the file may exist already. */
export function ensurePrivateFile(path: string): void {
  try {
    makePrivateFile(path);
  } catch (error) {
    if (errorCode(error) !== "EEXIST") throw error;
    fs.closeSync(fs.openSync(path, "a", 0o600));
  }
}

/**
 * Makes sure that this user may use the files of an SQLite database that are there: SQLite does not say which one it can't open.
 * @throws StartupProblem when one can't be used
 */
export function requireUsable(database: string): void {
  for (const path of [database, `${database}-wal`, `${database}-shm`]) {
    try {
      fs.accessSync(path, fs.constants.R_OK | fs.constants.W_OK);
    } catch (error) {
      // The process that ends last removes the log and its index.
      if (errorCode(error) === "ENOENT") continue;
      throw pathProblem(error) ?? error;
    }
    if (fs.statSync(path, { throwIfNoEntry: false })?.isDirectory()) {
      throw new StartupProblem(`${path} must be a file, and is a directory`);
    }
  }
}

/** @param owner of the file, if this process runs as root */
function createPrivately(path: string, owner: Owner | undefined, fill: (file: number) => void): void {
  const file = fs.openSync(path, "wx", 0o600);
  try {
    if (owner !== undefined && process.getuid?.() === ROOT) fs.fchownSync(file, owner.uid, owner.gid);
    fill(file);
  } finally {
    fs.closeSync(file);
  }
}

/** Makes a file durable, or the names of the files in a directory. */
export function syncToDisk(path: string): void {
  const opened = fs.openSync(path, "r");
  try {
    fs.fsyncSync(opened);
  } finally {
    fs.closeSync(opened);
  }
}
