// The store on Postgres: each write is an ordinary transaction on a bounded pool, correct at every isolation from read committed
// upwards. Every wait has a limit, and the next call after an outage finds the server again.
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { MAX } from "../../kernel/limits.ts";
import { poll } from "../../kernel/loop.ts";
import { actingTenant } from "../../kernel/wait.ts";
import { askStore, openProblem, within } from "../failures.ts";
import { migratePostgres } from "../migrate.ts";
import { type CommandBase, createCallEnds, NOW, type Reader, type SqlRow, type Store, type Tx } from "../store.ts";
import { createCommandKinds, createCommandLanes, runGroups } from "./batches.ts";
import { probeCapabilities } from "./inspect.ts";
import type { ConnectionPool, DatabaseConnection } from "./pool.ts";
import {
  BEGIN_COMMANDS,
  BEGIN_COUNTS,
  BEGIN_LOOK_UP,
  BEGIN_READ,
  BEGIN_WRITE,
  createConnectionPools,
  postgresClient,
  postgresReader,
} from "./pool.ts";
import { PROBE, retrySerializationOn, type Writing, write } from "./transactions.ts";

const POOLER_HINT = { hint: "behind PgBouncer before 1.21, DATABASE_URL needs ?prepare=false" };

interface PostgresOptions {
  readonly databaseUrl: string;
  readonly clock: Clock;
  readonly log: Log;
  /** The longest time of one read or write; shortened by tests. */
  readonly callMsMax?: number;
}

/** Checks the server's capabilities and brings the schema up to date. */
async function prepareDatabase(options: PostgresOptions): Promise<void> {
  const { databaseUrl, clock, log, callMsMax = MAX.storeMs } = options;
  const client = postgresClient(databaseUrl);
  try {
    const capabilities = await within(callMsMax, probeCapabilities(client, databaseUrl));
    log.info("database_capabilities", { ...capabilities });
    if (capabilities.pooled && capabilities.prepared_statements)
      log.warn("pooler_must_follow_prepared_statements", POOLER_HINT);
    await migratePostgres(client, { clock, log });
  } catch (error) {
    throw await openProblem(error, databaseUrl);
  } finally {
    await client.close({ timeout: 0 });
  }
}

/** @throws StartupProblem when the database can't be reached or used, or belongs to a newer program */
export async function openPostgres(options: PostgresOptions): Promise<Store> {
  await prepareDatabase(options);
  const { callMsMax = MAX.storeMs } = options;
  const openPool = createConnectionPools(options.databaseUrl);
  const writers = openPool(MAX.storeWriters);
  const firstWriters = openPool(MAX.storeFirstWriters);
  const batchers = openPool(MAX.storeBatchers + MAX.storeLargeBatchers);
  const readers = openPool(MAX.storeReaders);
  const firstReaders = openPool(MAX.storeFirstReaders);
  const reading: Reading = { readers, callMsMax };
  const lookUps = createLookUps(firstReaders, callMsMax);
  const counters = openPool(MAX.storeCounters);
  const sharedCounters = createSharedCounters(counters, callMsMax);
  const clock = await openDatabaseClock(async () => {
    const [row] = await read(reading, `select ${NOW}`, [], "arrays");
    return Number((row as unknown[])[0]);
  });
  const ends = createCallEnds(options.log);
  const writing: Writing = { writers, begin: BEGIN_WRITE, callMsMax, ended: ends.publish };
  const batches = createCommandLanes({
    atOnce: MAX.storeBatchers,
    largeAtOnce: MAX.storeLargeBatchers,
    waitMsMax: callMsMax,
    run: (groups, until, committing) =>
      write(
        { ...writing, writers: batchers, begin: BEGIN_COMMANDS },
        (tx, connection) => runGroups(groups, connection, tx),
        until,
        null,
        committing,
      ),
  });
  return {
    isShared: true,
    clock,
    read: { ...createReader(reading), urgent: createReader({ ...reading, readers: firstReaders }) },
    write: (work, { urgent = false } = {}) =>
      urgent
        ? write({ ...writing, writers: firstWriters }, work)
        : askStore(callMsMax, (until) => write(writing, work, until, actingTenant())),
    execute: (command, input) =>
      askStore(callMsMax, (until) => {
        if (command.kind === "counter") return sharedCounters.execute(command, input, until);
        return (command.kind === "look_up" ? lookUps : batches).execute(command, input, until);
      }),
    onCallEnded: ends.subscribe,
    probe: (timeoutMs) => within(timeoutMs, write({ ...writing, callMsMax: timeoutMs }, touch)),
    async close() {
      clock.stop();
      const until = performance.now() + callMsMax;
      const batched = [
        batches.close().then(() => batchers.close(until)),
        lookUps.close().then(() => firstReaders.close(until)),
        sharedCounters.close().then(() => counters.close(until)),
      ];
      await Promise.all([...batched, ...[writers, firstWriters, readers].map((pool) => pool.close(until))]);
    },
  };
}

