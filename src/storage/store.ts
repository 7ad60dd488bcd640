// The storage port: what the product asks of a database, and the form in which queries are written once for both. Only a
// `Tx` can write, so a write outside `write()` does not compile.
import { and, type Column, eq, type Placeholder, type SQL, sql } from "drizzle-orm";
import type { BaseSQLiteDatabase } from "drizzle-orm/sqlite-core";
import type { CountDimension, Tables } from "../../db/schema.ts";
import type { CallEnd, CallEndListener } from "../core/call.ts";
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import type { Clock } from "../core/time.ts";

/** Drizzle in its SQLite types. The Postgres adapter casts to it, since the same calls build queries on both. */
export type Queries = BaseSQLiteDatabase<"async", unknown, Record<string, never>>;

export interface Reader {
  readonly db: Pick<Queries, "select" | "selectDistinct" | "$with" | "with">;
  readonly tables: Tables;
}

export interface Tx extends Reader, CommandRunner {
  readonly db: Queries;
  /** The database's own time when a statement reads it, in milliseconds since the epoch. */
  readonly now: SQL<number>;
  /**
   * Adds to the exact totals of a tenant's history. The additions of one work are applied with its commit, merged, so that a
   * group of works touches each total once.
   */
  count(tenant: string, dimension: CountDimension, value: string, delta: number): void;
  /** Reports the end of a call to the store's listeners once this work is durable. */
  ended(end: CallEnd): void;
  /**
   * Makes others that lock the same key wait until this work has ended, and see what it has written. Works on SQLite run
   * one after another anyway; on Postgres it is a row. A key is a kind and a name, `ceiling:acme`. Works that take locks
   * of several kinds take the kinds in one order.
   */
  lock(key: string): Promise<void>;
}

/** What work on the database of its own accord is given. */
export interface StoreTools {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
}

export interface WriteOptions {
  /** About how many bytes the work stores, if they may be many: they bound what is written together. */
  readonly bytes?: number;
  /**
   * For leases, by which others know that this process lives: however many other writes wait, for a lock or a slow disk, an
   * urgent one waits for none of them.
   */
  readonly urgent?: boolean;
}

export interface Store extends CommandRunner {
  /**
   * Whether several processes may work on the database. Where a process is alone, all that is open in the database is its own,
   * and it reads on its own event loop.
   */
  readonly isShared: boolean;
  /**
   * The time that is written into records and compared with them: the server's on Postgres, so that all replicas
   * agree on it, and the machine's on SQLite.
   */
  readonly clock: Clock;
  /**
   * `urgent` is for reads that every call waits for, and of which no tenant causes more than a few a second. Where connections
   * are few, some are kept for urgent reads alone.
   */
  readonly read: Reader & { readonly urgent: Reader };
  /**
   * Runs `work` in a transaction and resolves after its commit is durable. An error of `work` rolls back its own writes and
   * nothing else, and is thrown again. Inside `work` there may be only calls on `tx`, each awaited, without catching their
   * errors, since the transaction is over after one. A work may be undone because of another and then runs again, so it
   * must change nothing outside.
   *
   * @throws CommitUnknown, which is a Fault `unavailable` too; any other Fault `unavailable` when the database can't take
   * the write, and certainly nothing of it was stored.
   * @throws UniqueViolation when the write breaks a uniqueness rule of the schema.
   */
  write<T>(work: (tx: Tx) => Promise<T>, options?: WriteOptions): Promise<T>;
  /**
   * Runs a command by itself, together with others that come at the same time, and resolves after its commit is durable.
   * It fails alone, as a `write` of what it writes does.
   */
  execute<Input, Output>(command: Command<Input, Output> | SharedCounter<Input, Output>, input: Input): Promise<Output>;
  /**
   * From now on the listener is told of each end that this process has stored, before the write is answered. Of a commit
   * whose answer was lost it is told nothing.
   */
  onCallEnded(listener: CallEndListener): void;
  /** @throws Fault `unavailable` when the database does not take a write within `timeoutMs`. */
  probe(timeoutMs: number): Promise<void>;
  close(): Promise<void>;
}

/**
 * The answer to a commit was lost or late: the write is stored, is not, or will appear later. Measured on Postgres: no
 * time limit of the server bounds a commit.
 */
export class CommitUnknown extends Fault {
  override readonly name = "CommitUnknown";

  constructor(cause: unknown) {
    super("unavailable", STORE_UNAVAILABLE, { retryAfterSeconds: STORE_RETRY_AFTER_SECONDS, cause });
  }
}

export const STORE_UNAVAILABLE = "the store cannot take a write now";
export const STORE_RETRY_AFTER_SECONDS = 5;

export class UniqueViolation extends Error {
  override readonly name = "UniqueViolation";
}

/**
 * Runs a write in which only the name of a record can break a uniqueness rule.
 *
 * @param record such as `agent`
 * @throws Fault `conflict` when another one has the name
 */
