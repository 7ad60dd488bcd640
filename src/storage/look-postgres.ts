// The look at a Postgres database, over one connection.
import type { SQL } from "bun";
import { StartupProblem } from "../core/startup.ts";
import { numbered, type WrappedKeys } from "./backup.ts";
import { probeCapabilities } from "./capabilities.ts";
import { NOW } from "./database-clock.ts";
import { sqlState, startProblem } from "./failures.ts";
import { type DatabaseLook, NO_KEYS } from "./look.ts";
import { postgresClient } from "./pool.ts";
import { postgresReader } from "./postgres-queries.ts";
import { PROBE } from "./postgres-writes.ts";
import { schemaOf, versionsOnPostgres } from "./schema-fit.ts";

/** The server gives a statement of a look up after this: whoever looks has gone by then. */
const STATEMENT_MS_MAX = 4_000;

/** @throws StartupProblem when the server can't be reached or used */
export async function lookAtPostgres(databaseUrl: string): Promise<DatabaseLook> {
  const client = postgresClient(databaseUrl);
  try {
    const capabilities = await probeCapabilities(client, databaseUrl);
    const schema = schemaOf(await versionsOnPostgres(client));
    const isMade = schema.version > 0;
    return {
      dialect: "postgres",
      schema,
      capabilities,
      read: postgresReader((...query) => run(client, ...query)),
      wrappedKeys: async () => (isMade ? wrappedKeys(client) : NO_KEYS),
      tryWrite: () => (isMade ? tryWrite(client) : mayMakeTables(client)),
      async now() {
        const [row] = await client.unsafe<{ now: string }[]>(`select ${NOW} as now`);
        return Number(row?.now);
      },
      close: () => client.close({ timeout: 0 }),
    };
  } catch (error) {
    await client.close({ timeout: 0 });
    throw startProblem(error) ?? error;
  }
}

async function run(client: SQL, text: string, values: unknown[], rows: "arrays" | "objects"): Promise<unknown[]> {
  const running = client.unsafe(text, values);
  return rows === "arrays" ? running.values() : running;
}

async function wrappedKeys(client: SQL): Promise<WrappedKeys> {
  return {
    tenantKeys: numbered(await client.unsafe("select tenant, number, wrapped_key from tenant_keys")),
    signingKeys: await client.unsafe("select kid, purpose, wrapped_private_key from signing_keys"),
  };
}

async function tryWrite(client: SQL): Promise<number> {
  const undo = new Error("tried");
  let from = 0;
  try {
    await client.begin(async (tx) => {
      await tx.unsafe(`set local statement_timeout = ${STATEMENT_MS_MAX}`);
      from = performance.now();
      await tx.unsafe(PROBE);
      throw undo;
    });
  } catch (error) {
    if (error !== undo) throw refused(error);
  }
  return performance.now() - from;
}

/** Only asked: a table that is made and undone is told to those who audit the server. */
async function mayMakeTables(client: SQL): Promise<number> {
  const from = performance.now();
  const [row] = await client.unsafe<{ may: number | null }[]>(
    "select has_schema_privilege(current_schema(), 'create')::int as may",
  );
  if (row?.may === 1) return performance.now() - from;
  throw new StartupProblem("its user may make no tables in the schema that it uses");
}

function refused(error: unknown): unknown {
  const state = sqlState(error);
  return (
    startProblem(error) ?? new StartupProblem(`it takes no write (SQLSTATE ${state ?? "unknown"})`, { cause: error })
  );
}
