// Write transactions on Postgres. One that was undone because of another is retried. A commit without a response is unknown.
import { sql } from "drizzle-orm";
import type { CallEnd } from "../../core/call.ts";
import { isConnectionLost, postgresCommitFailure, postgresFailure, sqlState, unavailable } from "../failures.ts";
import { NOW, type Tx } from "../store.ts";
import { addCount, type Counts, changedCounts } from "../totals.ts";
import { runCommands } from "./batches.ts";
import { type ConnectionPool, type DatabaseConnection, postgresTables } from "./pool.ts";

/** A statement that changes no value, but is written and committed like any other. */
export const PROBE = "update schema_versions set applied_at = applied_at where version = 1";

type Task<T> = (tx: Tx, connection: DatabaseConnection) => Promise<T>;

const now = sql<number>`${sql.raw(NOW)}`.mapWith(Number);

/** Adds all counts in one statement. Rows are locked in the order of changedCounts, so that transactions do not deadlock. */
async function flush(connection: DatabaseConnection, counts: Counts): Promise<void> {
  const changed = changedCounts(counts);
  if (changed.length === 0) return;
  const rows = changed.map((_, i) => `($${4 * i + 1}, $${4 * i + 2}, $${4 * i + 3}, 0, $${4 * i + 4}::bigint)`);
  await connection.run(
    `insert into invocation_counts as c (tenant, dimension, value, shard, count) values ${rows.join(", ")}
     on conflict (tenant, dimension, value, shard) do update set count = c.count + excluded.count`,
    changed.flatMap(({ tenant, dimension, value, delta }) => [tenant, dimension, value, delta]),
  );
}

/** Runs the task and commits; rolls back when anything fails. Called after `begin`. */
async function transaction<T>(
  connection: DatabaseConnection,
  task: Task<T>,
  { committing, ended }: { committing(): void; ended: Writing["ended"] },
): Promise<T> {
  const counts: Counts = new Map();
  const ends: CallEnd[] = [];
  const effects = { ended: (end: CallEnd) => void ends.push(end) };
  try {
    const value = await task(
      {
        db: connection.db,
        tables: postgresTables,
        now,
        count: (...count) => addCount(counts, ...count),
        ...effects,
        async execute(command, input) {
          const [output] = await runCommands(connection, command, [input], effects);
          return output as never;
        },
        lock: (key) => connection.run(TAKE, [rowOf(key)]),
      },
      connection,
    );
    await flush(connection, counts);
    // After a failed statement Postgres answers a commit with a rollback but no error, and a task may have swallowed the failure.
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

export interface Writing {
  readonly writers: ConnectionPool;
  readonly begin: string;
  readonly callMsMax: number;
  /** Called after the commit with the calls that the transaction has ended. */
  ended(ends: readonly CallEnd[]): void;
}

/** Runs `task` in a transaction, and again when that was undone because of another one, or had not begun. */
export async function write<T>(
  { writers, begin, callMsMax, ended }: Writing,
  task: Task<T>,
  until = performance.now() + callMsMax,
  tenant: string | null = null,
  onCommitting = () => {},
): Promise<T> {
  let begun = false;
  let isCommitting = false;
  const attempt = () => {
    begun = false;
    isCommitting = false;
    return writers.use(
      until,
      async (connection) => {
        connection.failed = undefined;
        await connection.run(begin).catch((error) => {
          connection.abandon();
          throw error;
        });
        begun = true;
        const committing = () => {
          isCommitting = true;
          onCommitting();
        };
        return transaction(connection, task, { committing, ended });
      },
      tenant,
    );
  };
  try {
    return await retrySerialization(until, attempt, () => !begun);
  } catch (thrown) {
    throw isCommitting ? postgresCommitFailure(thrown) : postgresFailure(thrown);
  }
}

const [PAUSE_MS_MIN, PAUSE_MS_MAX] = [2, 200];
/** A serialization failure or a deadlock has undone the transaction as a whole, so that it may run again. */
const UNDONE = /^40(001|P01)$/;

/**
 * Retries `attempt` until it succeeds, or until shortly before `until` (by performance.now()). One side of a conflict always
 * succeeds, but at `repeatable read` the release of a lock undoes all transactions that wait for it, so one of many may be
 * undone often. The backoff is a random time of up to 2, 4, 8 … 200 ms (full jitter), so that conflicts do not repeat.
 * @param mayRepeat whether a try that lost its connection certainly changed nothing
 * @throws the error of the last try
 */
async function retrySerialization<T>(until: number, attempt: () => Promise<T>, mayRepeat: () => boolean): Promise<T> {
  let lost = 0;
  for (let tries = 1; ; tries += 1) {
    try {
      return await attempt();
    } catch (thrown) {
      // The first try finds an idle connection lost, and the next one gets a new connection.
      if (isConnectionLost(thrown) && mayRepeat() && ++lost < 4) continue;
      if (!UNDONE.test(sqlState(thrown) ?? "")) throw thrown;
      const pause = Math.random() * Math.min(PAUSE_MS_MIN * 2 ** (tries - 1), PAUSE_MS_MAX);
      if (performance.now() + pause >= until) throw unavailable(thrown);
      await Bun.sleep(pause);
    }
  }
}

/**
 * Runs a task on a connection of the pool, and retries it when it was undone or lost its connection. The task must be repeatable.
 * @throws the error as translated by postgresFailure
 */
export async function retrySerializationOn<T>(
  pool: ConnectionPool,
  until: number,
  task: (connection: DatabaseConnection) => Promise<T>,
  tenant: string | null = null,
): Promise<T> {
  try {
    const attempt = () => pool.use(until, task, tenant);
    return await retrySerialization(until, attempt, () => true);
  } catch (thrown) {
    throw postgresFailure(thrown);
  }
}

/** The most rows for a kind of lock, so that none need be removed. Names with one row may wait for each other: no harm. */
const ROWS_OF_A_KIND = 65_536;

/**
 * Takes the lock of a key until the transaction ends (`Tx.lock`). An advisory lock, or a mere lock of the row, would let a
 * transaction at repeatable read or serializable go on with the snapshot from before its wait. A changed row makes it retry.
 */
const TAKE = `insert into locks as l (key, taken) values ($1, 1)
  on conflict (key) do update set taken = l.taken + 1`;

/** The row of a key. Keys of two kinds never share a row, so that taking the kinds in one order prevents deadlocks. */
function rowOf(key: string): string {
  const kind = key.slice(0, key.indexOf(":") + 1);
  return `${kind}${Bun.hash.crc32(key) % ROWS_OF_A_KIND}`;
}