export async function withFreeName<T>(record: string, write: () => Promise<T>): Promise<T> {
  try {
    return await write();
  } catch (cause) {
    if (!(cause instanceof UniqueViolation)) throw cause;
    throw new Fault("conflict", `name: already used by another ${record}`, { cause });
  }
}

/**
 * A query that is built once per connection and then only executed: building one costs several times as much as running
 * it. Values are named with `bind`.
 */
export function prepared<H extends Reader, P>(build: (handle: H) => { prepare(name?: string): P }): (handle: H) => P {
  const built = new WeakMap<object, P>();
  return (handle) => {
    const known = built.get(handle.db);
    if (known !== undefined) return known;
    const query = build(handle).prepare();
    built.set(handle.db, query);
    return query;
  };
}

/** A named value of a prepared query, encoded as the column's values are. */
export function bind<C extends Column>(column: C, name: string): SQL<C["_"]["data"]> {
  return sql`${sql.param(sql.placeholder(name), column)}`;
}

/** Of a row: a value, the name of one that a prepared query is given, or the columns of another table. */
type KeyPart = string | Placeholder | Column;

interface RowKey {
  readonly tenant: KeyPart;
  readonly id: KeyPart;
}

/** The key that a prepared query is given as `tenant` and `id`. */
export const GIVEN_KEY = { tenant: sql.placeholder("tenant"), id: sql.placeholder("id") };

/** Matches the row of this key. */
export function hasKey(t: { readonly tenant: Column; readonly id: Column }, { tenant, id }: RowKey) {
  return and(eq(t.tenant, tenant), eq(t.id, id));
}

/** Matches what belongs to the call of this key. */
export function isOfCall(t: { readonly tenant: Column; readonly invocation_id: Column }, { tenant, id }: RowKey) {
  return and(eq(t.tenant, tenant), eq(t.invocation_id, id));
}

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

/** What commands of all kinds say. */
export interface CommandBase<Input, Output> {
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
  readonly postgres: PostgresCommand<Input, Output>;
}

/**
 * A write of the hot path as data: what a call adds to the database at each step, said once for both databases. Commands
 * that come in one turn of the event loop are written together: on SQLite as prepared statements in the group commit, on
 * Postgres as the rows of one statement, which costs a sixteenth of a transaction for each (measured: 112 µs instead of
 * 1.8 ms of CPU for a whole call). A command that fails does so alone.
 */
export interface Command<Input, Output> extends CommandBase<Input, Output> {
  /**
   * A look-up only reads, together with others of its kind that come at the same time. For what every call waits for, and only
   * for rows that are found by their key: the others wait for them.
   */
  readonly kind?: "look_up";
  /** Prepares the statements, and gives the function that runs them for one command. */
  readonly sqlite: (prepare: Prepare) => (input: Input, effects: CommandEffects) => Output;
}

/**
 * What all processes on a shared database count together. A process that is alone with its database counts in memory. A counter
 * does not wait for the disk: a crash of the database may forget what was counted. One whose answer was lost runs again, so it
 * may count twice.
 */
export interface SharedCounter<Input, Output> extends CommandBase<Input, Output> {
  readonly kind: "counter";
}

interface PostgresCommand<Input, Output> {
  /** One statement for any number of commands. */
  readonly text: string;
  valuesOf(inputs: readonly Input[]): unknown[];
  /** What came of each command, in their order, from the rows that the statement returned. */
  outputsOf(inputs: readonly Input[], rows: readonly SqlRow[], effects: Pick<CommandEffects, "ended">): Output[];
}

export type SqlRow = Record<string, unknown>;

/** `outputsOf` of a look-up that finds one row at most for each command, with the place of the command in `n`. */
export const foundBy =
  <T>(outputOf: (row: SqlRow) => T) =>
  (inputs: readonly unknown[], rows: readonly SqlRow[]): (T | null)[] => {
    const found: (T | null)[] = inputs.map(() => null);
    for (const row of rows) found[Number(row["n"]) - 1] = outputOf(row);
    return found;
  };

/** What runs commands: the store by themselves, a transaction as a part of it. */
export interface CommandRunner {
  execute<Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output>;
}

/** The server's own time in milliseconds since the epoch, in SQL. */
export const NOW = "(extract(epoch from clock_timestamp()) * 1000)::bigint";

/** The server's time in microseconds since the epoch, when it comes to this. */
export const NOW_MICROSECONDS = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";

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

/**
 * The listeners for ends of calls, for both databases. A listener's failure changes nothing: the end is stored, and its write
 * is answered.
 */
export function createCallEnds(log: Log) {
  const listeners: CallEndListener[] = [];

  function publishOne(end: CallEnd): void {
    for (const listener of listeners) {
      try {
        listener(end);
      } catch (error) {
        const { tenant, invocation_id } = end;
        log.error("call_end_listener_failed", { tenant, invocation_id, error });
      }
    }
  }

  return {
    subscribe: (listener: CallEndListener): void => void listeners.push(listener),
    publish: (ends: readonly CallEnd[]): void => ends.forEach(publishOne),
  };
}
