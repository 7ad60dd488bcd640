// Inspects a Postgres database over one connection (see ../inspect.ts), and probes the capabilities of its server, which are checked
// and logged at the start, before anything is changed.
import type { SQL } from "bun";
import { PassingStartupProblem, StartupProblem } from "../../core/startup.ts";
import { MAX } from "../../kernel/limits.ts";
import { openProblem, POOLER_STATE, sqlState, startProblem, within } from "../failures.ts";
import { type DatabaseInspection, NO_KEYS, type WrappedKeys } from "../inspect.ts";
import { schemaOf, versionsOnPostgres } from "../migrate.ts";
import { NOW } from "../store.ts";
import { parseDatabaseUrl, postgresClient, postgresReader } from "./pool.ts";
import { PROBE } from "./transactions.ts";

/** @throws StartupProblem when the server can't be reached or used */
export async function inspectPostgres(databaseUrl: string): Promise<DatabaseInspection> {
  const client = postgresClient(databaseUrl);
  try {
    const capabilities = await within(MAX.storeMs, probeCapabilities(client, databaseUrl));
    const schema = schemaOf(await within(MAX.storeMs, versionsOnPostgres(client)));
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
    throw await openProblem(error, databaseUrl);
  }
}

async function run(client: SQL, text: string, values: unknown[], rows: "arrays" | "objects"): Promise<unknown[]> {
  const running = client.unsafe(text, values);
  return rows === "arrays" ? running.values() : running;
}

async function wrappedKeys(client: SQL): Promise<WrappedKeys> {
  return {
    tenantKeys: await client.unsafe("select tenant, number::int as number, wrapped_key from tenant_keys"),
    signingKeys: await client.unsafe("select kid, purpose, wrapped_private_key from signing_keys"),
  };
}

async function tryWrite(client: SQL): Promise<number> {
  const undo = new Error("tried");
  let from = 0;
  try {
    await client.begin(async (tx) => {
      // The doctor waits no longer than this.
      await tx.unsafe("set local statement_timeout = 4000");
      from = performance.now();
      await tx.unsafe(PROBE);
      throw undo;
    });
  } catch (error) {
    if (error !== undo) throw refused(error);
  }
  return performance.now() - from;
}

/** Checks the privilege only: creating a table would show in the server's audit log, even if it is rolled back. */
async function mayMakeTables(client: SQL): Promise<number> {
  const from = performance.now();
  const [row] = await client.unsafe<{ may: number | null }[]>(
    "select has_schema_privilege(current_schema(), 'create')::int as may",
  );
  if (row?.may === 1) return performance.now() - from;
  throw new StartupProblem("its user may not create tables in the schema that it uses");
}

function refused(error: unknown): unknown {
  const problem = `it takes no write (SQLSTATE ${sqlState(error) ?? "unknown"})`;
  return startProblem(error) ?? new StartupProblem(problem, { cause: error });
}

/** The oldest major version that has all the statements we use; tests run on 15 and 18. */
const OLDEST_VERSION = 13;

export interface Capabilities {
  readonly server: string;
  readonly default_isolation: string;
  /**
   * Whether a pooler such as PgBouncer is in between, which drops the settings of connections. LISTEN does not work through a
   * transaction pooler, since it uses another server connection for each transaction.
   */
  readonly pooled: boolean;
  readonly prepared_statements: boolean;
}

type Server = Record<"server" | "isolation" | "encoding" | "read_only", string> & Record<"number" | "standby", number>;

/** A statement_timeout in milliseconds that no server has by default. */
const ASKED_FOR = 7_777;

/** Tests with a startup parameter: the server keeps it, PgBouncer refuses it, and other poolers lose it. */
async function isPooled(databaseUrl: string): Promise<boolean> {
  const client = postgresClient(databaseUrl, { statement_timeout: ASKED_FOR });
  try {
    const [row] = await client.unsafe<[{ kept: string }]>("select current_setting('statement_timeout') as kept");
    return row.kept !== `${ASKED_FOR}ms`;
  } catch (error) {
    if (sqlState(error) === POOLER_STATE) return true;
    throw error;
  } finally {
    await client.close({ timeout: 0 });
  }
}

/** @throws StartupProblem when the server is too old, has another encoding than UTF-8, or takes no writes */
export async function probeCapabilities(client: SQL, databaseUrl: string): Promise<Capabilities> {
  const [{ server, number, isolation, encoding, standby, read_only }] = await client.unsafe<[Server]>(
    `select current_setting('server_version') as server, current_setting('server_version_num')::int as number,
       current_setting('default_transaction_isolation') as isolation,
       current_setting('server_encoding') as encoding, pg_is_in_recovery()::int as standby,
       current_setting('default_transaction_read_only') as read_only`,
  );
  if (number < OLDEST_VERSION * 10_000) {
    throw new StartupProblem(`the Postgres server must have version ${OLDEST_VERSION} or newer, and has ${server}`);
  }
  if (encoding !== "UTF8") {
    throw new StartupProblem(`the Postgres database must have the encoding UTF8, and has ${encoding}`);
  }
  if (standby === 1) throw new PassingStartupProblem("the Postgres server of DATABASE_URL is a read-only standby");
  const readOnly = "the Postgres database of DATABASE_URL is read-only (default_transaction_read_only)";
  if (read_only === "on") throw new PassingStartupProblem(readOnly);
  return {
    server,
    default_isolation: isolation,
    pooled: await isPooled(databaseUrl),
    prepared_statements: parseDatabaseUrl(databaseUrl).prepare,
  };
}
