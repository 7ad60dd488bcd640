// Opens the store: on Postgres when DATABASE_URL is set, otherwise on SQLite in the data directory.
import { join } from "node:path";
import { openPostgres } from "./postgres/store.ts";
import { openSqlite } from "./sqlite/store.ts";
import type { Store, StoreTools } from "./store.ts";

interface StoreOptions extends Pick<StoreTools, "log" | "clock"> {
  readonly databaseUrl: string | null;
  readonly dataDir: string;
}

/** Opens the database and brings its schema up to date. @throws Error when it belongs to a newer program, or can't be opened */
export function openStore({ databaseUrl, dataDir, log, clock }: StoreOptions): Promise<Store> {
  if (databaseUrl !== null) return openPostgres({ databaseUrl, clock, log });
  return openSqlite({ path: join(dataDir, "tollgate.db"), log, clock });
}
