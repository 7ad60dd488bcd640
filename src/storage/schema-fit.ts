// Whether this program may run on a database, by what each migration has left there about itself: so an older program can
// judge a schema that is newer than all that it knows.
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { NEWEST_VERSION } from "./schema-versions.ts";

/** All columns, since databases from before version 23 have no floor. */
export const READ_VERSIONS = "select * from schema_migrations";

export interface VersionRow {
  readonly version: number;
  readonly floor?: number | null;
}

/** Of a database; 0 and 0 where there is none yet. */
export interface Schema {
  readonly version: number;
  /** The oldest program that may run on it: see schema-versions.ts. */
  readonly floor: number;
}

/** Each version may have raised the floor, and none lowers what another has raised. */
export function schemaOf(rows: readonly VersionRow[]): Schema {
  return {
    version: Math.max(0, ...rows.map(({ version }) => version)),
    floor: Math.max(0, ...rows.map(({ version, floor }) => floor ?? version)),
  };
}

/** Of a schema to a program: what is older is brought up to date, and of what is newer only some may be used. */
export type SchemaFit = "none" | "older" | "same" | "newer" | "too new";

/** @param newest that the program knows */
export function fitOf({ version, floor }: Schema, newest = NEWEST_VERSION): SchemaFit {
  if (version === 0) return "none";
  if (version <= newest) return version === newest ? "same" : "older";
  return floor <= newest ? "newer" : "too new";
}

/** For what fits. */
export function schemaText(schema: Schema): string {
  const text = `schema version ${schema.version}`;
  return fitOf(schema) === "newer"
    ? `${text} (this program knows versions up to ${NEWEST_VERSION}, and may use it)`
    : text;
}

/** For what is too new. */
export function tooNewText({ version, floor }: Schema): string {
  return (
    `schema version ${version}, on which only programs that know version ${floor} may run, ` +
    `and this program knows versions up to ${NEWEST_VERSION}`
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
  log.warn("database_is_newer", { schema_version: schema.version, known_version: NEWEST_VERSION, hint });
}
