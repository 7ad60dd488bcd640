// The store on Postgres: each work is one ordinary transaction on a bounded pool, right at every isolation from read
// committed upwards. Every wait has a limit, and a server that comes back is found again by the next call.
// In one file, since every use of a connection is told apart here: reads, look-ups, commands and transactions.

import { sql } from "drizzle-orm";
import { columns } from "../../db/columns.ts";
import { defineSchema } from "../../db/schema.ts";
import type { CallEnd } from "../core/call-end.ts";
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { createCallEnds } from "./call-ends.ts";
import { type Capabilities, probeCapabilities } from "./capabilities.ts";
import { createCommandKinds, createCommandLanes } from "./command-batches.ts";
import type { SharedCount, SqlRow } from "./commands.ts";
import { addCount, anyShard, type Counts, changedCounts, TAKE_FREE_SHARD, takeShard } from "./counts.ts";
import { openDatabaseClock } from "./database-clock.ts";
import { parseDatabaseUrl } from "./database-url.ts";
import { within } from "./deadline.ts";
import { postgresCommitFailure, postgresFailure, startProblem } from "./failures.ts";
import { migratePostgres } from "./migrate.ts";
import { createPartitions } from "./partitions/partitions.ts";
import {
  BEGIN_COMMANDS,
  BEGIN_LOOK_UP,
  BEGIN_WRITE,
  beginRead,
  type ConnectionPool,
  createConnectionPools,
  type DatabaseConnection,
  postgresClient,
  postgresQueries,
} from "./pool.ts";
import { takeRowLock } from "./row-locks.ts";
import { createSharedCounts } from "./shared-counts.ts";
import type { Reader, Store, Tx } from "./store.ts";
import { untilNotUndone } from "./undone.ts";

/** Together they leave room for several replicas below Postgres's usual limit of 100. */
const WRITERS_MAX = 8;
/** Transactions of commands at once: the next one gathers while these wait for the disk. */
const BATCHES_MAX = 2;
/** The same of commands with large bodies. */
const LARGE_BATCHES_MAX = 2;
const READERS_MAX = 6;
const FIRST_READERS_MAX = 3;
/** Opened when there is something to count. */
const COUNTERS_MAX = 3;
/** The limit of one read or write, from the wait for a connection to the answer; the interface promises 10 s. */
const CALL_MS_MAX = 9_000;

const POOLER_HINT = { hint: "behind PgBouncer before 1.21, DATABASE_URL needs ?prepare=false" };

/** Changes nothing, and is written and committed all the same. */
const PROBE = "update schema_migrations set applied_at = applied_at where version = 1";

interface PostgresOptions {
  readonly databaseUrl: string;
  readonly clock: Clock;
  readonly log: Log;
  /** The longest that one read or write takes; tests shorten it. */
  readonly callMsMax?: number;
}

type Task<T> = (tx: Tx, connection: DatabaseConnection, effects: Effects) => Promise<T>;

const tables = defineSchema(columns.postgres);

/** The server's own time in milliseconds since the epoch. */
export const NOW = "(extract(epoch from clock_timestamp()) * 1000)::bigint";
const now = sql<number>`${sql.raw(NOW)}`.mapWith(Number);

/** One statement for all totals; its rows are locked in their order, which is the same everywhere. */
async function flush(connection: DatabaseConnection, counts: Counts, shard: number): Promise<void> {
  const changed = changedCounts(counts);
  if (changed.length === 0) return;
  const rows = changed.map(
    (_, i) => `($${5 * i + 2}, $${5 * i + 3}, $${5 * i + 4}, $${5 * i + 5}::bigint, $1::bigint, $${5 * i + 6}::bigint)`,
  );
  await connection.run(
    `insert into invocation_counts as c (tenant, dimension, value, period, shard, count) values ${rows.join(", ")}
     on conflict (tenant, dimension, value, period, shard) do update set count = c.count + excluded.count`,
    [
      shard,
      ...changed.flatMap(({ tenant, period, dimension, value, delta }) => [tenant, dimension, value, period, delta]),
    ],
  );
}

/** What the statements of one transaction have together. */
interface Effects {
  readonly ended: Tx["ended"];
  /** Of the totals. */
  readonly shard: number;
}

/** Runs commands of one kind as one statement. */
async function runCommands<Input, Output>(
  connection: DatabaseConnection,
  { postgres }: SharedCount<Input, Output>,
  inputs: readonly Input[],
  { ended, shard }: Effects,
): Promise<Output[]> {
  const rows = (await connection.query(postgres.text, postgres.valuesOf(inputs, shard), "objects")) as SqlRow[];
  const followed: SqlRow[] = [];
  for (const { text, values } of postgres.afterwards?.(inputs, rows) ?? []) {
    followed.push(...((await connection.query(text, [...values], "objects")) as SqlRow[]));
  }
  return postgres.outputsOf(inputs, rows, { ended }, followed);
}

