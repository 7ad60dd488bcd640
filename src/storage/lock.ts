// At most one gateway or facilitator on a data directory: a second one would take what the first has under way for
// what a dead process left. The lock is an SQLite lock on a file of its own, so that it goes with the process,
// however that ends, and so that commands can open the database meanwhile.
import { Database, SQLiteError } from "bun:sqlite";
import { closeSync, mkdirSync, openSync } from "node:fs";
import { join } from "node:path";
import { StartupProblem } from "../core/startup.ts";

export interface DataDirLock {
  release(): void;
}

/** @throws StartupProblem when another process holds the directory. */
export function acquireDataDirLock(dir: string): DataDirLock {
  mkdirSync(dir, { recursive: true, mode: 0o700 });
  const path = join(dir, "tollgate.lock");
  closeSync(openSync(path, "a", 0o600));
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
