// Checks the data of a service: its SQLite or Postgres database, the free space of the data directory, the keys in the
// database, and this machine's clock against the database's.
import { existsSync } from "node:fs";
import { statfs } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import type { Config } from "../../config.ts";
import { silentLog } from "../../core/log.ts";
import { StartupProblem } from "../../core/startup.ts";
import { systemClock } from "../../core/time.ts";
import { keysThatDoNotOpen } from "../../keys/keyring.ts";
import { DATABASE_FILE, findMasterKeys, MASTER_KEY_FILE } from "../../keys/master-keys.ts";
import { type DatabaseInspection, NO_KEYS } from "../../storage/inspect.ts";
import { fitOf, newestVersion, type Schema, TOO_NEW_ADVICE, tooNewText } from "../../storage/migrate.ts";
import { inspectPostgres } from "../../storage/postgres/inspect.ts";
import { inspectSqlite } from "../../storage/sqlite/inspect.ts";
import { type DataLocation, requireOwnDataDir, type Service } from "../open.ts";
import type { Check, Finding, Problem } from "./findings.ts";
import {
  failure,
  findings,
  inTime,
  NAMED_MAX,
  notChecked,
  SECOND_CHECK_MS_MAX,
  seconds,
  skewProblem,
  warning,
} from "./findings.ts";

/** Resolves with null if there is no database yet. Rejects if it can't be opened; the check of the database reports why. */
export type Opening = Promise<DatabaseInspection | null>;

export function openDatabase({ databaseUrl, dataDir }: DataLocation): Opening {
  const open = async () =>
    databaseUrl === null ? inspectSqlite(join(dataDir, DATABASE_FILE)) : inspectPostgres(databaseUrl);
  const opening = inTime(open());
  opening.catch(() => {});
  return opening;
}

/** A check that needs the database. If the database can't be opened, the finding says that nothing was checked. */
export function afterOpening(
  check: Omit<Check, "run">,
  opening: Opening,
  run: (database: DatabaseInspection | null) => Promise<Finding[]>,
): Check {
  const { what } = check;
  return { msMax: SECOND_CHECK_MS_MAX, ...check, run: () => opening.then(run, () => notChecked(what, "the database")) };
}

export function databaseChecks(service: Service, location: DataLocation, opening: Opening): Check[] {
  const { databaseUrl, dataDir } = location;
  const database = { what: "database", msMax: SECOND_CHECK_MS_MAX, run: () => opening.then(databaseFindings) };
  if (databaseUrl === null) {
    return [
      {
        what: "data directory",
        advice: `name the ${service}'s own directory: each service needs one for itself`,
        run: () => requireOwnDataDir(service, location).then(() => dataDirFindings(dataDir)),
      },
      { ...database, advice: "check the file and its disk, or restore a backup" },
    ];
  }
  const advice = "DATABASE_URL must be right, and its server must accept writes: without it no call is accepted";
  return [{ ...database, advice }, afterOpening({ what: "database clock" }, opening, clockFindings)];
}

async function databaseFindings(database: DatabaseInspection | null): Promise<Finding[]> {
  if (database === null) return findings("database", [], "SQLite; the first start creates it");
  const { dialect, schema, capabilities } = database;
  const hasSchema = schema.version > 0;
  const ms = (await database.tryWrite()).toFixed(1);
  const server = capabilities === null ? "SQLite" : `Postgres ${capabilities.server}`;
  const shown = hasSchema ? `schema version ${schema.version}` : "the first start creates its schema";
  const isWritten = hasSchema || dialect === "sqlite";
  const took = isWritten ? `a write that is rolled back takes ${ms} ms` : `it answers in ${ms} ms`;
  const pooler = capabilities?.pooled === true && capabilities.prepared_statements ? POOLER : null;
  return findings("database", [schemaProblem(schema), pooler], `${server}, ${shown}, ${took}`);
}

const POOLER = warning(
  "it is behind a connection pooler, which must support prepared statements",
  "with PgBouncer before 1.21, DATABASE_URL needs ?prepare=false; otherwise all is well",
);

export function schemaProblem(schema: Schema): Problem | null {
  const has = `it has schema version ${schema.version}`;
  switch (fitOf(schema)) {
    case "none":
    case "same":
      return null;
    case "older":
      return warning(
        `${has}, and the next start of this program migrates it to ${newestVersion()}`,
        "take a backup, then start this program or run tollgate migrate",
      );
    case "newer":
      return warning(
        `${has}; this program knows versions up to ${newestVersion()}, and may still run on it`,
        "move to the newer program in time",
      );
    case "too new":
      return failure(`it has ${tooNewText(schema)}`, TOO_NEW_ADVICE);
  }
}

async function clockFindings(database: DatabaseInspection | null): Promise<Finding[]> {
  const from = systemClock.now();
  const aheadMs = ((await database?.now()) ?? from) - (from + systemClock.now()) / 2;
  const problem = skewProblem("the database's clock", aheadMs, "set both by NTP: tokens are judged by the database's");
  return findings("database clock", [problem], `${seconds(aheadMs)} s from the database's`);
}

async function dataDirFindings(path: string): Promise<Finding[]> {
  // If the directory does not exist yet, its free space is that of the nearest parent that does.
  let at = resolve(path);
  while (!existsSync(at)) at = dirname(at);
  const { bavail, bsize } = await statfs(at);
  const free = bavail * bsize;
  const where = existsSync(path) ? path : `${path}, which the first start creates`;
  return findings("data directory", [freeSpaceProblem(at, free)], `${where}: ${bytesText(free)} free`);
}

const GIB = 1024 ** 3;

/** @param name names the file system, for example by a directory on it */
export function freeSpaceProblem(name: string, freeBytes: number): Problem | null {
  const text = `${name} has ${bytesText(freeBytes)} free`;
  const advice = "free some space: on a full disk no call is accepted";
  if (freeBytes <= 0) return failure(text, advice);
  return freeBytes < GIB ? warning(text, advice) : null;
}

const bytesText = (bytes: number): string =>
  bytes < GIB ? `${Math.floor(bytes / 1024 ** 2)} MiB` : `${(bytes / GIB).toFixed(1)} GiB`;

export async function keyFindings(
  place: DataLocation & Pick<Config, "masterKeys">,
  database: DatabaseInspection | null,
): Promise<Finding[]> {
  const keys = (await database?.wrappedKeys()) ?? NO_KEYS;
  const count = keys.tenantKeys.length + keys.signingKeys.length;
  const masterKeys = findMasterKeys({ ...place, log: silentLog });
  if (masterKeys === null) {
    if (count === 0)
      return requireOwnDataDir("gateway", place).then(
        () => findings("keys", [], "the first start creates them"),
        () => notChecked("keys", "the gateway's own data directory"),
      );
    throw new StartupProblem(
      `TOLLGATE_MASTER_KEY must be set, or ${MASTER_KEY_FILE} restored to the data directory, for ${count} keys`,
    );
  }
  if (count === 0) return findings("keys", [], "the master key is there; the database holds no keys yet");
  const closed = keysThatDoNotOpen(masterKeys.all(), keys);
  const named = closed.slice(0, NAMED_MAX).join(", ");
  const more = closed.length > NAMED_MAX ? ", …" : "";
  const problem = failure(
    `${closed.length} of ${count} keys do not open with the master key (${named}${more})`,
    `the key must be the one that this database was made with: TOLLGATE_MASTER_KEY, or ${MASTER_KEY_FILE}`,
  );
  return findings("keys", [closed.length > 0 ? problem : null], `the master key opens all ${count} keys`);
}
