// The directory of a private CA: 0700, its files 0600. No file ever replaces another, since a lost CA key can't be made
// again.
import { mkdirSync, readFileSync, statSync, unlinkSync } from "node:fs";
import { join } from "node:path";
import { StartupProblem } from "../../core/startup.ts";
import { placePrivateFile, syncDirectory } from "../../storage/private-file.ts";

const FILE_BYTES_MAX = 65_536;

/** @throws StartupProblem when it can't be read, or is too large to be such a file */
export function readPem(path: string, hint: string): string {
  try {
    if (statSync(path).size <= FILE_BYTES_MAX) return readFileSync(path, "utf8");
  } catch (cause) {
    throw new StartupProblem(`${path} must be readable${codeIn(cause)}: ${hint}`, { cause });
  }
  throw new StartupProblem(`${path} must be a PEM file of at most ${FILE_BYTES_MAX} bytes`);
}

/**
 * Writes all of them or none.
 *
 * @param files texts by name
 * @returns whether others than the owner may look into the directory
 * @throws StartupProblem when one is there already or can't be written
 */
export function writeNew(dir: string, files: Readonly<Record<string, string>>): { readonly shared: boolean } {
  const written: string[] = [];
  let at = dir;
  try {
    mkdirSync(dir, { recursive: true, mode: 0o700 });
    for (const [name, text] of Object.entries(files)) {
      at = join(dir, name);
      placePrivateFile(at, join(dir, `.${name}.${crypto.randomUUID()}`), text);
      written.push(at);
    }
    syncDirectory(dir);
    return { shared: (statSync(dir).mode & 0o077) !== 0 };
  } catch (cause) {
    for (const path of written) unlinkSync(path);
    const isTaken = codeOf(cause) === "EEXIST" && at !== dir;
    const problem = isTaken ? "is there already, and nothing is ever written over" : `must be writable${codeIn(cause)}`;
    throw new StartupProblem(`${at} ${problem}`, { cause });
  }
}

function codeOf(cause: unknown): string | null {
  return cause instanceof Error && "code" in cause ? String(cause.code) : null;
}

function codeIn(cause: unknown): string {
  const code = codeOf(cause);
  return code === null ? "" : ` (${code})`;
}