const touch = (_: Tx, connection: DatabaseConnection) => connection.run(PROBE);

interface Reading {
  readonly readers: ConnectionPool;
  readonly callMsMax: number;
}

const createReader = (reading: Reading): Reader => postgresReader((...query) => read(reading, ...query));

/** Runs a query in a read-only transaction. It is retried when it was undone or lost its connection. */
function read({ readers, callMsMax }: Reading, ...query: Parameters<DatabaseConnection["query"]>) {
  const task = (connection: DatabaseConnection) => inRead(connection, BEGIN_READ, () => connection.query(...query));
  return askStore(callMsMax, (until) => retrySerializationOn(readers, until, task, actingTenant()));
}

const NO_EFFECTS = { ended() {} };

/** Batches of commands that only read. */
function createLookUps(readers: ConnectionPool, callMsMax: number) {
  return createCommandKinds({
    waitMsMax: callMsMax,
    run: (groups, until) =>
      retrySerializationOn(readers, until, (connection) =>
        inRead(connection, BEGIN_LOOK_UP, () => runGroups(groups, connection, NO_EFFECTS)),
      ),
  });
}

async function inRead<T>(connection: DatabaseConnection, begin: string, task: () => Promise<T>): Promise<T> {
  await connection.run(begin);
  try {
    return await task();
  } finally {
    // The commit ends the transaction even after a failed query. If it fails itself, the connection is unusable.
    if (!connection.abandoned) await connection.run("commit").catch(connection.abandon);
  }
}

/** How often the server's clock is asked. While the two clocks agree the interval grows, up to CALM_FACTOR times. */
const ASK_EVERY_MS = 2_000;
const CALM_FACTOR = 4;

/**
 * The clock of a database that several processes share: the server's time, extrapolated between two queries by the monotonic
 * clock of this process. So a step of this machine's clock changes nothing, and processes agree on what is due.
 * @throws the error of the first query; later queries may fail, and the clock goes on
 */
export async function openDatabaseClock(ask: () => Promise<number>, everyMs = ASK_EVERY_MS) {
  /** The bounds of the offset to the monotonic clock: the server read its time at some moment of the round trip. */
  async function measure() {
    const askedAt = performance.now();
    const time = await ask();
    return { least: time - performance.now(), most: time - askedAt };
  }

  const { least, most } = await measure();
  let offset = (least + most) / 2;

  /** Corrects the clock only where it is out of bounds. @returns whether it was */
  async function synchronise(): Promise<boolean> {
    const { least, most } = await measure();
    const isWrong = offset < least || offset > most;
    offset = Math.min(Math.max(offset, least), most);
    return isWrong;
  }

  const asking = poll({ leastMs: everyMs, mostMs: everyMs * CALM_FACTOR }, () => synchronise().catch(() => true));
  return { now: () => Math.round(offset + performance.now()), stop: asking.stop };
}

/** A string literal, independent of `standard_conforming_strings`. */
const literal = (text: string) => `E'${text.replace(/[\\']/g, "$&$&")}'`;

/** Puts the values into the statement, since a message of several statements takes no parameters. Arrays are literals already. */
const withValues = (statement: string, values: readonly unknown[]): string =>
  statement.replace(/\$(\d+)/g, (_, place) => literal(String(values[Number(place) - 1])));

/** Runs counter commands of one kind. */
async function count<Input, Output>(
  connection: DatabaseConnection,
  { postgres }: CommandBase<Input, Output>,
  inputs: readonly Input[],
): Promise<Output[]> {
  const statement = withValues(postgres.text, postgres.valuesOf(inputs));
  let results: SqlRow[][];
  try {
    results = (await connection.query(`${BEGIN_COUNTS}; ${statement}; commit`, [], "objects")) as SqlRow[][];
  } catch (error) {
    if (!connection.abandoned) await connection.run("rollback").catch(connection.abandon);
    throw error;
  }
  return postgres.outputsOf(inputs, results.at(-2) ?? [], NO_EFFECTS);
}

/**
 * Counters that replicas share, such as the token bucket of an agent: hot rows. So a transaction that changes them is one message,
 * which the server executes to its end whatever becomes of its sender. With a message for each statement, a process that is
 * suspended or far away would hold the row locks between two of its messages.
 */
function createSharedCounters(counters: ConnectionPool, waitMsMax: number) {
  return createCommandKinds({
    waitMsMax,
    run: (groups, until) =>
      retrySerializationOn(counters, until, (connection) =>
        Array.fromAsync(groups, ({ command, inputs }) => count(connection, command, inputs)),
      ),
  });
}
