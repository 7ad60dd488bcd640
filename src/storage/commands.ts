// Writes of the hot path as data: what a call adds to the database at each step, said once for both databases. Commands
// that come in one turn of the event loop are written together: on SQLite as prepared statements in the group commit, on
// Postgres as the rows of one statement, which costs a sixteenth of a transaction for each (measured: 112 µs instead of
// 1.8 ms of CPU for a whole call). A command that fails does so alone.
import type { CountDimension } from "../../db/schema.ts";
import type { CallEnd } from "../core/call-end.ts";

export type SqlValue = string | number | boolean | Uint8Array | null;

/** What a command does beside its own rows. */
export interface CommandEffects {
  /** As `Tx.count`. */
  count(tenant: string, dimension: CountDimension, value: string, delta: number): void;
  /** As `Tx.ended`. */
  ended(end: CallEnd): void;
}

/** One prepared statement of SQLite. */
export interface SqliteStatement {
  /** @returns how many rows it changed */
  run(...values: SqlValue[]): number;
  /** The first row, or null. */
  get(...values: SqlValue[]): Record<string, unknown> | null;
}

export interface Command<Input, Output> {
  readonly name: string;
  /** About how many bytes it carries. They bound what is written together. */
  bytesOf(input: Input): number;
  /**
   * Commands with the same key are never written together, and by one process in the order in which they were handed in;
   * null for those that get on with all others, which Postgres may write in any order until they are answered.
   */
  keyOf?(input: Input): string | null;
  /** Prepares the statements, and gives the function that runs them for one command. */
  readonly sqlite: (prepare: (text: string) => SqliteStatement) => (input: Input, effects: CommandEffects) => Output;
  readonly postgres: PostgresCommand<Input, Output>;
}

export interface PostgresCommand<Input, Output> {
  /** One statement for any number of commands. */
  readonly text: string;
  valuesOf(inputs: readonly Input[]): unknown[];
  /** What came of each command, in their order, from the rows that the statement returned. */
  outputsOf(
    inputs: readonly Input[],
    rows: readonly Record<string, unknown>[],
    effects: Pick<CommandEffects, "ended">,
  ): Output[];
}

/** What runs commands: the store by themselves, a transaction as a part of it. */
export interface CommandRunner {
  execute<Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output>;
}

type ColumnOf<Input> = readonly [type: "text" | "bigint" | "boolean" | "bytea", value: (input: Input) => SqlValue];

/**
 * Commands as the rows of a Postgres statement, one parameter for each column, however many commands there are. Their
 * place, from 1, is the column `n`.
 *
 * @param firstParameter the number of the first parameter
 */
export function inputRows<Input>(columns: Readonly<Record<string, ColumnOf<Input>>>, firstParameter = 1) {
  const names = Object.keys(columns);
  const of = Object.values(columns);
  const parameters = of.map(([type], i) => `$${firstParameter + i}::${type}[]`);
  return {
    /** For `from`, under the name `input`. */
    source: `unnest(${parameters.join(", ")}) with ordinality as input (${names.join(", ")}, n)`,
    values: (inputs: readonly Input[]): unknown[] => of.map(([, value]) => inputs.map(value)),
  };
}
