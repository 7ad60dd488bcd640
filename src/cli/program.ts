// Texts that tell people what to run next: commands that can be copied as they are, however this program was started, and the
// welcome after the very first start.
import { existsSync } from "node:fs";
import { join, relative } from "node:path";
import type { Config } from "../config.ts";
import { DATABASE_FILE, MASTER_KEY_FILE } from "../keys/master-keys.ts";

/** The words that start this program again from the same directory. */
export function programText(): string {
  const typed = process.argv0;
  if (Bun.isStandaloneExecutable) {
    if (!typed.includes("/") && Bun.which(typed) !== null) return typed;
    return quoted(shorter(existsSync(typed) ? typed : process.execPath));
  }
  // Bun started by npx is not on the PATH.
  const bun = process.execPath.includes("/node_modules/") ? `npx --yes bun@${Bun.version}` : "bun";
  return `${bun} ${quoted(shorter(Bun.main))}`;
}

function shorter(path: string): string {
  const near = relative(process.cwd(), path);
  // A service may run in the root directory, and the reader of its log is elsewhere, so no path is shortened.
  if (process.cwd() === "/" || near.startsWith("..")) return path;
  return near.includes("/") ? near : `./${near}`;
}

/** Quotes a word for a POSIX shell. */
export const quoted = (word: string): string =>
  /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;

/** Printed once, in addition to the log, when the master key has just been generated. @param url without a slash at its end */
export function welcomeText({ dataDir, identity }: Pick<Config, "dataDir" | "identity">, url: string): string {
  const place = relative(process.cwd(), dataDir) === "data" ? "" : ` --data-dir ${quoted(dataDir)}`;
  // `bun run start` runs in the folder of the clone, wherever it is typed.
  const where = process.cwd() === "/" ? "" : `  (run it in ${process.cwd()})`;
  const mint = `${programText()} token --tenant acme --user me${place}${where}`;
  const token = identity.oidc === null ? mint : `from ${identity.oidc.issuer}`;
  return `
  First start: tollgate created its data.

    database     ${join(dataDir, DATABASE_FILE)}
    master key   ${join(dataDir, MASTER_KEY_FILE)}  (keep a copy: the secrets in the database need it)
    gateway      ${url}
    try it out   ${url}/swagger
    manual       ${url}/docs
    a token      ${token}

`;
}
