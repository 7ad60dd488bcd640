// What replicas count together, such as the tokens of an agent's bucket: rows that many change all the time. So a
// transaction that changes them is one message, which the server carries out to its end whatever becomes of the process
// that has sent it. With a message for each statement, one that stands still, or is far away, would keep the rows from all
// others between two of its messages.
import { createCommandKinds } from "./command-batches.ts";
import type { SharedCount, SqlRow } from "./commands.ts";
import { BEGIN_COUNTS, type ConnectionPool, type DatabaseConnection } from "./pool.ts";
import { runGroups } from "./postgres-commands.ts";
import { untilNotUndoneOn } from "./undone.ts";

/** The server's time in microseconds since the epoch, when it comes to this. */
export const NOW_MICROSECONDS = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";

/** A text as Postgres reads it, whatever `standard_conforming_strings` says. */
const literal = (text: string) => `E'${text.replace(/[\\']/g, "$&$&")}'`;

/** A message of several statements takes no values beside it: they stand in the text, arrays as the texts that they are. */
function withValues(statement: string, values: readonly unknown[]): string {
  return statement.replace(/\$(\d+)/g, (_, place) => literal(String(values[Number(place) - 1])));
}

/** Runs commands of one kind. */
async function count<Input, Output>(
  connection: DatabaseConnection,
  { postgres }: SharedCount<Input, Output>,
  inputs: readonly Input[],
): Promise<Output[]> {
  const statement = withValues(postgres.text, postgres.valuesOf(inputs, 0));
  let results: SqlRow[][];
  try {
    results = (await connection.query(`${BEGIN_COUNTS}; ${statement}; commit`, [], "objects")) as SqlRow[][];
  } catch (error) {
    if (!connection.abandoned) await connection.run("rollback").catch(connection.abandon);
    throw error;
  }
  return postgres.outputsOf(inputs, results.at(-2) ?? [], { ended() {} }, []);
}

export function createSharedCounts(counters: ConnectionPool, waitMsMax: number) {
  return createCommandKinds({
    waitMsMax,
    run: (groups, until) =>
      untilNotUndoneOn(counters, until, (connection) =>
        runGroups(groups, ({ command, inputs }) => count(connection, command, inputs)),
      ),
  });
}
