// Files of secrets that can't be made again. Each is readable by its owner only, appears under its name once it is whole
// and on the disk, and never replaces another: a link fails if the name is taken, and a rename would not.
import { closeSync, existsSync, fchownSync, fsyncSync, linkSync, openSync, unlinkSync, writeSync } from "node:fs";

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
