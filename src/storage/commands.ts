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
  count(tenant: string, period: number, dimension: CountDimension, value: string, delta: number): void;
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

/** Prepares a statement on a connection of SQLite. It is the same function for all commands on one. */
export type Prepare = (text: string) => SqliteStatement;

/** What several commands on one connection share. */
export function perConnection<T>(create: (prepare: Prepare) => T): (prepare: Prepare) => T {
  const made = new WeakMap<Prepare, { readonly shared: T }>();
  return (prepare) => {
    const one = made.get(prepare) ?? { shared: create(prepare) };
    made.set(prepare, one);
    return one.shared;
  };
}

/** In the place of a tenant, for what is done for all of them. No tenant has this name. */
export const FOR_ALL = "";

export interface Command<Input, Output> {
  readonly name: string;
  /** Whose it is, or FOR_ALL. When more wait than can be written together, tenants have turns. */
  tenantOf(input: Input): string;
  /** About how many bytes it carries. They bound what is written together. */
  bytesOf(input: Input): number;
  /**
   * Commands with the same key are never written together, and by one process in the order in which they were handed in;
   * null for those that get on with all others, which Postgres may write in any order until they are answered.
   */
  keyOf?(input: Input): string | null;
  /** Prepares the statements, and gives the function that runs them for one command. */
  readonly sqlite: (prepare: Prepare) => (input: Input, effects: CommandEffects) => Output;
  readonly postgres: PostgresCommand<Input, Output>;
}

export interface PostgresCommand<Input, Output> {
  /** One statement for any number of commands. */
  readonly text: string;
  /** @param shard of the totals, the same for all statements of a transaction */
  valuesOf(inputs: readonly Input[], shard: number): unknown[];
  /**
   * What the rows that it returned ask for besides, in the same transaction: few commands need it. Each names its row by
   * values of its own. A statement for all would, on a partitioned table, open every partition with its indexes, even
   * when there is nothing to do.
   */
  afterwards?(inputs: readonly Input[], rows: readonly SqlRow[]): FollowUp[];
  /** What came of each command, in their order, from the rows that the statement and those afterwards returned. */
  outputsOf(
    inputs: readonly Input[],
    rows: readonly SqlRow[],
    effects: Pick<CommandEffects, "ended">,
    followed: readonly SqlRow[],
  ): Output[];
}

export type SqlRow = Record<string, unknown>;

export interface FollowUp {
  readonly text: string;
  readonly values: readonly SqlValue[];
}

/** What several processes count together. A process that is alone with its database counts in memory. */
export type SharedCount<Input, Output> = Omit<Command<Input, Output>, "sqlite">;

/** What runs commands: the store by themselves, a transaction as a part of it. */
export interface CommandRunner {
  execute<Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output>;
}

type ColumnOf<Input> = readonly [
  type: "text" | "bigint" | "double precision" | "boolean" | "bytea",
  value: (input: Input) => SqlValue,
];

/**
 * Commands as the rows of a Postgres statement, with the same parameters however many commands there are: one for each
 * column, and for bytes the bytes of all, with where those of each begin and how many they are. As the element of an array
 * bytes would travel as text: measured, a body of 32 MiB took five times as long as by itself.
 * The place of a command, from 1, is the column `n`.
 *
 * @param firstParameter the number of the first parameter
 */
export function inputRows<Input>(columns: Readonly<Record<string, ColumnOf<Input>>>, firstParameter = 1) {
  let parameter = firstParameter;
  const arrays: string[] = [];
  const names: string[] = [];
  const selected: string[] = [];
  for (const [name, [type]] of Object.entries(columns)) {
    if (type !== "bytea") {
      arrays.push(`$${parameter++}::${type}[]`);
      names.push(name);
      selected.push(name);
      continue;
    }
    const all = `$${parameter++}::bytea`;
    arrays.push(`$${parameter++}::int[]`, `$${parameter++}::int[]`);
    names.push(`${name}_from`, `${name}_length`);
    selected.push(`substr(${all}, ${name}_from, ${name}_length) as ${name}`);
  }
  const of = Object.values(columns);
  return {
    /** For `from`, under the name `input`. */
    source: `(select ${selected.join(", ")}, n
      from unnest(${arrays.join(", ")}) with ordinality as given (${names.join(", ")}, n)) as input`,
    values: (inputs: readonly Input[]): unknown[] =>
      of.flatMap(([type, value]): unknown[] => {
        const own = inputs.map(value);
        return type === "bytea" ? joined(own as (Uint8Array | null)[]) : [arrayOf(own as ArrayValue[])];
      }),
  };
}

type ArrayValue = string | number | boolean | null;

/** What an element would not be read as it stands. */
const QUOTED = /[\\"{},\s]|^(null)?$/i;

/**
 * An array as Postgres reads it. Measured with 64 accepts: encoded so, 3.6 µs of this process for each to hand them over,
 * and 4.5 when the client encodes arrays. Of nulls alone it is empty, since `unnest` fills up with nulls what is shorter
 * than the others: most of the columns of most calls, which neither side then has to read.
 */
function arrayOf(values: readonly ArrayValue[]): string {
  if (values.every((value) => value === null)) return "{}";
  let text = "{";
  let comma = "";
  for (const value of values) {
    text += comma + (typeof value === "string" && QUOTED.test(value) ? quoted(value) : value);
    comma = ",";
  }
  return `${text}}`;
}

function quoted(value: string): string {
  return `"${value.replace(/["\\]/g, "\\$&")}"`;
}

/** All bytes as one, the place from 1 where those of each begin, and how many they are; null for none at all. */
function joined(parts: readonly (Uint8Array | null)[]): [Uint8Array, string, string] {
  let next = 1;
  const from = parts.map((part): ArrayValue => {
    const begin = next;
    next += part?.byteLength ?? 0;
    return begin;
  });
  const given = parts.filter((part) => part !== null);
  const [only] = given;
  if (only === undefined) return [new Uint8Array(), "{}", "{}"];
  // A single large one is not copied.
  const all = given.length === 1 ? only : Buffer.concat(given);
  return [all, arrayOf(from), arrayOf(parts.map((part) => part?.byteLength ?? null))];
}
