// Transactions that write on Postgres: each is begun with a shard for its totals, and again when another one has undone
// it. What became of a commit without an answer is unknown, and said to be.
import { sql } from "drizzle-orm";
import type { CallEnd } from "../core/call-end.ts";
import type { SqlRow } from "./commands.ts";
import { addCount, anyShard, type Counts, changedCounts, TAKE_FREE_SHARD, takeShard } from "./counts.ts";
import { NOW } from "./database-clock.ts";
import { postgresCommitFailure, postgresFailure } from "./failures.ts";
import type { ConnectionPool, DatabaseConnection } from "./pool.ts";
import { type Effects, runCommands } from "./postgres-commands.ts";
import { postgresTables } from "./postgres-queries.ts";
import { lockStatement } from "./row-locks.ts";
import type { Tx } from "./store.ts";
import { untilNotUndone } from "./undone.ts";

/** Changes nothing, and is written and committed all the same. */
export const PROBE = "update schema_versions set applied_at = applied_at where version = 1";

type Task<T> = (tx: Tx, connection: DatabaseConnection, effects: Effects) => Promise<T>;

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
        tables: postgresTables,
        now,
        count: (...count) => addCount(counts, ...count),
        ended: effects.ended,
        async execute(command, input) {
          const [output] = await runCommands(connection, command, [input], effects);
          return output as never;
        },
        lock: (key) => connection.run(...lockStatement(key)),
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

export interface Writing {
  readonly writers: ConnectionPool;
  readonly begin: string;
  readonly callMsMax: number;
  /** Called after the commit with the calls that a work has ended. */
  ended(ends: readonly CallEnd[]): void;
}

/** Begins a transaction, and gives the shard of its totals. */
async function beginOn(connection: DatabaseConnection, begin: string): Promise<number> {
  const shard = anyShard();
  try {
    const begun = (await connection.query(`${begin}; ${takeShard(shard)}`, [], "objects")) as SqlRow[][];
    if (begun.at(-1)?.[0]?.["is_taken"] === true) return shard;
    const [free] = (await connection.query(TAKE_FREE_SHARD, [], "objects")) as SqlRow[];
    return free === undefined ? shard : Number(free["shard"]);
  } catch (error) {
    connection.abandon();
    throw error;
  }
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
        const shard = await beginOn(connection, begin);
        begun = true;
        const committing = () => {
          isCommitting = true;
          onCommitting?.();
        };
        return transaction(connection, task, { shard, committing, ended });
      },
      tenant,
    );
  };
  try {
    return await untilNotUndone(until, attempt, () => !begun);
  } catch (thrown) {
    throw isCommitting ? postgresCommitFailure(thrown) : postgresFailure(thrown);
  }
}
