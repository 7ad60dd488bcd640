// Copies an SQLite database while a service writes to it, and checks copies. A copy is one file: SQLite writes it from a snapshot
// of the database, without holding up writers. The write-ahead log grows meanwhile. A restore puts a copy in place in one step.
import { Database, SQLiteError } from "bun:sqlite";
import { accessSync, constants, existsSync, renameSync, rmSync, statfsSync, statSync } from "node:fs";
import { dirname } from "node:path";
import { errorCode } from "../../core/fault.ts";
import { StartupProblem } from "../../core/startup.ts";
import { giveName, keepAs, makePrivateFile, requireUsable, syncToDisk } from "../data-dir.ts";
import { isSqliteBusy } from "../failures.ts";
import { fitOf, schemaOf, tooNewText, versionsOnSqlite } from "../migrate.ts";
import { markCopy, withFile } from "../restoration.ts";
import { wrappedKeys } from "./inspect.ts";

const MIB = 1024 ** 2;
/** Space that is left for the database's write-ahead log, which grows while a copy is made. */
const BYTES_SPARED = 64 * MIB;

/**
 * Copies everything that was committed before the call. The copy has mode 0600, appears under its name only when it is complete
 * and on disk, never replaces another file, and is marked as a copy.
 * @param begins is told the file that is written, and the size that it will have
 * @throws StartupProblem when `from` holds no database, there is not enough space, or `to` can't be written
 */
export function copySqlite(from: string, to: string, now: number, begins = (_path: string, _bytes: number) => {}) {
  if (existsSync(to)) {
    const advice = `tollgate backup --verify ${to} checks it`;
    throw new StartupProblem(`${to} already exists, and a backup never overwrites a file; if it is a copy, ${advice}`);
  }
  if (statSync(from, { throwIfNoEntry: false }) === undefined) {
    throw new StartupProblem(`there is no database at ${from}`);
  }
  requireWritable(dirname(to));
  const draft = `${to}.${crypto.randomUUID()}`;
  try {
    const bytes = bytesOf(from);
    requireRoom(dirname(to), bytes);
    makePrivateFile(draft);
    begins(draft, bytes);
    withFile(from, (connection) => connection.run("vacuum into ?", [draft]));
    markCopy(draft, now);
    syncToDisk(draft);
    giveName(draft, to);
    syncToDisk(dirname(to));
  } catch (cause) {
    if (cause instanceof StartupProblem) throw cause;
    throw new StartupProblem(`${to} can't be written: ${(cause as Error).message}`, { cause });
  } finally {
    for (const leftover of [draft, `${draft}-journal`]) rmSync(leftover, { force: true });
  }
}

function requireWritable(directory: string): void {
  if (!existsSync(directory)) throw new StartupProblem(`the directory ${directory} does not exist: make it first`);
  try {
    accessSync(directory, constants.W_OK | constants.X_OK);
  } catch (cause) {
    const problem = `the directory ${directory} must be writable by this user (${errorCode(cause)})`;
    throw new StartupProblem(problem, { cause });
  }
}

/** The size that a copy will have: free pages are not copied. */
function bytesOf(from: string): number {
  const query = `select (select count(*) from sqlite_schema) as tables,
    (page_count - freelist_count) * page_size as bytes
    from pragma_page_count, pragma_freelist_count, pragma_page_size`;
  try {
    const found = withFile(from, (file) => file.query<{ tables: number; bytes: number }, []>(query).get());
    if (found !== null && found.tables > 0) return found.bytes;
  } catch (cause) {
    requireUsable(from);
    throw new StartupProblem(`${from} can't be read as a database: ${(cause as Error).message}`, { cause });
  }
  throw new StartupProblem(`the database at ${from} is empty`);
}

/** Checks the free space, since a copy that fills the database's disk would make the service refuse calls. */
function requireRoom(directory: string, bytes: number): void {
  const { bavail, bsize } = statfsSync(directory);
  if (bavail * bsize > bytes + BYTES_SPARED) return;
  const [needed, free] = [Math.ceil((bytes + BYTES_SPARED) / MIB), Math.floor((bavail * bsize) / MIB)];
  throw new StartupProblem(`${directory} must have ${needed} MiB free for a copy, and has ${free} MiB`);
}

