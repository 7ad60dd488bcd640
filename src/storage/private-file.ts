// Files of secrets that can't be made again. Each is readable by its owner only, appears under its name once it is whole
// and on the disk, and never replaces another: a link fails if the name is taken, and a rename would not.
import {
  closeSync,
  existsSync,
  fchownSync,
  fsyncSync,
  linkSync,
  openSync,
  statSync,
  unlinkSync,
  writeSync,
} from "node:fs";
import { dirname } from "node:path";

export interface Owner {
  readonly uid: number;
  readonly gid: number;
}

const ROOT = 0;

/**
 * The name is durable after `syncDirectory`.
 *
 * @param draft a name in the same directory that nobody else uses; it is gone afterwards
 * @param owner whom root makes it for; who is not root makes it for himself
 * @throws what the file system says, `EEXIST` when the name is taken
 */
export function placePrivateFile(path: string, draft: string, text: string, owner?: Owner): void {
  try {
    writeDurably(draft, text, owner);
    linkSync(draft, path);
  } finally {
    if (existsSync(draft)) unlinkSync(draft);
  }
}

/**
 * An empty file for its owner only. One that root makes belongs to whom its directory belongs to: beside a service that is
 * its user, who has to open it.
 *
 * @throws what the file system says, `EEXIST` when the name is taken, also by a link
 */
export function makePrivateFile(path: string): void {
  const file = openSync(path, "wx", 0o600);
  try {
    if (process.getuid?.() !== ROOT) return;
    const { uid, gid } = statSync(dirname(path));
    fchownSync(file, uid, gid);
  } finally {
    closeSync(file);
  }
}

/** The same, where it may be there already. */
export function ensurePrivateFile(path: string): void {
  try {
    makePrivateFile(path);
  } catch (error) {
    if (!(error instanceof Error && "code" in error && error.code === "EEXIST")) throw error;
    closeSync(openSync(path, "a", 0o600));
  }
}

function writeDurably(path: string, text: string, owner: Owner | undefined): void {
  const file = openSync(path, "wx", 0o600);
  try {
    if (owner !== undefined && process.getuid?.() === ROOT) fchownSync(file, owner.uid, owner.gid);
    writeSync(file, text);
    fsyncSync(file);
  } finally {
    closeSync(file);
  }
}

export function syncDirectory(path: string): void {
  const directory = openSync(path, "r");
  try {
    fsyncSync(directory);
  } finally {
    closeSync(directory);
  }
}
