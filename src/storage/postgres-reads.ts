// Reads on Postgres, each in a transaction that may not write. Reading twice does no harm, so a read is repeated when it was
// undone or its connection was lost.
import { actingTenant } from "../concurrency/request-turns.ts";
import { createCommandKinds } from "./command-batches.ts";
import { BEGIN_LOOK_UP, type ConnectionPool, type DatabaseConnection } from "./pool.ts";
import { type Effects, runCommands, runGroups } from "./postgres-commands.ts";
import { postgresReader } from "./postgres-queries.ts";
import type { Reader } from "./store.ts";
import { untilNotUndoneOn } from "./undone.ts";

export interface Reading {
  readonly readers: ConnectionPool;
  readonly callMsMax: number;
  /** What begins a transaction that reads. */
  readonly begin: string;
}

export const createReader = (reading: Reading): Reader => postgresReader((...query) => read(reading, ...query));

export function read({ readers, callMsMax, begin }: Reading, ...query: Parameters<DatabaseConnection["query"]>) {
  const until = performance.now() + callMsMax;
  const task = (connection: DatabaseConnection) => inRead(connection, begin, () => connection.query(...query));
  return untilNotUndoneOn(readers, until, task, actingTenant());
}

const NO_EFFECTS: Effects = { ended() {}, shard: 0 };

/** Commands that only read. */
export function createLookUps(readers: ConnectionPool, callMsMax: number) {
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