/** What is wrong with a copy, or what it holds. Reads the whole file, as SQLite's `integrity_check` does. */
export function checkSqliteCopy(path: string) {
  try {
    accessSync(path, constants.R_OK);
    if (statSync(path).isDirectory()) return { problem: "it is a directory" };
  } catch (error) {
    const code = errorCode(error);
    return { problem: code === "ENOENT" ? "there is no such file" : `it must be readable by this user (${code})` };
  }
  const part = [`${path}-wal`, `${path}-journal`].find(
    (file) => (statSync(file, { throwIfNoEntry: false })?.size ?? 0) > 0,
  );
  if (part !== undefined) {
    return { problem: `a part of it is in ${part}, and a restore takes one file: copy it with tollgate backup first` };
  }
  let copy: Database | null = null;
  try {
    copy = new Database(path, { readonly: true });
    const rows = copy.query<{ integrity_check: string }, []>("pragma integrity_check(5)").all();
    const found = rows.map(({ integrity_check }) => integrity_check).join("; ");
    if (found !== "ok") return { problem: `it is damaged: ${found}` };
    const schema = schemaOf(versionsOnSqlite(copy));
    const fit = fitOf(schema);
    if (fit === "none") return { problem: "it is not a complete tollgate database: it has no schema" };
    if (fit === "too new") return { problem: `it has ${tooNewText(schema)}` };
    return { problem: null, bytes: statSync(path).size, schema, keys: wrappedKeys(copy) };
  } catch (error) {
    if (error instanceof StartupProblem) return { problem: error.message };
    if (!(error instanceof SQLiteError)) throw error;
    return { problem: `it is not a complete tollgate database: ${error.message}` };
  } finally {
    copy?.close();
  }
}

/** What may lie beside a database and would be read with the new file. */
const WORKING_FILES = ["-journal", "-wal", "-shm"];

/**
 * Puts a new database in the place of one that no service uses: at every moment the name belongs to one of the two, whole. The old
 * one is kept as `before`. The new name is durable after `syncToDisk`. If this fails, everything is as before.
 * @throws StartupProblem when another program uses the old database; the error of the file system or of SQLite
 */
export function replaceSqlite(draft: string, path: string, before: string): void {
  withoutLog(draft)?.close();
  syncToDisk(draft);
  const isThere = existsSync(path);
  const old = isThere ? withoutLog(path) : null;
  const undo: (() => void)[] = [];
  try {
    if (isThere) {
      keepAs(path, before);
      undo.push(() => rmSync(before));
    }
    old?.lock();
    // Such files are left only where SQLite can't read the database, or where the database is missing.
    for (const part of WORKING_FILES.filter((part) => existsSync(path + part))) {
      renameSync(path + part, before + part);
      undo.push(() => renameSync(before + part, path + part));
    }
    syncToDisk(dirname(path));
    renameSync(draft, path);
  } catch (error) {
    for (const step of undo.toReversed()) step();
    throw error;
  } finally {
    old?.close();
  }
}

/**
 * Brings all of a database into its one file, so that it has no write-ahead log. `lock` keeps other programs from the file until
 * `close`. Until then this process must not open and close the file otherwise, which would end the lock.
 * @returns null for a file that SQLite can't read
 * @throws StartupProblem when another program uses the file; SQLite's error
 */
function withoutLog(path: string) {
  requireUsable(path);
  if (statSync(path).size === 0) return null;
  const file = new Database(path, { readwrite: true, create: false });
  const ask = (pragma: string): unknown => {
    using statement = file.prepare<Record<string, unknown>, []>(`pragma ${pragma}`);
    return Object.values(statement.get() ?? {})[0];
  };
  function unlessUsed<T>(work: () => T): T {
    try {
      return work();
    } catch (error) {
      if (!isSqliteBusy(error)) throw error;
      throw new StartupProblem(`another program uses ${path}: end it, and run the command again`, { cause: error });
    }
  }
  try {
    file.run("pragma busy_timeout = 10000");
    unlessUsed(() => ask("journal_mode = delete"));
    const version = ask("data_version");
    return {
      lock() {
        unlessUsed(() => file.run("begin exclusive"));
        const isSame = ask("journal_mode") === "delete" && ask("data_version") === version;
        if (!isSame) throw new StartupProblem(`another program has changed ${path} meanwhile: run the command again`);
      },
      close: () => file.close(),
    };
  } catch (error) {
    file.close();
    if (error instanceof SQLiteError && /^SQLITE_(NOTADB|CORRUPT)/.test(error.code ?? "")) return null;
    throw error;
  }
}
