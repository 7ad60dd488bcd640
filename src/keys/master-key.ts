// The master key, from the configuration or from master.key in the data directory, where it is generated at
// the first start. It never replaces one that is there: losing it would lose every secret in the database.
import { readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { holdsWrappedKeys } from "../storage/keys-held.ts";
import { placePrivateFile, syncDirectory } from "../storage/private-file.ts";
import { newKey } from "./envelope.ts";

export interface MasterKey {
  readonly key: Buffer;
  /** Whether this call generated it: the first start in this data directory. */
  readonly generated: boolean;
}

export interface MasterKeyOptions {
  /** From the configuration; null when the key is kept in the data directory. */
  readonly configured: Buffer | null;
  /** Must exist. */
  readonly dataDir: string;
  readonly log: Log;
}

export const MASTER_KEY_FILE = "master.key";
/** The file that the SQLite store keeps in the data directory. */
export const DATABASE_FILE = "tollgate.db";

/** @throws StartupProblem when the key is malformed, can't be kept, or is missing beside a database that needs it. */
export function loadMasterKey({ configured, dataDir, log }: MasterKeyOptions): MasterKey {
  if (configured !== null) return { key: configured, generated: false };
  const path = join(dataDir, MASTER_KEY_FILE);
  // The database is looked at first: another process that starts at this moment makes the key before the database.
  const isNeeded = holdsWrappedKeys(join(dataDir, DATABASE_FILE));
  const kept = readKey(path, log);
  if (kept !== null) return { key: kept, generated: false };
  if (isNeeded) {
    throw new StartupProblem(
      `TOLLGATE_MASTER_KEY must be set, or ${path} restored: the database beside it was made with a master key`,
    );
  }
  return generate(path, log);
}

/**
 * The key that is there; null when none is.
 *
 * @throws StartupProblem when it is malformed or can't be read
 */
export function findMasterKey({ configured, dataDir, log }: MasterKeyOptions): Buffer | null {
  return configured ?? readKey(join(dataDir, MASTER_KEY_FILE), log);
}

function readKey(path: string, log: Log): Buffer | null {
  let text: string;
  try {
    text = readFileSync(path, "latin1");
    if ((statSync(path).mode & 0o077) !== 0) {
      log.warn("master_key_too_open", { path });
    }
  } catch (cause) {
    if (isCode(cause, "ENOENT")) return null;
    throw new StartupProblem(`${path} must be readable`, { cause });
  }
  const key = /^[A-Za-z0-9+/]{43}=\r?\n?$/.test(text) ? Buffer.from(text, "base64") : null;
  if (key === null) throw new StartupProblem(`${path} must hold 32 bytes in base64, as it was generated`);
  return key;
}

function generate(path: string, log: Log): MasterKey {
  const key = newKey();
  try {
    placePrivateFile(path, `${path}.${crypto.randomUUID()}`, `${key.toString("base64")}\n`);
    syncDirectory(join(path, ".."));
    return { key, generated: true };
  } catch (cause) {
    const other = isCode(cause, "EEXIST") ? readKey(path, log) : null;
    if (other !== null) return { key: other, generated: false };
    throw new StartupProblem(`${path} must be writable`, { cause });
  }
}

function isCode(error: unknown, code: string): boolean {
  return error instanceof Error && "code" in error && error.code === code;
}