/** Everything between `begin` and `commit`. Undoes it all when anything fails. */
async function transaction<T>(
  connection: DatabaseConnection,
  task: Task<T>,
  { shard, committing, ended }: { readonly shard: number; committing(): void; ended: Writing["ended"] },
): Promise<T> {
  const counts: Counts = new Map();
  const ends: CallEnd[] = [];
  const effects: Effects = { ended: (end) => ends.push(end), shard };
  try {
    const value = await task(
      {
        db: connection.db,
        tables,
        now,
        count: (...count) => addCount(counts, ...count),
        ended: effects.ended,
        async execute(command, input) {
          const [output] = await runCommands(connection, command, [input], effects);
          return output as never;
        },
        lock: (...lock) => takeRowLock(connection, ...lock),
      },
      connection,
      effects,
    );
    await flush(connection, counts, effects.shard);
    // After a failed statement Postgres answers a commit by undoing it, without an error: a work that swallowed the
    // failure must not be told that it was stored.
    if (connection.failed !== undefined) throw connection.failed;
    committing();
    await connection.run("commit");
    ended(ends);
    return value;
  } catch (thrown) {
    if (!connection.abandoned) await connection.run("rollback").catch(connection.abandon);
    throw thrown;
  }
}

interface Writing {
  readonly writers: ConnectionPool;
  readonly begin: string;
  /** Whether the server has advisory locks. Without them shards are left to chance, and deadlocks to the next try. */
  readonly locksShards: boolean;
  readonly callMsMax: number;
  /** Called after the commit with the calls that a work has ended. */
  ended(ends: readonly CallEnd[]): void;
}

/** Begins a transaction, and gives the shard of its totals. */
async function beginOn(
  connection: DatabaseConnection,
  { begin, locksShards }: Pick<Writing, "begin" | "locksShards">,
): Promise<number> {
  const shard = anyShard();
  try {
    if (!locksShards) {
      await connection.run(begin);
      return shard;
    }
    const begun = (await connection.query(`${begin}; ${takeShard(shard)}`, [], "objects")) as SqlRow[][];
    if (begun.at(-1)?.[0]?.["is_taken"] === true) return shard;
    const [free] = (await connection.query(TAKE_FREE_SHARD, [], "objects")) as SqlRow[];
    return free === undefined ? shard : Number(free["shard"]);
  } catch (error) {
    connection.abandon();
    throw error;
  }
}

/** Runs `task` in a transaction, and again when it was undone because of another, or had not begun. */
async function write<T>(
  { writers, begin, locksShards, callMsMax, ended }: Writing,
  task: Task<T>,
  until = performance.now() + callMsMax,
  onCommitting = () => {},
): Promise<T> {
  let begun = false;
  let isCommitting = false;
  const attempt = () => {
    begun = false;
    isCommitting = false;
    return writers.use(until, async (connection) => {
      connection.failed = undefined;
      const shard = await beginOn(connection, { begin, locksShards });
      begun = true;
      const committing = () => {
        isCommitting = true;
        onCommitting();
      };
      return transaction(connection, task, { shard, committing, ended });
    });
  };
  try {
    return await untilNotUndone(until, attempt, () => !begun);
  } catch (thrown) {
    throw isCommitting ? postgresCommitFailure(thrown) : postgresFailure(thrown);
  }
}

interface Reading {
  readonly readers: ConnectionPool;
  readonly callMsMax: number;
  /** What begins a transaction that reads. */
  readonly begin: string;
}

/** Runs one query, and again when it was undone or the connection was lost: reading twice does no harm. */
function read({ readers, callMsMax, begin }: Reading, ...query: Parameters<DatabaseConnection["query"]>) {
  const until = performance.now() + callMsMax;
  return untilRead(readers, until, (connection) => readOnce(connection, begin, ...query));
}

async function untilRead<T>(
  readers: ConnectionPool,
  until: number,
  task: (connection: DatabaseConnection) => Promise<T>,
): Promise<T> {
  try {
    return await untilNotUndone(
      until,
      () => readers.use(until, task),
      () => true,
    );
  } catch (thrown) {
    throw postgresFailure(thrown);
  }
}

const NO_EFFECTS: Effects = { ended() {}, shard: 0 };

