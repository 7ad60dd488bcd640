// The data directory, 0700: it holds the database and the key that opens the secrets in it. It is judged with
// the rest of the configuration and made only when nothing else is wrong.
import { randomUUID } from "node:crypto";
import { accessSync, closeSync, constants, mkdirSync, openSync, statSync, unlinkSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { StartupProblem } from "../core/startup.ts";

const MUST = "must be a directory that can be created and written";

/** Null when the directory is there and writable, or can be created. Changes nothing. */
export function checkDataDir(path: string): string | null {
  for (let at = resolve(path); ; at = dirname(at)) {
    const found = stat(at);
    if (found !== undefined) return found.isDirectory() && isWritable(at) ? null : `${MUST} (${at} is not)`;
    if (at === dirname(at)) return MUST;
  }
}

/** Undefined also below a file, and where this process may not look. */
function stat(path: string) {
  try {
    return statSync(path);
  } catch {
    return undefined;
  }
}

function isWritable(path: string): boolean {
  try {
    accessSync(path, constants.R_OK | constants.W_OK | constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/**
 * Creates the directory if need be and writes to it once, since permissions alone do not tell of a full or
 * read-only disk.
 *
 * @returns whether others than the owner may look into it
 * @throws StartupProblem
 */
export function makeDataDir(path: string): { readonly shared: boolean } {
  try {
    mkdirSync(path, { recursive: true, mode: 0o700 });
    // A new name each time: a file that a crash left behind must not be in the way.
    const trial = join(path, `.trial-${randomUUID()}`);
    closeSync(openSync(trial, "wx", 0o600));
    unlinkSync(trial);
    return { shared: (statSync(path).mode & 0o077) !== 0 };
  } catch (cause) {
    const reason = cause instanceof Error && "code" in cause ? ` (${String(cause.code)})` : "";
    throw new StartupProblem(`TOLLGATE_DATA_DIR ${MUST}${reason}`, { cause });
  }
}
