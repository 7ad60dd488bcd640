// The master keys that this process has, by their IDs: its own, and while keys are rotated the next one. They come from the
// configuration, or from master.key in the data directory, where the first start generates one. A gateway with a file needs no
// restart for a new key. Only the end of a rotation replaces a key: losing it would lose every secret in the database.
import { createHash } from "node:crypto";
import { readFileSync, renameSync, rmSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { type Owner, placePrivateFile, syncDirectory } from "../storage/data-dir.ts";
import { holdsWrappedKeys } from "../storage/sqlite/inspect.ts";
import { newKey } from "./envelope.ts";

export interface MasterKeys {
  /** The ID of the one that wraps the first keys of an empty database. */
  readonly own: string;
  /** Null when this process does not have the key, also after reading its files again. */
  find(id: string): Buffer | null;
  /** Adds a key to this process. @returns the key's ID */
  add(key: Buffer): string;
  ids(): readonly string[];
  all(): readonly Buffer[];
}

/** 32 bytes in standard base64; the padding may be missing. */
const KEY = /^[A-Za-z0-9+/]{43}=?$/;

/** A name of the key that reveals nothing of it. */
export function masterKeyId(key: Uint8Array): string {
  return createHash("sha256").update(key).digest("hex").slice(0, 16);
}

/** @param files that hold one key each, if they are there */
export function openMasterKeys(own: Buffer, next: Buffer | null, files: readonly string[]): MasterKeys {
  const known = new Map<string, Buffer>();
  let missed = { id: "", at: Number.NEGATIVE_INFINITY };

  function add(key: Buffer): string {
    const id = masterKeyId(key);
    known.set(id, key);
    return id;
  }

  function look(): void {
    for (const file of files) {
      const key = keyIn(file);
      if (key !== null) add(key);
    }
  }

  if (next !== null) add(next);
  look();
  return {
    own: add(own),
    add,
    find(id) {
      const found = known.get(id);
      if (found !== undefined) return found;
      // After a key was not found, the files are not read again for this long.
      if (missed.id === id && performance.now() - missed.at < 500) return null;
      look();
      missed = { id, at: performance.now() };
      return known.get(id) ?? null;
    },
    ids: () => [...known.keys()],
    all: () => [...known.values()],
  };
}

/** Null when the file holds no key, or one that is just being written. */
function keyIn(file: string): Buffer | null {
  try {
    const text = readFileSync(file, "latin1").replace(/\r?\n$/, "");
    return KEY.test(text) ? Buffer.from(text, "base64") : null;
  } catch {
    return null;
  }
}

interface MasterKeySettings {
  readonly own: Buffer | null;
  /** The file that `own` was read from, if it can be read again. */
  readonly file: string | null;
  readonly next: Buffer | null;
  readonly nextFile: string | null;
}

export const MASTER_KEY_FILE = "master.key";
/** The file that the SQLite store keeps in the data directory. */
export const DATABASE_FILE = "tollgate.db";

/**
 * @param configured null when the key is kept in the data directory, which must exist
 * @returns the key, and whether this call has generated it: the first start in this data directory
 * @throws StartupProblem when the key is malformed, can't be kept, or is missing beside a database that needs it
 */
export function loadMasterKey(configured: Buffer | null, dataDir: string, log: Log) {
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
  return writeKey(path, newKey(), log, statSync(dataDir));
}

/** The file of the master key; null when it is configured in another way. */
export function masterKeyFile({ own, file }: MasterKeySettings, dataDir: string): string | null {
  return own === null ? join(dataDir, MASTER_KEY_FILE) : file;
}

/** Beside the file of the master key, that of the next one while keys are rotated. */
export function nextKeyFile(file: string): string {
  return `${file}.new`;
}

interface MasterKeysOptions {
  readonly masterKeys: MasterKeySettings;
  readonly dataDir: string;
  readonly log: Log;
}

export function loadMasterKeys({ masterKeys, dataDir, log }: MasterKeysOptions) {
  const { key, generated } = loadMasterKey(masterKeys.own, dataDir, log);
  return { keys: masterKeysAround(key, masterKeys, dataDir), generated };
}

/** The master keys that are there; null when there is none. @throws StartupProblem when one is malformed or can't be read */
export function findMasterKeys({ masterKeys, dataDir, log }: MasterKeysOptions): MasterKeys | null {
  const own = masterKeys.own ?? readKey(join(dataDir, MASTER_KEY_FILE), log);
  return own === null ? null : masterKeysAround(own, masterKeys, dataDir);
}

function masterKeysAround(own: Buffer, settings: MasterKeySettings, dataDir: string): MasterKeys {
  const file = masterKeyFile(settings, dataDir);
  const files = file === null ? [] : [file, nextKeyFile(file)];
  if (settings.nextFile !== null) files.push(settings.nextFile);
  return openMasterKeys(own, settings.next, files);
}

/**
 * The next master key in its file, durable when this returns: the key that is there, or else `key`. The file gets the owner
 * of the current key's file, who must be able to read it, also when root rotates the keys.
 * @throws StartupProblem when the file can't be written or read
 */
export function stageMasterKey(file: string, key: Buffer, log: Log): Buffer {
  const path = nextKeyFile(file);
  return readKey(path, log) ?? writeKey(path, key, log, statSync(file, { throwIfNoEntry: false })).key;
}

/** Replaces the file of the master key by that of the next one, for good. @returns false when it can't be replaced */
export function promoteMasterKey(file: string, id: string): boolean {
  const next = nextKeyFile(file);
  const holds = (path: string) => {
    const key = keyIn(path);
    return key !== null && masterKeyId(key) === id;
  };
  if (holds(file)) {
    // A file that was left over would be taken for the next key.
    if (holds(next)) rmSync(next, { force: true });
    return true;
  }
  if (!holds(next)) return false;
  try {
    renameSync(next, file);
    syncDirectory(dirname(file));
    return true;
  } catch {
    return holds(file);
  }
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

function writeKey(path: string, key: Buffer, log: Log, owner?: Owner) {
  try {
    placePrivateFile(path, `${path}.${crypto.randomUUID()}`, `${key.toString("base64")}\n`, owner);
    syncDirectory(dirname(path));
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
