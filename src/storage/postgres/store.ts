// The store on Postgres: each work is one ordinary transaction on a bounded pool, right at every isolation from read
// committed upwards. Every wait has a limit, and a server that comes back is found again by the next call.

import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { MAX } from "../../kernel/limits.ts";
import { poll } from "../../kernel/loop.ts";
import { actingTenant } from "../../kernel/turns.ts";
import { startProblem, within } from "../failures.ts";
import { migratePostgres } from "../migrate.ts";
import { type CommandBase, createCallEnds, NOW, type Reader, type SqlRow, type Store } from "../store.ts";
import { createCommandKinds, createCommandLanes, runCommands, runGroups } from "./batches.ts";
import { probeCapabilities } from "./look.ts";
import {
  BEGIN_COMMANDS,
  BEGIN_COUNTS,
  BEGIN_LOOK_UP,
  BEGIN_READ,
  BEGIN_WRITE,
  type ConnectionPool,
  createConnectionPools,
  type DatabaseConnection,
  postgresClient,
  postgresReader,
} from "./pool.ts";
import { PROBE, retrySerializationOn, type Writing, write } from "./transactions.ts";

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
  const { databaseUrl, clock, log, callMsMax = MAX.storeMs } = options;
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
  const clock = await openDatabaseClock({
    async ask() {
      const [row] = await read(reading, `select ${NOW}`, [], "arrays");
      return Number((row as unknown[])[0]);
    },
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
        (tx, connection) => runGroups(groups, ({ command, inputs }) => runCommands(connection, command, inputs, tx)),
        until,
        { committing },
      ),
  });
  return {
    isShared: true,
    clock,
    read: { ...createReader(reading), urgent: createReader({ ...reading, readers: firstReaders }) },
    write: (work, { urgent = false } = {}) =>
      urgent
        ? write({ ...writing, writers: firstWriters }, work)
        : write(writing, work, undefined, { tenant: actingTenant() }),
    execute(command, input) {
      if (command.kind === "counter") return sharedCounters.execute(command, input);
      return (command.kind === "look_up" ? lookUps : batches).execute(command, input);
    },
    onCallEnded: ends.subscribe,
    probe: (timeoutMs) =>
      within(
        timeoutMs,
        write({ ...writing, callMsMax: timeoutMs }, (_, connection) => connection.run(PROBE)),
      ),
    async close() {
      clock.stop();
      const until = performance.now() + callMsMax;
      const gathered = [
        batches.close().then(() => batchers.close(until)),
        lookUps.close().then(() => firstReaders.close(until)),
        sharedCounters.close().then(() => counters.close(until)),
      ];
      await Promise.all([...gathered, ...[writers, firstWriters, readers].map((pool) => pool.close(until))]);
    },
  };
}

interface Reading {
  readonly readers: ConnectionPool;
  readonly callMsMax: number;
}

const createReader = (reading: Reading): Reader => postgresReader((...query) => read(reading, ...query));

/** In a transaction that may not write. Reading twice does no harm: a read that was undone or lost its connection is repeated. */
function read({ readers, callMsMax }: Reading, ...query: Parameters<DatabaseConnection["query"]>) {
  const until = performance.now() + callMsMax;
  const task = (connection: DatabaseConnection) => inRead(connection, BEGIN_READ, () => connection.query(...query));
  return retrySerializationOn(readers, until, task, actingTenant());
}

const NO_EFFECTS = { ended() {} };

/** Commands that only read. */
function createLookUps(readers: ConnectionPool, callMsMax: number) {
  return createCommandKinds({
    waitMsMax: callMsMax,
    run: (groups, until) =>
      retrySerializationOn(readers, until, (connection) =>
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

/** While the two clocks go alike, it is asked less and less often, down to a fourth of this. */
const ASK_EVERY_MS = 2_000;
const SELDOM = 4;

interface DatabaseClockOptions {
  /** The server's time in milliseconds since the epoch. */
  ask(): Promise<number>;
  readonly everyMs?: number;
}

/**
 * The time of a database that several processes share: the server's clock, carried on between two questions by the monotonic
 * clock of this process. So a step of this machine's clock changes nothing, and processes whose clocks differ agree on what
 * is due.
 *
 * @throws what the first question throws; later ones may fail, and the clock goes on
 */
export async function openDatabaseClock({ ask, everyMs = ASK_EVERY_MS }: DatabaseClockOptions) {
  let offset = 0;

  /** Whether the server's clock was not where it was expected. */
  async function synchronise(roundTripMsMax: number): Promise<boolean> {
    const askedAt = performance.now();
    const time = await ask();
    const answeredAt = performance.now();
    if (answeredAt - askedAt > roundTripMsMax) return true;
    const before = offset;
    offset = time - (askedAt + answeredAt) / 2;
    // The way there and back takes up to 20 ms.
    return Math.abs(offset - before) > 20;
  }

  await synchronise(Number.POSITIVE_INFINITY);
  const asking = poll({ leastMs: everyMs, mostMs: everyMs * SELDOM }, () =>
    // The answer was true at some moment during the question, so the answer to a long one says little.
    synchronise(500).catch(() => true),
  );
  return { now: () => Math.round(offset + performance.now()), stop: asking.stop };
}

/** A text as Postgres reads it, whatever `standard_conforming_strings` says. */
const literal = (text: string) => `E'${text.replace(/[\\']/g, "$&$&")}'`;

/** A message of several statements takes no values beside it: they stand in the text, arrays as the texts that they are. */
function withValues(statement: string, values: readonly unknown[]): string {
  return statement.replace(/\$(\d+)/g, (_, place) => literal(String(values[Number(place) - 1])));
}

/** Runs commands of one kind. */
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
 * What replicas count together, such as the tokens of an agent's bucket: rows that many change all the time. So a transaction
 * that changes them is one message, which the server carries out to its end whatever becomes of the process that has sent it.
 * With a message for each statement, a process that stands still, or is far away, would keep the rows from all others between
 * two of its messages.
 */
function createSharedCounters(counters: ConnectionPool, waitMsMax: number) {
  return createCommandKinds({
    waitMsMax,
    run: (groups, until) =>
      retrySerializationOn(counters, until, (connection) =>
        runGroups(groups, ({ command, inputs }) => count(connection, command, inputs)),
      ),
  });
}
