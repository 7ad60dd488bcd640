// The master keys that this process has, by their IDs: the current one, and the next one during a rotation. They come from the
// configuration, or from master.key in the data directory, where the first start generates one. A gateway with a key file needs
// no restart for a new key. Only the end of a rotation replaces a key: losing it would lose every secret in the database.
import { createHash } from "node:crypto";
import { readFileSync, renameSync, rmSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { attempt, errorCode } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { type Owner, placePrivateFile, syncToDisk } from "../storage/data-dir.ts";
import { holdsWrappedKeys } from "../storage/sqlite/inspect.ts";
import { newKey } from "./envelope.ts";

export type MasterKeys = ReturnType<typeof openMasterKeys>;

/** 32 bytes in standard base64; the padding may be missing. */
const KEY = /^[A-Za-z0-9+/]{43}=?$/;

/** The ID of a key, which reveals nothing about it. */
export const masterKeyId = (key: Uint8Array): string => createHash("sha256").update(key).digest("hex").slice(0, 16);

/** @param files hold one key each, if they exist */
export function openMasterKeys(own: Buffer, next: Buffer | null, files: readonly string[]) {
  const known = new Map<string, Buffer>();
  let missed = { id: "", at: Number.NEGATIVE_INFINITY };

  /** Adds a key to this process. @returns the key's ID */
  function add(key: Buffer): string {
    const id = masterKeyId(key);
    known.set(id, key);
    return id;
  }

  function readFiles(): void {
    for (const file of files) {
      const key = keyIn(file);
      if (key !== null) add(key);
    }
  }

  if (next !== null) add(next);
  readFiles();
  return {
    /** The file of the current master key, or else the variable. */
    place: files[0] ?? "TOLLGATE_MASTER_KEY",
    /** The ID of the current master key, which wraps the first keys of an empty database. */
    own: add(own),
    add,
    /** Null if this process does not have the key, even after reading its files again. */
    find(id: string): Buffer | null {
      const found = known.get(id);
      if (found !== undefined) return found;
      // A key that was not found is not searched for again for half a second.
      if (missed.id === id && performance.now() - missed.at < 500) return null;
      readFiles();
      missed = { id, at: performance.now() };
      return known.get(id) ?? null;
    },
    ids: (): readonly string[] => [...known.keys()],
    all: (): readonly Buffer[] => [...known.values()],
  };
}

/** The key in a file; null if there is none, or it is just being written. */
function keyIn(file: string): Buffer | null {
  const text = attempt(() => readFileSync(file, "latin1"))?.replace(/\r?\n$/, "") ?? "";
  return KEY.test(text) ? Buffer.from(text, "base64") : null;
}

interface MasterKeySettings {
  readonly own: Buffer | null;
  /** The file that `own` was read from; null if there is none that can be read again. */
  readonly file: string | null;
  readonly next: Buffer | null;
  readonly nextFile: string | null;
}

export const MASTER_KEY_FILE = "master.key";
/** The SQLite database in the data directory. */
export const DATABASE_FILE = "tollgate.db";

/**
 * The master key, and whether this call has generated it. @param configured null if it is in the data directory, which must exist
 * @throws StartupProblem when the key is malformed or can't be written, or is missing although the database needs it
 */
export function loadMasterKey(configured: Buffer | null, dataDir: string, log: Log) {
  if (configured !== null) return { key: configured, generated: false };
  const path = join(dataDir, MASTER_KEY_FILE);
  // The database is read before the key, since another process that starts now creates the key before the database.
  const isNeeded = holdsWrappedKeys(join(dataDir, DATABASE_FILE));
  const kept = readKey(path, log);
  if (kept !== null) return { key: kept, generated: false };
  const needed = "the database beside it was made with a master key";
  if (isNeeded) throw new StartupProblem(`TOLLGATE_MASTER_KEY must be set, or ${path} restored: ${needed}`);
  return writeKey(path, newKey(), log, statSync(dataDir));
}

/** The file of the master key; null if the key comes from a variable or a file that can't be read again. */
export const masterKeyFile = ({ own, file }: MasterKeySettings, dataDir: string): string | null =>
  own === null ? join(dataDir, MASTER_KEY_FILE) : file;

/** The file of the next master key during a rotation, beside that of the current one. */
export const nextKeyFile = (file: string): string => `${file}.new`;

interface MasterKeysOptions {
  readonly masterKeys: MasterKeySettings;
  readonly dataDir: string;
  readonly log: Log;
}

export function loadMasterKeys({ masterKeys, dataDir, log }: MasterKeysOptions) {
  const { key, generated } = loadMasterKey(masterKeys.own, dataDir, log);
  return { keys: masterKeysAround(key, masterKeys, dataDir), generated };
}

/** The existing master keys; null if there are none. @throws StartupProblem when one is malformed or can't be read */
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
 * The key in the file of the next master key, which is written durably unless it is there. The file gets the owner of the current
 * one, so that the gateway can read it even if root rotates the keys. @throws StartupProblem when it can't be written or read
 */
export function stageMasterKey(file: string, key: Buffer, log: Log): Buffer {
  const path = nextKeyFile(file);
  return readKey(path, log) ?? writeKey(path, key, log, statSync(file, { throwIfNoEntry: false })).key;
}

/** Replaces the file of the master key with that of the next one, durably. @returns false if it can't be replaced */
export function promoteMasterKey(file: string, id: string): boolean {
  const next = nextKeyFile(file);
  const holds = (path: string) => {
    const key = keyIn(path);
    return key !== null && masterKeyId(key) === id;
  };
  if (holds(file)) {
    // A leftover file would be taken for the next key.
    if (holds(next)) rmSync(next, { force: true });
    return true;
  }
  if (!holds(next)) return false;
  try {
    renameSync(next, file);
    syncToDisk(dirname(file));
    return true;
  } catch {
    return holds(file);
  }
}

function readKey(path: string, log: Log): Buffer | null {
  let text: string;
  try {
    text = readFileSync(path, "latin1");
    if ((statSync(path).mode & 0o077) !== 0) log.warn("master_key_too_open", { path });
  } catch (cause) {
    if (errorCode(cause) === "ENOENT") return null;
    throw new StartupProblem(`${path} must be readable`, { cause });
  }
  const key = /^[A-Za-z0-9+/]{43}=\r?\n?$/.test(text) ? Buffer.from(text, "base64") : null;
  if (key === null) throw new StartupProblem(`${path} must hold 32 bytes in base64, as it was generated`);
  return key;
}

function writeKey(path: string, key: Buffer, log: Log, owner?: Owner) {
  try {
    placePrivateFile(path, `${path}.${crypto.randomUUID()}`, `${key.toString("base64")}\n`, owner);
    syncToDisk(dirname(path));
    return { key, generated: true };
  } catch (cause) {
    const other = errorCode(cause) === "EEXIST" ? readKey(path, log) : null;
    if (other !== null) return { key: other, generated: false };
    throw new StartupProblem(`${path} must be writable`, { cause });
  }
}