function createLookUps(readers: ConnectionPool, callMsMax: number) {
  return createCommandKinds({
    waitMsMax: callMsMax,
    run: (groups, until) =>
      untilRead(readers, until, (connection) =>
        inRead(connection, BEGIN_LOOK_UP, async () => {
          const outputs: unknown[][] = [];
          for (const { command, inputs } of groups) {
            outputs.push(await runCommands(connection, command, inputs, NO_EFFECTS));
          }
          return outputs;
        }),
      ),
  });
}

function readOnce(connection: DatabaseConnection, begin: string, ...query: Parameters<DatabaseConnection["query"]>) {
  return inRead(connection, begin, () => connection.query(...query));
}

async function inRead<T>(connection: DatabaseConnection, begin: string, task: () => Promise<T>): Promise<T> {
  await connection.run(begin);
  try {
    return await task();
  } finally {
    // After a failed query too, this ends the transaction. If it fails, the connection is of no more use.
    if (!connection.abandoned) await connection.run("commit").catch(connection.abandon);
  }
}

/** Checks what cannot be changed later, and brings the schema up to date. */
async function prepareDatabase(options: PostgresOptions): Promise<Capabilities> {
  const { databaseUrl, clock, log, callMsMax = CALL_MS_MAX } = options;
  const client = postgresClient(databaseUrl);
  try {
    const capabilities = await within(callMsMax, probeCapabilities(client, databaseUrl));
    log.info("database_capabilities", { ...capabilities });
    if (capabilities.pooled && capabilities.prepared_statements)
      log.warn("pooler_must_follow_prepared_statements", POOLER_HINT);
    await migratePostgres(client, { clock, log });
    return capabilities;
  } catch (error) {
    throw startProblem(error) ?? error;
  } finally {
    await client.close({ timeout: 0 });
  }
}

/** @throws StartupProblem when it can't be reached or used, or belongs to a newer program. */
export async function openPostgres(options: PostgresOptions): Promise<Store> {
  const { advisory_locks: locksShards } = await prepareDatabase(options);
  const { callMsMax = CALL_MS_MAX } = options;
  const begin = beginRead(parseDatabaseUrl(options.databaseUrl).prepare);
  const openPool = createConnectionPools(options.databaseUrl);
  const writers = openPool(WRITERS_MAX);
  const batchers = openPool(BATCHES_MAX + LARGE_BATCHES_MAX);
  const readers = openPool(READERS_MAX);
  const firstReaders = openPool(FIRST_READERS_MAX);
  const readerOf = (pool: ConnectionPool): Reader => ({
    db: postgresQueries((...query) => read({ readers: pool, callMsMax, begin }, ...query)),
    tables,
  });
  const lookUps = createLookUps(firstReaders, callMsMax);
  const counters = openPool(COUNTERS_MAX);
  const sharedCounts = createSharedCounts(counters, callMsMax);
  const clock = await openDatabaseClock({
    async ask() {
      const [row] = await read({ readers, callMsMax, begin }, `select ${NOW}`, [], "arrays");
      return Number((row as unknown[])[0]);
    },
  });
  const ends = createCallEnds(options.log);
  const writing: Writing = { writers, begin: BEGIN_WRITE, locksShards, callMsMax, ended: ends.tell };
  const batches = createCommandLanes({
    atOnce: BATCHES_MAX,
    largeAtOnce: LARGE_BATCHES_MAX,
    waitMsMax: callMsMax,
    run: (groups, until, committing) =>
      write(
        { ...writing, writers: batchers, begin: BEGIN_COMMANDS },
        async (_, connection, effects) => {
          const outputs: unknown[][] = [];
          for (const { command, inputs } of groups) {
            outputs.push(await runCommands(connection, command, inputs, effects));
          }
          return outputs;
        },
        until,
        committing,
      ),
  });
  return {
    dialect: "postgres",
    clock,
    read: readerOf(readers),
    readFirst: readerOf(firstReaders),
    write: (work) => write(writing, work),
    execute: batches.execute,
    lookUp: lookUps.execute,
    countTogether: sharedCounts.execute,
    onCallEnded: ends.listen,
    periods: createPartitions({ databaseUrl: options.databaseUrl, clock, log: options.log }),
    probe: (timeoutMs) =>
      within(
        timeoutMs,
        write({ ...writing, callMsMax: timeoutMs }, (_, connection) => connection.run(PROBE)),
      ),
    settle: async () => {},
    async close() {
      clock.stop();
      const until = performance.now() + callMsMax;
      const gathered = [
        batches.close().then(() => batchers.close(until)),
        lookUps.close().then(() => firstReaders.close(until)),
        sharedCounts.close().then(() => counters.close(until)),
      ];
      await Promise.all([...gathered, writers.close(until), readers.close(until)]);
    },
  };
}
