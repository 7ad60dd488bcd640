// Whether this program may run on a database, by what each migration has left there about itself: so an older program can
// judge a schema that is newer than all that it knows.
import type { Database } from "bun:sqlite";
import type { SQL } from "bun";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { newestVersion } from "./schema-versions.ts";

export interface VersionRow {
  readonly version: number;
  readonly floor: number;
}

/** Of a database; 0 and 0 where there is none yet. */
export interface Schema {
  readonly version: number;
  /** The oldest program that may run on it: see schema-versions.ts. */
  readonly floor: number;
}

const READ_VERSIONS = "select version, floor from schema_versions";
/** Of a database that has tables, of which `tenant_keys` is one in every schema, but not the table of the versions. */
const OUTDATED =
  "the database was made by a program from before the first release, and nothing brings it up to date: " +
  "start on a new database (an empty one, or a data directory without tollgate.db)";

/** @throws StartupProblem when no released program has made the tables that are there */
export function versionsOnSqlite(connection: Database): VersionRow[] {
  // A statement that is not done with would keep tables from being changed.
  using tables = connection.prepare<{ name: string }, []>(
    "select name from sqlite_schema where name in ('schema_versions', 'tenant_keys')",
  );
  const names = tables.all().map(({ name }) => name);
  if (names.includes("schema_versions")) {
    using versions = connection.prepare<VersionRow, []>(READ_VERSIONS);
    return versions.all();
  }
  if (names.length > 0) throw new StartupProblem(OUTDATED);
  return [];
}

/** @throws StartupProblem when no released program has made the tables that are there */
export async function versionsOnPostgres(client: SQL): Promise<VersionRow[]> {
  const [tables] = await client.unsafe<{ keys: string | null; versions: string | null }[]>(
    "select to_regclass('tenant_keys')::text as keys, to_regclass('schema_versions')::text as versions",
  );
  if (tables?.versions != null) return client.unsafe<VersionRow[]>(READ_VERSIONS);
  if (tables?.keys != null) throw new StartupProblem(OUTDATED);
  return [];
}

/** Each version may have raised the floor, and none lowers what another has raised. */
export function schemaOf(rows: readonly VersionRow[]): Schema {
  return {
    version: Math.max(0, ...rows.map(({ version }) => version)),
    floor: Math.max(0, ...rows.map(({ floor }) => floor)),
  };
}

/** Of a schema to a program: what is older is brought up to date, and of what is newer only some may be used. */
export type SchemaFit = "none" | "older" | "same" | "newer" | "too new";

/** @param newest that the program knows */
export function fitOf({ version, floor }: Schema, newest = newestVersion()): SchemaFit {
  if (version === 0) return "none";
  if (version <= newest) return version === newest ? "same" : "older";
  return floor <= newest ? "newer" : "too new";
}

/** For what fits. */
export function schemaText(schema: Schema): string {
  const text = `schema version ${schema.version}`;
  return fitOf(schema) === "newer"
    ? `${text} (this program knows versions up to ${newestVersion()}, and may use it)`
    : text;
}

/** For what is too new. */
export function tooNewText({ version, floor }: Schema): string {
  return (
    `schema version ${version}, on which only programs that know version ${floor} may run, ` +
    `and this program knows versions up to ${newestVersion()}`
  );
}

export const TOO_NEW_ADVICE = "start a newer tollgate, or restore a backup";

/**
 * Tells the log of a newer schema, on which this program runs all the same.
 *
 * @throws StartupProblem when it must not
 */
export function requireFit(schema: Schema, log: Log): void {
  const fit = fitOf(schema);
  if (fit === "too new") throw new StartupProblem(`the database has ${tooNewText(schema)}: ${TOO_NEW_ADVICE}`);
  if (fit !== "newer") return;
  const hint = "see Going back in tollgate help operations";
  log.warn("database_is_newer", { schema_version: schema.version, known_version: newestVersion(), hint });
}
