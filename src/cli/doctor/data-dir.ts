// The data directory: whether it takes a write, how much is free where it lies, and who may look into it. The write goes to
// a file without a name, which is gone when it is closed and never was in the directory.
import { closeSync, constants, existsSync, fsyncSync, openSync, statSync, writeSync } from "node:fs";
import { statfs } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { DATABASE_FILE, MASTER_KEY_FILE } from "../../keys/master-keys.ts";
import { type Finding, failure, findings, type Problem, warning } from "./finding.ts";
import { bytesText, freeSpaceProblem } from "./rules.ts";

/** About what one commit of a group writes. */
const TRIAL_BYTES = 64 * 1024;
/** Linux alone has it, with this bit on every processor; beside it stands that of directories. */
const O_TMPFILE = process.platform === "linux" ? 0o20000000 | constants.O_DIRECTORY : null;
const SECRET_FILES = [MASTER_KEY_FILE, DATABASE_FILE, `${DATABASE_FILE}-wal`];
const OTHERS = 0o077;

export async function dataDirFindings(path: string): Promise<Finding[]> {
  const isThere = existsSync(path);
  const place = isThere ? resolve(path) : nearest(path);
  const freeBytes = await freeBytesOf(place);
  const trial = tryDisk(place);
  const took = trial.ms === null ? "" : `, a write takes ${trial.ms.toFixed(1)} ms`;
  const where = isThere ? path : `${path} is made by the first start`;
  return findings(
    "data directory",
    [trial.problem, freeSpaceProblem(place, freeBytes), ...(isThere ? accessProblems(path) : [])],
    `${where}: ${bytesText(freeBytes)} free${took}`,
  );
}

/** Where the directory will be made. */
function nearest(path: string): string {
  let at = resolve(path);
  while (!existsSync(at)) at = dirname(at);
  return at;
}

async function freeBytesOf(path: string): Promise<number> {
  const { bavail, bsize } = await statfs(path);
  return bavail * bsize;
}

interface Trial {
  readonly problem: Problem | null;
  /** Null when this system has no files without a name. */
  readonly ms: number | null;
}

function tryDisk(path: string): Trial {
  if (O_TMPFILE === null) return { problem: null, ms: null };
  let file: number | null = null;
  try {
    file = openSync(path, O_TMPFILE | constants.O_RDWR, 0o600);
    const from = performance.now();
    writeSync(file, new Uint8Array(TRIAL_BYTES));
    fsyncSync(file);
    return { problem: null, ms: performance.now() - from };
  } catch (error) {
    return { problem: diskProblem(path, error), ms: null };
  } finally {
    if (file !== null) closeSync(file);
  }
}

/** Null for a file system that has no such files. */
function diskProblem(path: string, error: unknown): Problem | null {
  const code = error instanceof Error && "code" in error ? String(error.code) : "unknown";
  const text = `${path} takes no write (${code})`;
  switch (code) {
    case "EOPNOTSUPP":
    case "EISDIR":
    case "EINVAL":
      return null;
    case "ENOSPC":
    case "EDQUOT":
      return failure(text, "make room: on a full disk no call is taken");
    case "EROFS":
      return failure(text, "mount its file system for writing");
    default:
      return failure(text, "the user of the service must own it");
  }
}

function accessProblems(path: string): (Problem | null)[] {
  const { mode, uid } = statSync(path);
  const open = SECRET_FILES.filter((name) => {
    const found = statSync(join(path, name), { throwIfNoEntry: false });
    return found !== undefined && (found.mode & OTHERS) !== 0;
  });
  const own = process.getuid?.();
  return [
    own === undefined || own === uid
      ? null
      : warning(`${path} belongs to another user than the one who asks`, "run this as the user of the service"),
    (mode & OTHERS) === 0
      ? null
      : warning(`others than its owner may enter ${path}`, `run chmod 700 ${path}: it holds the master key`),
    open.length === 0
      ? null
      : warning(`others than their owner may read ${open.join(" and ")}`, `run chmod 600 on them in ${path}`),
  ];
}
