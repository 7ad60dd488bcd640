// The data of a service: its database of either kind, the data directory and the disk below it, the keys in the database, and
// this machine's clock against the database's.
import { existsSync } from "node:fs";
import { statfs } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import type { Config } from "../../config.ts";
import { silentLog } from "../../core/log.ts";
import { StartupProblem } from "../../core/startup.ts";
import { systemClock } from "../../core/time.ts";
import { keysThatDoNotOpen } from "../../keys/keyring.ts";
import { DATABASE_FILE, findMasterKeys, MASTER_KEY_FILE } from "../../keys/master-keys.ts";
import { type DatabaseInspection as DatabaseLook, NO_KEYS } from "../../storage/inspect.ts";
import { fitOf, newestVersion, type Schema, TOO_NEW_ADVICE, tooNewText } from "../../storage/migrate.ts";
import { inspectPostgres as lookAtPostgres } from "../../storage/postgres/inspect.ts";
import { inspectSqlite as lookAtSqlite } from "../../storage/sqlite/inspect.ts";
import type { DataPlace } from "../open.ts";
import {
  type Check,
  type Finding,
  failure,
  findings,
  inTime,
  notLookedAt,
  type Problem,
  SECOND_CHECK_MS_MAX,
  seconds,
  skewProblem,
  warning,
} from "./findings.ts";

/** Null when there is no database yet. It rejects when the database can't be opened, and the check of the database tells why. */
export type Opening = Promise<DatabaseLook | null>;

export function openDatabase({ databaseUrl, dataDir }: DataPlace): Opening {
  const open = async () =>
    databaseUrl === null ? lookAtSqlite(join(dataDir, DATABASE_FILE)) : lookAtPostgres(databaseUrl);
  const opening = inTime(open());
  opening.catch(() => {});
  return opening;
}

/** A check of what is in the database, where that could be opened. */
export function afterOpening(
  check: Omit<Check, "look">,
  opening: Opening,
  look: (database: DatabaseLook | null) => Promise<Finding[]>,
): Check {
  const { what } = check;
  return {
    msMax: SECOND_CHECK_MS_MAX,
    ...check,
    look: () => opening.then(look, () => notLookedAt(what, "the database")),
  };
}

export function databaseChecks({ databaseUrl, dataDir }: DataPlace, opening: Opening): Check[] {
  const database = { what: "database", msMax: SECOND_CHECK_MS_MAX, look: () => opening.then(databaseFindings) };
  if (databaseUrl === null) {
    return [
      { what: "data directory", look: () => dataDirFindings(dataDir) },
      { ...database, advice: "see to the file and its disk, or restore a backup" },
    ];
  }
  const advice = "DATABASE_URL must be right, and its server take writes: without it no call is taken";
  return [{ ...database, advice }, afterOpening({ what: "database clock" }, opening, clockFindings)];
}

async function databaseFindings(database: DatabaseLook | null): Promise<Finding[]> {
  if (database === null) return findings("database", [], "SQLite, made by the first start");
  const { dialect, schema, capabilities } = database;
  const isMade = schema.version > 0;
  const ms = (await database.tryWrite()).toFixed(1);
  const server = capabilities === null ? "SQLite" : `Postgres ${capabilities.server}`;
  const shown = isMade ? `schema version ${schema.version}` : "its schema is made by the first start";
  const isWritten = isMade || dialect === "sqlite";
  const took = isWritten ? `a write that is undone takes ${ms} ms` : `it answers in ${ms} ms`;
  const pooler = capabilities?.pooled === true && capabilities.prepared_statements ? POOLER : null;
  return findings("database", [schemaProblem(schema), pooler], `${server}, ${shown}, ${took}`);
}

const POOLER = warning(
  "a pooler stands before it, which must follow prepared statements",
  "behind PgBouncer before 1.21, DATABASE_URL needs ?prepare=false; else all is well",
);

/** Whether the program fits the schema, or what would become of it. */
export function schemaProblem(schema: Schema): Problem | null {
  const has = `it has schema version ${schema.version}`;
  switch (fitOf(schema)) {
    case "none":
    case "same":
      return null;
    case "older":
      return warning(
        `${has}, and the next start of this program brings it to ${newestVersion()}`,
        "take a backup, then start this program or run tollgate migrate",
      );
    case "newer":
      return warning(
        `${has}; this program knows versions up to ${newestVersion()}, and may run on it all the same`,
        "go on with the newer one in time",
      );
    case "too new":
      return failure(`it has ${tooNewText(schema)}`, TOO_NEW_ADVICE);
  }
}

async function clockFindings(database: DatabaseLook | null): Promise<Finding[]> {
  const from = systemClock.now();
  const aheadMs = ((await database?.now()) ?? from) - (from + systemClock.now()) / 2;
  const problem = skewProblem("the database's clock", aheadMs, "set both by NTP: tokens are judged by the database's");
  return findings("database clock", [problem], `${seconds(aheadMs)} s from the database's`);
}

async function dataDirFindings(path: string): Promise<Finding[]> {
  // Where the first start will make it.
  let at = resolve(path);
  while (!existsSync(at)) at = dirname(at);
  const { bavail, bsize } = await statfs(at);
  const free = bavail * bsize;
  const where = existsSync(path) ? path : `${path} is made by the first start`;
  return findings("data directory", [freeSpaceProblem(at, free)], `${where}: ${bytesText(free)} free`);
}

const GIB = 1024 ** 3;

/** @param name of the file system, such as the directory that lies there */
export function freeSpaceProblem(name: string, freeBytes: number): Problem | null {
  const text = `${name} has ${bytesText(freeBytes)} free`;
  const advice = "make room: on a full disk no call is taken";
  if (freeBytes <= 0) return failure(text, advice);
  return freeBytes < GIB ? warning(text, advice) : null;
}

function bytesText(bytes: number): string {
  return bytes < GIB ? `${Math.floor(bytes / 1024 ** 2)} MiB` : `${(bytes / GIB).toFixed(1)} GiB`;
}

const NAMED_MAX = 3;

export async function keyFindings(
  place: Pick<Config, "masterKeys" | "dataDir">,
  database: DatabaseLook | null,
): Promise<Finding[]> {
  const keys = (await database?.wrappedKeys()) ?? NO_KEYS;
  const count = keys.tenantKeys.length + keys.signingKeys.length;
  const masterKeys = findMasterKeys({ ...place, log: silentLog });
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
