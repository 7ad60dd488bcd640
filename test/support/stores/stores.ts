// Empty databases of both kinds, and the few rows and answers that the tests of the stores share.
import { Database } from "bun:sqlite";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { SQL } from "bun";
import { asc } from "drizzle-orm";
import { Fault } from "../../../src/core/fault.ts";
import { type Log, silentLog } from "../../../src/core/log.ts";
import { openStore } from "../../../src/storage/open.ts";
import { parseDatabaseUrl } from "../../../src/storage/postgres/pool.ts";
import type { Store, Tx } from "../../../src/storage/store.ts";
import { temporaryRoot } from "../gateway/process.ts";
import { startPostgres } from "./postgres.ts";

export const clock = { now: () => 1_763_700_000_000 };

/** One empty database, which any number of stores may open. */
export interface Place {
  open(log?: Log): Promise<Store>;
  /** Runs a statement past the store. */
  execute(statement: string): Promise<void>;
  remove(): void;
}

export function sqlitePlace(): Place & { dir: string } {
  const dir = mkdtempSync(join(temporaryRoot(), "store-"));
  return {
    dir,
    open: (log = silentLog) => openStore({ databaseUrl: null, dataDir: dir, log, clock }),
    async execute(statement) {
      const database = new Database(join(dir, "tollgate.db"));
      database.run(statement);
      database.close();
    },
    remove: () => rmSync(dir, { recursive: true, force: true }),
  };
}

export async function postgresPlace(url?: string): Promise<Place & { url: string }> {
  return placeAt(url ?? (await (await startPostgres()).freshDatabase()));
}

function placeAt(url: string): Place & { url: string } {
  const { database, prepare } = parseDatabaseUrl(url);
  return {
    url,
    open: (log = silentLog) => openStore({ databaseUrl: url, dataDir: "/nowhere", log, clock }),
    async execute(statement) {
      await using client = new SQL(parseDatabaseUrl(url).url, { max: 1, database, prepare });
      await client.unsafe(statement);
    },
    remove() {},
  };
}

export const places = { sqlite: async () => sqlitePlace(), postgres: () => postgresPlace() };

export const agent = (id: string, name = id) => ({
  tenant: "acme",
  id,
  name,
  description: "",
  tags: null,
  metadata: "{}",
  suspended: false,
  emit_receipts: false,
  capture_body: true,
  protocol: "http" as const,
  created_by: "ada",
  created_at: 1_763_700_000_123,
  updated_at: 0,
  rate_revision: 0,
});

export const addAgent = (tx: Tx, id: string, name?: string) => tx.db.insert(tx.tables.agents).values(agent(id, name));

export async function agentIds({ read: { db, tables } }: Store): Promise<string[]> {
  const rows = await db.select({ id: tables.agents.id }).from(tables.agents).orderBy(asc(tables.agents.id));
  return rows.map((row) => row.id);
}

const kindOf = (error: unknown) => (error instanceof Fault ? error.kind : String(error));
export const outcome = (promise: Promise<unknown>) =>
  promise.then(
    () => "stored",
    (error) => kindOf(error),
  );

/** Everything that a log may print of an error. */
export function shown(error: unknown): string {
  return error instanceof Error
    ? `${Bun.inspect(error)} ${JSON.stringify(error)} ${shown(error.cause)}`
    : String(error);
}
