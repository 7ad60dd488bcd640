// How this program was started, for the commands that it tells people to run next: they must work when they are
// copied as they stand.
import { relative } from "node:path";

export interface Program {
  /** The working directory. */
  readonly cwd: string;
  /** Null in the compiled binary. */
  readonly script: string | null;
  readonly executable: string;
  readonly bunVersion: string;
}

export function thisProgram(): Program {
  return {
    cwd: process.cwd(),
    script: Bun.isStandaloneExecutable ? null : Bun.main,
    executable: process.execPath,
    bunVersion: Bun.version,
  };
}

/** The words that start this program again from the same directory. */
export function programText({ cwd, script, executable, bunVersion }: Program): string {
  if (script === null) return quoted(shorter(cwd, executable));
  // Bun started by npx is not on the PATH.
  const bun = executable.includes("/node_modules/") ? `npx --yes bun@${bunVersion}` : "bun";
  return `${bun} ${quoted(shorter(cwd, script))}`;
}

function shorter(cwd: string, path: string): string {
  const near = relative(cwd, path);
  // At the root are services, and whoever reads their log is elsewhere.
  if (cwd === "/" || near.startsWith("..")) return path;
  return near.includes("/") ? near : `./${near}`;
}

/** For a POSIX shell. */
export function quoted(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
