// What the program tells people to run next: commands that work when they are copied as they stand, however this program was
// started, and the help for newcomers after the very first start.
import { join, relative } from "node:path";
import type { Config } from "../config.ts";
import { DATABASE_FILE, MASTER_KEY_FILE } from "../keys/master-keys.ts";

interface Program {
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
  // Services run at the root, and the readers of their log are elsewhere.
  if (cwd === "/" || near.startsWith("..")) return path;
  return near.includes("/") ? near : `./${near}`;
}

/** For a POSIX shell. */
export function quoted(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

type Settings = Pick<Config, "dataDir" | "identity">;

/**
 * Printed once, beside the structured log, when the master key has just been generated.
 *
 * @param url where the gateway listens, without a slash at its end
 */
export function welcomeText({ dataDir, identity }: Settings, url: string, program: Program): string {
  const place = relative(program.cwd, dataDir) === "data" ? "" : ` --data-dir ${quoted(dataDir)}`;
  const token =
    identity.oidc === null
      ? `${programText(program)} token --tenant acme --user me${place}`
      : `from ${identity.oidc.issuer}`;
  return `
  tollgate has made itself at home.

    database     ${join(dataDir, DATABASE_FILE)}
    master key   ${join(dataDir, MASTER_KEY_FILE)}  (keep a copy: the secrets in the database need it)
    gateway      ${url}
    try it out   ${url}/swagger
    manual       ${url}/docs
    a token      ${token}

`;
}
