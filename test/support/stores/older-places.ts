// Databases of an older version, which are also looked into past the store: before it is opened, and after.
import { Database } from "bun:sqlite";
import { join } from "node:path";
import { SQL } from "bun";
import type { Dialect } from "./older-calls.ts";
import { type Place, postgresPlace, sqlitePlace } from "./stores.ts";

type Row = Readonly<Record<string, unknown>>;

/** A database that is also looked into past the store. */
export interface OldPlace extends Place {
  readonly databaseUrl: string | null;
  readonly dir: string;
  rows(statement: string): Promise<Row[]>;
}

export const olderPlaces: Readonly<Record<Dialect, () => Promise<OldPlace>>> = {
  async sqlite() {
    const place = sqlitePlace();
    return {
      ...place,
      databaseUrl: null,
      async rows(statement) {
        using database = new Database(join(place.dir, "tollgate.db"));
        using query = database.prepare<Row, []>(statement);
        return query.all();
      },
    };
  },
  async postgres() {
    const place = await postgresPlace();
    return {
      ...place,
      databaseUrl: place.url,
      dir: "/nowhere",
      async rows(statement) {
        await using client = new SQL(place.url, { max: 1 });
        return await client.unsafe(statement);
      },
    };
  },
};

export const TABLES = {
  before: ["invocations", "invocation_bodies", "invocation_counts", "idempotency_keys", "receipts_due"],
  after: [
    "open_invocations",
    "ended_invocations",
    "invocation_bodies",
    "invocation_counts",
    "idempotency_keys",
    "receipts_due",
  ],
};

/** Bodies as their hash. */
function shortened(row: Row): string {
  const values = Object.entries(row).map(([name, value]) =>
    value instanceof Uint8Array ? [name, String(Bun.hash(value))] : [name, String(value)],
  );
  return JSON.stringify(values);
}

/** All rows of some tables, in an order of their own. */
export async function contents(place: OldPlace, tables: readonly string[]): Promise<Record<string, string[]>> {
  const all: Record<string, string[]> = {};
  for (const table of tables) {
    const rows = await place.rows(`select * from ${table}`);
    all[table] = rows.map(shortened).sort();
  }
  return all;
}
