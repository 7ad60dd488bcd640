// The interface of the store, which SQLite and Postgres implement, and the form in which queries are written once for both. Only
// a `Tx` can write, so a write outside a transaction does not compile.
import { and, type Column, eq, getTableColumns, type Placeholder, type SQL, sql, type Table } from "drizzle-orm";
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
  /** The database's time at the moment when a statement reads it, in milliseconds since the epoch. */
  readonly now: SQL<number>;
  /** Adds to exact totals of a tenant's history, merged at the commit so that a group of writes touches each total once. */
  count(tenant: string, dimension: CountDimension, value: string, delta: number): void;
  /** Reports the end of a call to the store's listeners once this write is durable. */
  ended(end: CallEnd): void;
  /**
   * Makes other writes that lock the same key wait until this one has ended, and see what it has written. On SQLite writes run
   * one after another anyway; on Postgres the lock is a row. A key is a kind and a name, such as `ceiling:acme`. A write that
   * locks several kinds takes the kinds in one fixed order.
   */
  lock(key: string): Promise<void>;
}

/** What background jobs on the database are given. */
export interface StoreTools {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
}

export interface WriteOptions {
  /** About how many bytes the write stores, if they may be many: they bound what is committed together. */
  readonly bytes?: number;
  /** For leases, which show others that this process lives: an urgent write does not wait behind other writes. */
  readonly urgent?: boolean;
}

export interface Store extends CommandRunner {
  /** Whether several processes may work on the database. One that is alone owns all open calls, and reads on its own loop. */
  readonly isShared: boolean;
  /** The time of records: the server's on Postgres, so that all replicas agree on it, and the machine's on SQLite. */
  readonly clock: Clock;
  /** `urgent`: for reads that every call waits for, at most a few a second of a tenant. On Postgres they have own connections. */
  readonly read: Reader & { readonly urgent: Reader };
  /**
   * Runs `work` in a transaction and resolves after its commit is durable. An error of `work` rolls back its own changes and
   * nothing else, and is rethrown. `work` may only await calls on `tx`, and must not catch their errors, since an error ends
   * the transaction. It may be undone because of another write and run again, so it must change nothing outside the database.
   * @throws CommitUnknown, which is also a Fault `unavailable`; any other Fault `unavailable` when the database can't take the
   *   write, in which case certainly nothing was stored
   * @throws UniqueViolation when the write breaks a uniqueness rule of the schema
   */
  write<T>(work: (tx: Tx) => Promise<T>, options?: WriteOptions): Promise<T>;
  /**
   * Runs a command outside a transaction of the caller's, batched with others of the same moment, and resolves after its commit
   * is durable. It fails alone, with the errors of `write`.
   */
  execute<Input, Output>(command: Command<Input, Output> | SharedCounter<Input, Output>, input: Input): Promise<Output>;
  /** Registers a listener for ends of calls stored here, called before the write resolves; never for an unknown commit. */
  onCallEnded(listener: CallEndListener): void;
  /** @throws Fault `unavailable` when the database does not take a write within `timeoutMs` */
  probe(timeoutMs: number): Promise<void>;
  close(): Promise<void>;
}

/** No response to a commit came in time: the write is stored, is not, or will be, as Postgres bounds no commit (measured). */
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

/** Runs a write in which only a record's name can break a uniqueness rule. @throws Fault `conflict` when another has the name */
export async function withFreeName<T>(record: string, write: () => Promise<T>): Promise<T> {
  try {
    return await write();
  } catch (cause) {
    if (!(cause instanceof UniqueViolation)) throw cause;
    throw new Fault("conflict", `name: already used by another ${record}`, { cause });
  }
}

/** A query that is built once per connection, as building costs several times as much as running. `bind` names its values. */
export function prepared<H extends Reader, P>(build: (handle: H) => { prepare(name?: string): P }): (handle: H) => P {
  const built = new WeakMap<object, P>();
  return (handle) => built.getOrInsertComputed(handle.db, () => build(handle).prepare());
}

/** As `prepared`, for a query that finds at most one row: null when there is none. */
export function preparedRow<R>(
  build: (reader: Reader) => { prepare(name?: string): { execute(values: Record<string, unknown>): Promise<R[]> } },
): (reader: Reader, values: object) => Promise<R | null> {
  const query = prepared(build);
  return async (reader, values) => (await query(reader).execute({ ...values }))[0] ?? null;
}

/** A named value of a prepared query, encoded as the column's values are. */
export const bind = <C extends Column>(column: C, name: string): SQL<C["_"]["data"]> =>
  sql`${sql.param(sql.placeholder(name), column)}`;

/** As `bind`, for these columns of a table, by default all, each named as it is. A flag must not be null. */
export function bindAll<T extends Table, C extends keyof T["_"]["columns"] & string>(
  table: T,
  names = Object.keys(getTableColumns(table)) as C[],
): Record<C, SQL> {
  const columns: Record<string, Column> = getTableColumns(table);
  return Object.fromEntries(names.map((name) => [name, bind(columns[name] as Column, name)])) as Record<C, SQL>;
}

/** A part of a row's key: a value, a named value of a prepared query, or a column of another table. */
type KeyPart = string | Placeholder | Column;

interface RowKey {
  readonly tenant: KeyPart;
  readonly id: KeyPart;
}

/** The key as the named values `tenant` and `id` of a prepared query. */
export const GIVEN_KEY = { tenant: sql.placeholder("tenant"), id: sql.placeholder("id") };

