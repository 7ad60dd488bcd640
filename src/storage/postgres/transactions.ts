// Transactions that write on Postgres: each is begun again when another one has undone it. What became of a commit without an
// answer is unknown, and said to be.
import { sql } from "drizzle-orm";
import type { CallEnd } from "../../core/call.ts";
import {
  isConnectionLost,
  isTransactionUndone,
  postgresCommitFailure,
  postgresFailure,
  unavailable,
} from "../failures.ts";
import { NOW, type Tx } from "../store.ts";
import { addCount, type Counts, changedCounts } from "../totals.ts";
import { runCommands } from "./batches.ts";
import { type ConnectionPool, type DatabaseConnection, postgresTables } from "./pool.ts";

/** Changes nothing, and is written and committed all the same. */
export const PROBE = "update schema_versions set applied_at = applied_at where version = 1";

type Task<T> = (tx: Tx, connection: DatabaseConnection) => Promise<T>;

const now = sql<number>`${sql.raw(NOW)}`.mapWith(Number);

/** One statement for all totals; its rows are locked in their order, which is the same everywhere. */
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

/** Everything between `begin` and `commit`. Undoes it all when anything fails. */
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
        lock: (key) => connection.run(...lockStatement(key)),
      },
      connection,
    );
    await flush(connection, counts);
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

export interface Writing {
  readonly writers: ConnectionPool;
  readonly begin: string;
  readonly callMsMax: number;
  /** Called after the commit with the calls that a work has ended. */
  ended(ends: readonly CallEnd[]): void;
}

interface Options {
  /** Called when nothing but the commit is left. */
  readonly committing?: () => void;
  /** Whose turn it takes; without one it is the process's own. */
  readonly tenant?: string | null;
}

/** Runs `task` in a transaction, and again when it was undone because of another, or had not begun. */
export async function write<T>(
  { writers, begin, callMsMax, ended }: Writing,
  task: Task<T>,
  until = performance.now() + callMsMax,
  { committing: onCommitting, tenant }: Options = {},
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
          onCommitting?.();
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

const [PAUSE_MS_LEAST, PAUSE_MS_MOST] = [2, 200];

/**
 * Runs `attempt` until it succeeds, or `until` (by performance.now()) is near: one side of a conflict always goes on, but
 * at `repeatable read` a lock that is released undoes all who wait for it, so one of many may be undone often. Between two
 * tries it pauses for a random time of up to 2, 4, 8 … 200 ms (full jitter), so that those who were in each other's way
 * come back at different times.
 *
 * @param mayRepeat whether a try that lost its connection certainly changed nothing
 * @throws what the last try threw
 */
async function retrySerialization<T>(until: number, attempt: () => Promise<T>, mayRepeat: () => boolean): Promise<T> {
  let lost = 0;
  for (let tries = 1; ; tries += 1) {
    try {
      return await attempt();
    } catch (thrown) {
      // In a lost connection one try finds the loss, and the next has a new one.
      if (isConnectionLost(thrown) && mayRepeat() && ++lost < 4) continue;
      if (!isTransactionUndone(thrown)) throw thrown;
      const pause = Math.random() * Math.min(PAUSE_MS_LEAST * 2 ** (tries - 1), PAUSE_MS_MOST);
      if (performance.now() + pause >= until) throw unavailable(thrown);
      await Bun.sleep(pause);
    }
  }
}

/**
 * Runs a task that may be done twice on a connection of the pool, until it was not undone.
 *
 * @throws the store's own failure
 */
export async function retrySerializationOn<T>(
  pool: ConnectionPool,
  until: number,
  task: (connection: DatabaseConnection) => Promise<T>,
  tenant: string | null = null,
): Promise<T> {
  try {
    return await retrySerialization(
      until,
      () => pool.use(until, task, tenant),
      () => true,
    );
  } catch (thrown) {
    throw postgresFailure(thrown);
  }
}

/**
 * Rows of a kind of lock. Names that fall on one row only wait for each other now and then, and the table never holds
 * more than this for each kind, so nothing has to be removed.
 */
const ROWS_OF_A_KIND = 65_536;

/** The change of the row is what tells the others: a row that was only locked would let them go on. */
const TAKE = `insert into locks as l (key, taken) values ($1, 1)
  on conflict (key) do update set taken = l.taken + 1`;

/** `payer:0x12…` and `ceiling:acme` never share a row, so that two kinds may be taken in one order everywhere. */
function rowOf(key: string): string {
  const kind = key.slice(0, key.indexOf(":") + 1);
  return `${kind}${Bun.hash.crc32(key) % ROWS_OF_A_KIND}`;
}

/**
 * A lock that a work holds until it ends (`Tx.lock`), as a row. Unlike an advisory lock, a row tells a transaction of which all
 * statements see one moment (repeatable read, serializable) that another one has been at work since that moment: it is undone
 * and runs again, instead of going on with what it saw before it waited.
 */
const lockStatement = (key: string): [text: string, values: string[]] => [TAKE, [rowOf(key)]];
