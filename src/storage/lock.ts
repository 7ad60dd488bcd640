// At most one gateway or facilitator on a data directory: a second one would take the first one's work under way for the
// leavings of a dead process. The lock is an SQLite lock on a file of its own, so it ends with the process, however that
// ends, and commands can open the database meanwhile.
import { Database, SQLiteError } from "bun:sqlite";
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { StartupProblem } from "../core/startup.ts";
import { ensurePrivateFile } from "./private-file.ts";

/** @throws StartupProblem when another process holds the directory. */
export function acquireDataDirLock(dir: string) {
  mkdirSync(dir, { recursive: true, mode: 0o700 });
  const path = join(dir, "tollgate.lock");
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
