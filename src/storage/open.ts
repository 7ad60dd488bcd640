// The choice of the database: Postgres when there is a DATABASE_URL, SQLite in the data directory otherwise.
import { join } from "node:path";
import type { Log } from "../core/log.ts";
import type { Clock } from "../core/time.ts";
import { openPostgres } from "./postgres/store.ts";
import { openSqlite } from "./sqlite/store.ts";
import type { Store } from "./store.ts";

interface StoreOptions {
  readonly databaseUrl: string | null;
  readonly dataDir: string;
  readonly log: Log;
  readonly clock: Clock;
}

/**
 * Opens the database and brings its schema up to date.
 *
 * @throws Error when the database was written by a newer program, or cannot be opened.
 */
export function openStore({ databaseUrl, dataDir, log, clock }: StoreOptions): Promise<Store> {
  if (databaseUrl !== null) return openPostgres({ databaseUrl, clock, log });
  return openSqlite({ path: join(dataDir, "tollgate.db"), log, clock });
}
