// The database, of either kind and of both services, and this machine's clock against its own.
import { join } from "node:path";
import { systemClock } from "../../core/clock.ts";
import { DATABASE_FILE } from "../../keys/master-keys.ts";
import type { Capabilities } from "../../storage/capabilities.ts";
import type { DatabaseLook } from "../../storage/look.ts";
import { lookAtCapabilities, lookAtPostgres } from "../../storage/look-postgres.ts";
import { lookAtSqlite } from "../../storage/look-sqlite.ts";
import { dataDirFindings } from "./data-dir.ts";
import { type Finding, findings, type Problem, warning } from "./finding.ts";
import { schemaProblem, skewProblem } from "./rules.ts";
import { type Check, inTime } from "./run.ts";

interface Place {
  readonly databaseUrl: string | null;
  readonly dataDir: string;
}

/** Null when there is none yet. It rejects when it can't be opened, and the check of the database tells why. */
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
  const database = await orNull(opening);
  const from = systemClock.now();
  const now = (await database?.now()) ?? null;
  if (now === null) return notLookedAt("database clock", "the database");
  const aheadMs = now - (from + systemClock.now()) / 2;
  const problem = skewProblem("the database's clock", aheadMs, "set both by NTP: tokens are judged by the database's");
  return findings("database clock", [problem], `${seconds(aheadMs)} s from the database's`);
}

export function seconds(ms: number): string {
  return (Math.abs(ms) / 1000).toFixed(1);
}

/** For those that can go without it: what is wrong with it is told once. */
export function orNull(opening: Opening): Opening {
  return opening.catch(() => null);
}

export function notLookedAt(what: string, without: string): Finding[] {
  return findings(what, [warning(`not looked at without ${without}`, "mend that first")], "");
}

/** What replicas tell each other over, where that is another way than the database's own. */
export async function announcementFindings(listenUrl: string): Promise<Finding[]> {
  const advice =
    "TOLLGATE_LISTEN_URL must lead to the same database without a pooler; till then replicas look every second";
  const heard = await lookAtCapabilities(listenUrl).then(
    ({ pooled }) => (pooled ? warning("nothing is heard there", advice) : null),
    () => warning("the server of TOLLGATE_LISTEN_URL can't be used", advice),
  );
  return findings("announcements", [heard], "heard from the database");
}
