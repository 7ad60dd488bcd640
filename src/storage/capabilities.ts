// What the server behind DATABASE_URL is and can do: looked at once at the start, before anything is changed, and
// logged. An engine that speaks Postgres's language but means something else by it is refused: there the totals, the
// claims or the ceilings would be wrong without an error.
import type { SQL } from "bun";
import { PassingStartupProblem, StartupProblem } from "../core/startup.ts";
import { parseDatabaseUrl } from "./database-url.ts";
import { isConnectionLost, sqlState } from "./failures.ts";
import { postgresClient } from "./pool.ts";

/** The oldest whose statements are all there; the suites run on 15 and 18. */
const OLDEST_VERSION = 13;

/** By what `version()` says. */
const REFUSED: readonly (readonly [RegExp, string])[] = [
  [/CockroachDB/i, "CockroachDB skips rows that nobody has locked, and changes its schema outside of transactions"],
  [/Redshift/i, "Amazon Redshift does not enforce keys: a payment could be taken twice"],
  [
    /-YB-|Yugabyte/i,
    "YugabyteDB changes its schema outside of transactions: a migration that is cut off leaves half of it",
  ],
  [
    /Greenplum|Cloudberry/i,
    "Greenplum has no unique keys apart from the distribution key: a payment could be taken twice",
  ],
  [/Materialize|RisingWave|CrateDB|QuestDB|Spanner/i, "it has no transactions of several statements, or no row locks"],
];
/** Every build of Postgres says with what it was compiled, whoever made it. */
const POSTGRES = /^PostgreSQL \d.*compiled by/i;

/** Why an engine that answers so to `version()` is refused; null for Postgres. */
export function refusedEngine(version: string): string | null {
  const known = REFUSED.find(([pattern]) => pattern.test(version));
  if (known !== undefined) return known[1];
  return POSTGRES.test(version) ? null : "it is not Postgres, and nobody has tried whether it does the same";
}

export interface Capabilities {
  readonly server: string;
  readonly skip_locked: boolean;
  readonly advisory_locks: boolean;
  /** Never through a transaction pooler: the connection that listens is another one the next moment. */
  readonly listen_notify: boolean;
  readonly partitions: boolean;
  readonly default_isolation: string;
  /** Whether something between here and the server takes connections' settings away, as PgBouncer does. */
  readonly pooled: boolean;
  readonly prepared_statements: boolean;
}

type Row = Readonly<Record<string, string | number | null>>;

/** Each is tried without changing anything. */
const TRIED = {
  advisory_locks: "select pg_try_advisory_xact_lock(8098991187203942501)",
  listen_notify: "listen tollgate_probe",
  skip_locked: "select 1 from pg_catalog.pg_class where false for update skip locked",
};
const PERMISSION_DENIED = "42501";
/** That is in the catalogue: trying it would change the schema, of which some servers tell their auditor. */
const TABLES = "select (to_regclass('pg_catalog.pg_partitioned_table') is not null)::int as partitions";

/** @throws StartupProblem for an engine that is none, or too old, or a standby */
async function identify(client: SQL): Promise<Row> {
  const [who] = await client.unsafe<Row[]>("select version() as version");
  const version = String(who?.["version"]);
  const why = refusedEngine(version);
  if (why !== null) throw new StartupProblem(`the server of DATABASE_URL can't be used: ${why} (it says: ${version})`);
  const [row] = await client.unsafe<Row[]>(
    `select current_setting('server_version') as server, current_setting('server_version_num')::int as number,
       current_setting('default_transaction_isolation') as isolation,
       current_setting('server_encoding') as encoding, pg_is_in_recovery()::int as standby,
       current_setting('default_transaction_read_only') as read_only,
       to_regclass('sys.jobs')::text as jobs`,
  );
  if (row === undefined) throw new StartupProblem("the server of DATABASE_URL does not say what it is");
  if (row["jobs"] !== null) {
    throw new StartupProblem(
      "the server of DATABASE_URL can't be used: Aurora DSQL has no locks and no bodies above 1 MiB",
    );
  }
  if (Number(row["number"]) < OLDEST_VERSION * 10_000) {
    throw new StartupProblem(
      `the Postgres server must have version ${OLDEST_VERSION} or newer, and has ${row["server"]}`,
    );
  }
  if (row["encoding"] !== "UTF8") {
    throw new StartupProblem(`the Postgres database must have the encoding UTF8, and has ${row["encoding"]}`);
  }
  if (Number(row["standby"]) === 1)
    throw new PassingStartupProblem("the Postgres server of DATABASE_URL is a read-only standby");
  if (row["read_only"] === "on")
    throw new PassingStartupProblem(
      "the Postgres database of DATABASE_URL is read-only (default_transaction_read_only)",
    );
  return row;
}

async function tried(client: SQL, statement: string): Promise<boolean> {
  const undo = new Error("tried");
  try {
    await client.begin(async (tx) => {
      await tx.unsafe(statement);
      throw undo;
    });
    return true;
  } catch (error) {
    if (isConnectionLost(error)) throw error;
    // A statement that was refused for want of a right was understood.
    return error === undo || sqlState(error) === PERMISSION_DENIED;
  }
}

/** Of milliseconds, and no server's own setting. */
const ASKED_FOR = 7_777;
const PROTOCOL_VIOLATION = "08P01";

/** A setting that a connection begins with: the server keeps it, PgBouncer refuses it, and others lose it. */
async function isPooled(databaseUrl: string): Promise<boolean> {
  const client = postgresClient(databaseUrl, { statement_timeout: ASKED_FOR });
  try {
    const [row] = await client.unsafe<Row[]>("select current_setting('statement_timeout') as kept");
    return row?.["kept"] !== `${ASKED_FOR}ms`;
  } catch (error) {
    if (sqlState(error) === PROTOCOL_VIOLATION) return true;
    throw error;
  } finally {
    await client.close({ timeout: 0 });
  }
}

/** @throws StartupProblem when the server can't be used as it is */
export async function probeCapabilities(client: SQL, databaseUrl: string): Promise<Capabilities> {
  const row = await identify(client);
  const can = { advisory_locks: false, listen_notify: false, skip_locked: false };
  for (const name of Object.keys(TRIED) as (keyof typeof TRIED)[]) can[name] = await tried(client, TRIED[name]);
  const [tables] = await client.unsafe<Row[]>(TABLES);
  if (!can.skip_locked) {
    throw new StartupProblem("the server of DATABASE_URL can't be used: it has no `for update skip locked`");
  }
  if (Number(tables?.["partitions"]) !== 1) {
    throw new StartupProblem("the server of DATABASE_URL can't be used: it has no partitioned tables");
  }
  const pooled = await isPooled(databaseUrl);
  return {
    ...can,
    listen_notify: can.listen_notify && !pooled,
    partitions: true,
    server: String(row["server"]),
    default_isolation: String(row["isolation"]),
    pooled,
    prepared_statements: parseDatabaseUrl(databaseUrl).prepare,
  };
}
