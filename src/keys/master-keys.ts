// The master keys that this process has, by their IDs: its own, and while keys are rotated the next one. What stands in a
// file is found there while the process runs, so that a gateway on a file needs no restart for a new key.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

export interface MasterKeys {
  /** The ID of the one that wraps the first keys of an empty database. */
  readonly own: string;
  /** Null when this process has not got it, also after a look at its files. */
  find(id: string): Buffer | null;
  /** From now on this process has it. @returns its ID */
  add(key: Buffer): string;
  /** Those that are known. */
  ids(): readonly string[];
  /** The same, with the keys. */
  all(): readonly Buffer[];
}

export interface MasterKeyPlaces {
  readonly own: Buffer;
  /** The one that a rotation shall lead to, where it is configured. */
  readonly next: Buffer | null;
  /** Files that hold one key each, if they are there. */
  readonly files: readonly string[];
}

/** For a key that was not found files are not read all the time. */
const LOOK_AGAIN_MS = 500;
/** 32 bytes in standard base64; the padding may be missing. */
const KEY = /^[A-Za-z0-9+/]{43}=?$/;

/** Names a key, and tells nothing about it. */
export function masterKeyId(key: Uint8Array): string {
  return createHash("sha256").update(key).digest("hex").slice(0, 16);
}

export function openMasterKeys({ own, next, files }: MasterKeyPlaces): MasterKeys {
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
      if (missed.id === id && performance.now() - missed.at < LOOK_AGAIN_MS) return null;
      look();
      missed = { id, at: performance.now() };
      return known.get(id) ?? null;
    },
    ids: () => [...known.keys()],
    all: () => [...known.values()],
  };
}

/** Null when there is none, or one that is just being written. */
export function keyIn(file: string): Buffer | null {
  try {
    const text = readFileSync(file, "latin1").replace(/\r?\n$/, "");
    return KEY.test(text) ? Buffer.from(text, "base64") : null;
  } catch {
    return null;
  }
}
