// The kinds of Postgres that the store is tried on: another version, a pooler before it, and stricter isolation by
// default, where a transaction that others were in the way of is undone.
import { describe, test } from "bun:test";
import { SQL } from "bun";
import { missingPgBouncer, type PgBouncer, startPgBouncer } from "./pgbouncer.ts";
import { missingPostgres, startPostgres } from "./postgres.ts";

export interface PostgresKind {
  readonly name: string;
  /** Why it can't run here; null when it can. */
  readonly missing: string | null;
  /** Creates an empty database and gives its DATABASE_URL. */
  freshDatabase(): Promise<string>;
}

function isolated(isolation: string): PostgresKind {
  return {
    name: `postgres 18, ${isolation}`,
    missing: null,
    async freshDatabase() {
      const url = await (await startPostgres()).freshDatabase();
      const name = new URL(url).pathname.slice(1);
      await using client = new SQL(url, { max: 1, database: name });
      await client.unsafe(`alter database ${name} set default_transaction_isolation = '${isolation}'`);
      return url;
    },
  };
}

/** It ends with the process, for the next test file uses it again. */
let shared: Promise<PgBouncer> | undefined;

const pooled: PostgresKind = {
  name: "postgres 18 through PgBouncer",
  missing: missingPgBouncer(),
  async freshDatabase() {
    const server = await startPostgres();
    shared ??= startPgBouncer(server.port);
    return (await shared).through(await server.freshDatabase());
  },
};

const debian: PostgresKind = {
  name: "postgres 15",
  missing: missingPostgres(15),
  freshDatabase: async () => (await startPostgres(15)).freshDatabase(),
};

export const POSTGRES_KINDS: readonly PostgresKind[] = [
  debian,
  pooled,
  isolated("repeatable read"),
  isolated("serializable"),
];

/** The same suite on each kind. Of one that can't run here, a skipped test says why. */
export function eachPostgres(suite: (kind: PostgresKind) => void): void {
  for (const kind of POSTGRES_KINDS) {
    if (kind.missing === null) describe(kind.name, () => suite(kind));
    else test.skip(`${kind.name}: not tried, since ${kind.missing}`, () => {});
  }
}
