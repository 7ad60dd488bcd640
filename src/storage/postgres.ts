// The store on Postgres: each work is one ordinary transaction on a bounded pool, right at every isolation from read
// committed upwards. Every wait has a limit, and a server that comes back is found again by the next call.

import { actingTenant } from "../concurrency/request-turns.ts";
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { createCallEnds } from "./call-ends.ts";
import { probeCapabilities } from "./capabilities.ts";
import { createCommandKinds, createCommandLanes } from "./command-batches.ts";
import { NOW, openDatabaseClock } from "./database-clock.ts";
import { parseDatabaseUrl } from "./database-url.ts";
import { within } from "./deadline.ts";
import { startProblem } from "./failures.ts";
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
} from "./pool.ts";
import { type Effects, runCommands, runGroups } from "./postgres-commands.ts";
import { postgresReader } from "./postgres-queries.ts";
import { PROBE, type Writing, write } from "./postgres-writes.ts";
import { createSharedCounts } from "./shared-counts.ts";
import type { Reader, Store } from "./store.ts";
import { untilNotUndoneOn } from "./undone.ts";

/** Together they leave room for several replicas below Postgres's usual limit of 100. */
const WRITERS_MAX = 7;
const FIRST_WRITERS_MAX = 1;
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

interface PostgresOptions {
  readonly databaseUrl: string;
  readonly clock: Clock;
  readonly log: Log;
  /** The longest that one read or write takes; tests shorten it. */
  readonly callMsMax?: number;
}

/** Checks what cannot be changed later, and brings the schema up to date. */
async function prepareDatabase(options: PostgresOptions): Promise<void> {
  const { databaseUrl, clock, log, callMsMax = CALL_MS_MAX } = options;
  const client = postgresClient(databaseUrl);
  try {
    const capabilities = await within(callMsMax, probeCapabilities(client, databaseUrl));
    log.info("database_capabilities", { ...capabilities });
    if (capabilities.pooled && capabilities.prepared_statements)
      log.warn("pooler_must_follow_prepared_statements", POOLER_HINT);
    await migratePostgres(client, { clock, log });
  } catch (error) {
    throw startProblem(error) ?? error;
  } finally {
    await client.close({ timeout: 0 });
  }
}

/** @throws StartupProblem when it can't be reached or used, or belongs to a newer program. */
export async function openPostgres(options: PostgresOptions): Promise<Store> {
  await prepareDatabase(options);
  const { callMsMax = CALL_MS_MAX } = options;
  const begin = beginRead(parseDatabaseUrl(options.databaseUrl).prepare);
  const openPool = createConnectionPools(options.databaseUrl);
  const writers = openPool(WRITERS_MAX);
  const firstWriters = openPool(FIRST_WRITERS_MAX);
  const batchers = openPool(BATCHES_MAX + LARGE_BATCHES_MAX);
  const readers = openPool(READERS_MAX);
  const firstReaders = openPool(FIRST_READERS_MAX);
  const reading: Reading = { readers, callMsMax, begin };
  const lookUps = createLookUps(firstReaders, callMsMax);
  const counters = openPool(COUNTERS_MAX);
  const sharedCounts = createSharedCounts(counters, callMsMax);
  const clock = await openDatabaseClock({
    async ask() {
      const [row] = await read(reading, `select ${NOW}`, [], "arrays");
      return Number((row as unknown[])[0]);
    },
  });
  const ends = createCallEnds(options.log);
  const writing: Writing = { writers, begin: BEGIN_WRITE, callMsMax, ended: ends.tell };
  const batches = createCommandLanes({
    atOnce: BATCHES_MAX,
    largeAtOnce: LARGE_BATCHES_MAX,
    waitMsMax: callMsMax,
    run: (groups, until, committing) =>
      write(
        { ...writing, writers: batchers, begin: BEGIN_COMMANDS },
        (_, connection, effects) =>
          runGroups(groups, ({ command, inputs }) => runCommands(connection, command, inputs, effects)),
        until,
        { committing },
      ),
  });
  return {
    dialect: "postgres",
    clock,
    read: createReader(reading),
    readFirst: createReader({ ...reading, readers: firstReaders }),
    write: (work) => write(writing, work, undefined, { tenant: actingTenant() }),
    writeFirst: (work) => write({ ...writing, writers: firstWriters }, work),
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
      await Promise.all([...gathered, ...[writers, firstWriters, readers].map((pool) => pool.close(until))]);
    },
  };
}

interface Reading {
  readonly readers: ConnectionPool;
  readonly callMsMax: number;
  /** What begins a transaction that reads. */
  readonly begin: string;
}

const createReader = (reading: Reading): Reader => postgresReader((...query) => read(reading, ...query));

/** In a transaction that may not write. Reading twice does no harm: a read that was undone or lost its connection is repeated. */
function read({ readers, callMsMax, begin }: Reading, ...query: Parameters<DatabaseConnection["query"]>) {
  const until = performance.now() + callMsMax;
  const task = (connection: DatabaseConnection) => inRead(connection, begin, () => connection.query(...query));
  return untilNotUndoneOn(readers, until, task, actingTenant());
}

const NO_EFFECTS: Effects = { ended() {}, shard: 0 };

/** Commands that only read. */
function createLookUps(readers: ConnectionPool, callMsMax: number) {
  return createCommandKinds({
    waitMsMax: callMsMax,
    run: (groups, until) =>
      untilNotUndoneOn(readers, until, (connection) =>
        inRead(connection, BEGIN_LOOK_UP, () =>
          runGroups(groups, ({ command, inputs }) => runCommands(connection, command, inputs, NO_EFFECTS)),
        ),
      ),
  });
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
