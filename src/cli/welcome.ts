// What a newcomer needs after the very first start, in one block for people. It is printed once, beside the
// structured log, when the master key has just been generated.
import { join, relative } from "node:path";
import type { Config } from "../config.ts";
import { DATABASE_FILE, MASTER_KEY_FILE } from "../keys/master-key.ts";

type Settings = Pick<Config, "dataDir" | "identity">;

export interface Program {
  /** The working directory. */
  readonly cwd: string;
  /** Null in the compiled binary. */
  readonly script: string | null;
  readonly executable: string;
  readonly bunVersion: string;
}

/** @param url where the gateway listens, without a slash at its end */
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
    a token      ${token}

`;
}

/** The words that start this program again from the same directory. */
function programText({ cwd, script, executable, bunVersion }: Program): string {
  if (script === null) return quoted(shorter(cwd, executable));
  // Bun that came by npx is on nobody's PATH.
  const bun = executable.includes("/node_modules/") ? `npx --yes bun@${bunVersion}` : "bun";
  return `${bun} ${quoted(shorter(cwd, script))}`;
}

function shorter(cwd: string, path: string): string {
  const near = relative(cwd, path);
  if (near.startsWith("..")) return path;
  return near.includes("/") ? near : `./${near}`;
}

/** For a POSIX shell. */
function quoted(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