export const hasKey = (t: { readonly tenant: Column; readonly id: Column }, { tenant, id }: RowKey) =>
  and(eq(t.tenant, tenant), eq(t.id, id));

export const isOfCall = (t: { readonly tenant: Column; readonly invocation_id: Column }, { tenant, id }: RowKey) =>
  and(eq(t.tenant, tenant), eq(t.invocation_id, id));

export type SqlValue = string | number | boolean | Uint8Array | null;

/** What a command does in addition to changing its own rows. */
export type CommandEffects = Pick<Tx, "count" | "ended">;

export interface SqliteStatement {
  /** @returns how many rows the statement changed */
  run(...values: SqlValue[]): number;
  /** The first row, or null. */
  get(...values: SqlValue[]): Record<string, unknown> | null;
}

/** Prepares a statement on an SQLite connection. All commands on one connection get the same function. */
export type Prepare = (text: string) => SqliteStatement;

/** Makes a value once per connection, for several commands to share. */
export function perConnection<T>(create: (prepare: Prepare) => T): (prepare: Prepare) => T {
  const made = new WeakMap<Prepare, T>();
  return (prepare) => made.getOrInsertComputed(prepare, create);
}

/** Instead of a tenant, for writes on behalf of all tenants. No tenant has this name. */
export const FOR_ALL = "";

export interface CommandBase<Input, Output> {
  readonly name: string;
  /** The command's tenant, or FOR_ALL. When more commands wait than fit into a batch, tenants take turns. */
  tenantOf(input: Input): string;
  /** About how many bytes the command carries. They bound what is written together. */
  bytesOf(input: Input): number;
  /**
   * Commands with one key are never written together, and a process writes them in the order of their arrival. Null for commands
   * that don't depend on others, which Postgres may write in any order.
   */
  keyOf?(input: Input): string | null;
  readonly postgres: PostgresCommand<Input, Output>;
}

/**
 * A write of the hot path as data: what a step of a call changes in the database, described once for both databases. Commands
 * of one turn of the event loop are written together: on SQLite as prepared statements in the group commit, on Postgres as the
 * rows of one statement, at a sixteenth of the cost of a transaction each (measured). A command that fails does so alone.
 */
export interface Command<Input, Output> extends CommandBase<Input, Output> {
  /** A look-up only reads, for every call, batched with others of its kind: by key only, since the whole batch waits for it. */
  readonly kind?: "look_up";
  /** Prepares the statements, and returns the function that runs them for one command. */
  readonly sqlite: (prepare: Prepare) => (input: Input, effects: CommandEffects) => Output;
}

/**
 * A counter that all processes on a shared database share. (A process that is alone with its database counts in memory.) It does
 * not wait for the disk, so a crash of the database may lose counts. Retried when its response is lost, it may count twice.
 */
export interface SharedCounter<Input, Output> extends CommandBase<Input, Output> {
  readonly kind: "counter";
}

interface PostgresCommand<Input, Output> {
  /** One statement for any number of commands. */
  readonly text: string;
  valuesOf(inputs: readonly Input[]): unknown[];
  /** The output of each command, in the order of the inputs, from the rows that the statement returned. */
  outputsOf(inputs: readonly Input[], rows: readonly SqlRow[], effects: Pick<CommandEffects, "ended">): Output[];
}

export type SqlRow = Record<string, unknown>;

/** `outputsOf` for a look-up that finds at most one row for each command; the column `n` is the command's position, from 1. */
export const foundBy =
  <T>(outputOf: (row: SqlRow) => T) =>
  (inputs: readonly unknown[], rows: readonly SqlRow[]): (T | null)[] => {
    const found: (T | null)[] = inputs.map(() => null);
    for (const row of rows) found[Number(row["n"]) - 1] = outputOf(row);
    return found;
  };

/** Runs commands: the store each by itself, a transaction as a part of it. */
export interface CommandRunner {
  execute<Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output>;
}

/** The server's current time in milliseconds since the epoch, in SQL for Postgres. */
export const NOW = "(extract(epoch from clock_timestamp()) * 1000)::bigint";

/** The server's current time in microseconds since the epoch, in SQL for Postgres. */
export const NOW_MICROSECONDS = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";

type ColumnOf<Input> = readonly [
  type: "text" | "bigint" | "double precision" | "boolean" | "bytea",
  value: (input: Input) => SqlValue,
];

/**
 * Commands as the rows of a Postgres statement, whose parameters don't depend on their number: an array for each column, and for
 * a column of bytes the joined bytes with an array of offsets and one of lengths. As elements of an array, bytes would be sent as
 * text: a body of 32 MiB took five times as long (measured). The column `n` is a command's position, from 1.
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
    /** The rows for a `from` clause, named `input`. */
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

/** Matches elements of an array literal that need quotes. */
const QUOTED = /[\\"{},\s]|^(null)?$/i;

/**
 * A Postgres array literal. Passing 64 accepts costs this process 3.6 µs each with it, and 4.5 µs if the client encodes arrays
 * (measured). Nulls alone, as most columns of most calls have, are written as an empty array: `unnest` pads it with nulls.
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

const quoted = (value: string): string => `"${value.replace(/["\\]/g, "\\$&")}"`;

/** The joined bytes, the offset (from 1) of each part, and its length, which is null for a part that is null. */
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
  // A single part, which may be large, is not copied.
  const all = given.length === 1 ? only : Buffer.concat(given);
  return [all, arrayOf(from), arrayOf(parts.map((part) => part?.byteLength ?? null))];
}

/** Listeners for ends of calls, on both databases. A failing listener is only logged, since the end is stored already. */
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
