// The schema's versions: numbered SQL per database, embedded in the binary, and which programs may run on each.
import postgres0001 from "../../db/postgres/0001_initial.sql" with { type: "text" };
import sqlite0001 from "../../db/sqlite/0001_initial.sql" with { type: "text" };

export interface SchemaVersion {
  readonly sqlite: string;
  readonly postgres: string;
  /**
   * The oldest program that may start and run on a database that has this version, told by the newest version that it knows
   * itself. What only expands leaves it as it is: all that such a program reads and writes is still there and means the
   * same, and no harm comes of what it does not know. What contracts raises it.
   */
  readonly floor: number;
}

/** Version n stands at index n − 1. */
export const SCHEMA_VERSIONS: readonly SchemaVersion[] = [{ sqlite: sqlite0001, postgres: postgres0001, floor: 1 }];

/** What this program brings a schema to. */
export const newestVersion = (): number => SCHEMA_VERSIONS.length;
