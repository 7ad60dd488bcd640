// The two databases that things are measured on, each as durable as it is in production: SQLite with its own settings,
// and the Postgres of the tests with fsync on. A million stored calls are made inside them (long-history.ts).

import { Database } from "bun:sqlite";
import { join } from "node:path";
import { SQL } from "bun";
import type { Environment } from "../support/gateway/process.ts";
import { newMasterKey } from "../support/keys.ts";
import { longHistory } from "../support/stores/long-history.ts";
import { startDurablePostgres } from "../support/stores/postgres.ts";
import { coreSecondsIn, usageOf } from "./cores.ts";

/** An empty database of a kind. */
export interface BenchDatabase {
  readonly name: "SQLite" | "Postgres";
  /** Null for SQLite, whose database is a file of the process that uses it. */
  readonly url: string | null;
  /** What a gateway on it is to be told. */
  readonly env: Environment;
  /** Puts so many calls of each tenant into its history, while no gateway has it open. */
  fill(dataDir: string, tenants: Readonly<Record<string, number>>): Promise<void>;
  /** Seconds of a core that a server of its own has used so far. */
  serverSeconds(): number;
  /** Bytes that this process has written so far; of Postgres, those of the server's log. */
  written(pid: number): Promise<number>;
}

export type OpenDatabase = () => Promise<BenchDatabase>;

async function openSqlite(): Promise<BenchDatabase> {
  return {
    name: "SQLite",
    url: null,
    env: {},
    async fill(dataDir, tenants) {
      const database = new Database(join(dataDir, "tollgate.db"));
      for (const statement of statements(tenants)) database.run(statement);
      database.close();
    },
    serverSeconds: () => 0,
    written: async (pid) => usageOf(pid).written,
  };
}

async function openPostgres(): Promise<BenchDatabase> {
  const url = await (await startDurablePostgres()).freshDatabase();
  const ask = async (statement: string): Promise<readonly Record<string, unknown>[]> => {
    await using client = new SQL(url, { max: 1 });
    // Awaited here: a query is sent when it is awaited, and the client goes with this block.
    return await client.unsafe(statement);
  };
  const [row] = await ask("show data_directory");
  const directory = String(row?.["data_directory"]);
  const key = newMasterKey();
  return {
    name: "Postgres",
    url,
    env: { DATABASE_URL: url, TOLLGATE_MASTER_KEY: key },
    async fill(_dataDir, tenants) {
      await using client = new SQL(url, { max: 1 });
      for (const statement of statements(tenants)) await client.unsafe(statement);
      // As the server does by itself after a while, and so that what was filled in is on the disk.
      await client.unsafe("vacuum analyze");
      await client.unsafe("checkpoint");
    },
    serverSeconds: () => coreSecondsIn(directory),
    async written() {
      const [wal] = await ask("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn as bytes");
      return Number(wal?.["bytes"]);
    },
  };
}

function statements(tenants: Readonly<Record<string, number>>): string[] {
  return Object.entries(tenants).flatMap(([tenant, calls]) => longHistory(tenant, calls));
}

export const DATABASES: readonly OpenDatabase[] = [openSqlite, openPostgres];
