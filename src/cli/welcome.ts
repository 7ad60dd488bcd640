// Help for newcomers after the very first start. It is printed once, beside the structured log, when the master key has
// just been generated.
import { join, relative } from "node:path";
import type { Config } from "../config.ts";
import { DATABASE_FILE, MASTER_KEY_FILE } from "../keys/master-keys.ts";
import { type Program, programText, quoted } from "./program.ts";

type Settings = Pick<Config, "dataDir" | "identity">;

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
    manual       ${url}/docs
    a token      ${token}

`;
}
