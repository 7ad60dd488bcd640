// The data of a service: its database of either kind, the data directory and the disk below it, the keys in the database, and
// this machine's clock against the database's. The trial write goes to a file without a name, which is gone when it is closed.

import { closeSync, constants, existsSync, fsyncSync, openSync, writeSync } from "node:fs";
import { statfs } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import type { Config } from "../../config.ts";
import { silentLog } from "../../core/log.ts";
import { StartupProblem } from "../../core/startup.ts";
import { systemClock } from "../../core/time.ts";
import { keysThatDoNotOpen } from "../../keys/keyring.ts";
import { DATABASE_FILE, findMasterKeys, MASTER_KEY_FILE, type MasterKeys } from "../../keys/master-keys.ts";
import { type DatabaseLook, NO_KEYS } from "../../storage/look.ts";
import { type Capabilities, lookAtPostgres } from "../../storage/postgres/look.ts";
import { lookAtSqlite } from "../../storage/sqlite/look.ts";
import {
  bytesText,
  type Check,
  type Finding,
  failure,
  findings,
  freeSpaceProblem,
  inTime,
  notLookedAt,
  type Problem,
  schemaProblem,
  seconds,
  skewProblem,
  warning,
} from "./findings.ts";

interface Place {
  readonly databaseUrl: string | null;
  readonly dataDir: string;
}

/** Null when there is no database yet. It rejects when the database can't be opened, and the check of the database tells why. */
export type Opening = Promise<DatabaseLook | null>;

export function openDatabase({ databaseUrl, dataDir }: Place): Opening {
  const opening = inTime(openEither(databaseUrl, join(dataDir, DATABASE_FILE)));
  opening.catch(() => {});
  return opening;
}

async function openEither(databaseUrl: string | null, path: string): Promise<DatabaseLook | null> {
  return databaseUrl === null ? lookAtSqlite(path) : lookAtPostgres(databaseUrl);
}

export function databaseChecks({ databaseUrl, dataDir }: Place, opening: Opening): Check[] {
  const directory: Check = { what: "data directory", look: () => dataDirFindings(dataDir) };
  return [
    ...(databaseUrl === null ? [directory] : []),
    {
      what: "database",
      after: opening,
      look: async () => databaseFindings(await opening),
      advice:
        databaseUrl === null
          ? "see to the file and its disk, or restore a backup"
          : "DATABASE_URL must be right, and its server take writes: without it no call is taken",
    },
    ...(databaseUrl === null ? [] : [{ what: "database clock", after: opening, look: () => clockFindings(opening) }]),
  ];
}

async function databaseFindings(database: DatabaseLook | null): Promise<Finding[]> {
  if (database === null) return findings("database", [], "SQLite, made by the first start");
  const { dialect, schema, capabilities } = database;
  const isMade = schema.version > 0;
  const ms = await database.tryWrite();
  const server = capabilities === null ? "SQLite" : `Postgres ${capabilities.server}`;
  const shown = isMade ? `schema version ${schema.version}` : "its schema is made by the first start";
  const took = !isMade && dialect === "postgres" ? `it answers in ${ms.toFixed(1)} ms` : written(ms);
  const problems = [schemaProblem(schema), ...(capabilities === null ? [] : poolerProblem(capabilities))];
  return findings("database", problems, `${server}, ${shown}, ${took}`);
}

function written(ms: number): string {
  return `a write that is undone takes ${ms.toFixed(1)} ms`;
}

function poolerProblem({ pooled, prepared_statements }: Capabilities): Problem[] {
  if (!pooled || !prepared_statements) return [];
  const text = "a pooler stands before it, which must follow prepared statements";
  return [warning(text, "behind PgBouncer before 1.21, DATABASE_URL needs ?prepare=false; else all is well")];
}

async function clockFindings(opening: Opening): Promise<Finding[]> {
  const database = await opening.catch(() => null);
  const from = systemClock.now();
  const now = (await database?.now()) ?? null;
  if (now === null) return notLookedAt("database clock", "the database");
  const aheadMs = now - (from + systemClock.now()) / 2;
  const problem = skewProblem("the database's clock", aheadMs, "set both by NTP: tokens are judged by the database's");
  return findings("database clock", [problem], `${seconds(aheadMs)} s from the database's`);
}

/** About what one commit of a group writes. */
const TRIAL_BYTES = 64 * 1024;
/** Linux alone has this flag, with one bit on every processor, joined with the bit of directories. */
const O_TMPFILE = process.platform === "linux" ? 0o20000000 | constants.O_DIRECTORY : null;

async function dataDirFindings(path: string): Promise<Finding[]> {
  const isThere = existsSync(path);
  const place = isThere ? resolve(path) : nearest(path);
  const freeBytes = await freeBytesOf(place);
  const trial = tryDisk(place);
  const took = trial.ms === null ? "" : `, a write takes ${trial.ms.toFixed(1)} ms`;
  const where = isThere ? path : `${path} is made by the first start`;
  return findings(
    "data directory",
    [trial.problem, freeSpaceProblem(place, freeBytes)],
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

const NAMED_MAX = 3;

type MasterKeyPlace = Pick<Config, "masterKeys" | "dataDir">;

/** Null also when they can't be read, which the check of the keys reports. */
export function usableMasterKeys(place: MasterKeyPlace): MasterKeys | null {
  try {
    return masterKeysOf(place);
  } catch {
    return null;
  }
}

/**
 * Null when there is none yet.
 *
 * @throws StartupProblem when one can't be read
 */
function masterKeysOf({ masterKeys, dataDir }: MasterKeyPlace): MasterKeys | null {
  return findMasterKeys({ masterKeys, dataDir, log: silentLog });
}

export async function keyFindings(place: MasterKeyPlace, opening: Opening): Promise<Finding[]> {
  const database = await opening.catch(() => undefined);
  if (database === undefined) return notLookedAt("keys", "the database");
  const keys = (await database?.wrappedKeys()) ?? NO_KEYS;
  const count = keys.tenantKeys.length + keys.signingKeys.length;
  const masterKeys = masterKeysOf(place);
  if (masterKeys === null) {
    if (count === 0) return findings("keys", [], "made by the first start");
    throw new StartupProblem(
      `TOLLGATE_MASTER_KEY must be set, or ${MASTER_KEY_FILE} restored to the data directory, for ${count} keys`,
    );
  }
  if (count === 0) return findings("keys", [], "the master key is there, and no key under it yet");
  const closed = keysThatDoNotOpen(masterKeys.all(), keys);
  const named = closed.slice(0, NAMED_MAX).join(", ");
  const more = closed.length > NAMED_MAX ? ", …" : "";
  const problem = failure(
    `${closed.length} of ${count} keys do not open with the master key (${named}${more})`,
    `the key must be the one that this database was made with: TOLLGATE_MASTER_KEY, or ${MASTER_KEY_FILE}`,
  );
  return findings("keys", [closed.length > 0 ? problem : null], `the master key opens all ${count} keys`);
}
