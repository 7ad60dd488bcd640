// The storage port: what the product asks of a database, and the form in which queries are written once for both. Only a
// `Tx` can write, so a write outside `write()` does not compile.
import { type Column, type SQL, sql } from "drizzle-orm";
import type { BaseSQLiteDatabase } from "drizzle-orm/sqlite-core";
import type { CountDimension, Tables } from "../../db/schema.ts";
import type { CallEnd, CallEndListener } from "../core/call-end.ts";
import type { Clock } from "../core/clock.ts";
import { Fault } from "../core/fault.ts";
import type { CommandRunner, SharedCount } from "./commands.ts";
import type { Periods } from "./periods.ts";
import type { LoggedTotals } from "./sqlite-totals.ts";

/** Drizzle in its SQLite types. The Postgres adapter casts to it, since the same calls build queries on both. */
export type Queries = BaseSQLiteDatabase<"async", unknown, Record<string, never>>;

export interface Reader {
  readonly db: Pick<Queries, "select" | "selectDistinct" | "$with" | "with">;
  readonly tables: Tables;
  /** What is to be added to the totals in `invocationCounts`: only where they are kept apart. */
  readonly logged?: LoggedTotals;
}

export interface Tx extends Reader, CommandRunner {
  readonly db: Queries;
  /** The database's own time when a statement reads it, in milliseconds since the epoch. */
  readonly now: SQL<number>;
  /**
   * Adds to the exact totals of a tenant's history, for a call of this period (`periodOf`). The additions of one work are applied with its commit,
   * merged, so that a group of works touches each total once.
   */
  count(tenant: string, period: number, dimension: CountDimension, value: string, delta: number): void;
  /** Reports the end of a call to the store's listeners once this work is durable. */
  ended(end: CallEnd): void;
  /**
   * Makes others that lock the same key wait until this work has ended, and see what it has written. Works on SQLite run
   * one after another anyway; on Postgres it is a row. A key is a kind and a name, `ceiling:acme`. Works that take locks
   * of several kinds take the kinds in one order.
   */
  lock(key: string): Promise<void>;
}

export interface Store extends CommandRunner {
  readonly dialect: "sqlite" | "postgres";
  /**
   * The time that is written into records and compared with them: the server's on Postgres, so that all replicas
   * agree on it, and the machine's on SQLite.
   */
  readonly clock: Clock;
  readonly read: Reader;
  /**
   * For reads that every call waits for, and of which no tenant causes more than a few a second. Where connections are few,
   * some are kept for these alone.
   */
  readonly readFirst: Reader;
  /**
   * Runs `work` in a transaction and resolves after its commit is durable. An error of `work` rolls back its own writes and
   * nothing else, and is thrown again. Inside `work` there may be only calls on `tx`, each awaited, without catching their
   * errors, since the transaction is over after one. A work may be undone because of another and then runs again, so it
   * must change nothing outside.
   *
   * @throws CommitUnknown, which is a Fault `unavailable` too; any other Fault `unavailable` when the database can't take
   * the write, and certainly nothing of it was stored.
   * @throws UniqueViolation when the write breaks a uniqueness rule of the schema.
   * @param bytes about how many it stores, if they may be many: they bound what is written together
   */
  write<T>(work: (tx: Tx) => Promise<T>, bytes?: number): Promise<T>;
  /**
   * The same for leases, by which others know that this process lives: however many other writes wait, for a lock or a slow
   * disk, they wait for none of them.
   */
  writeFirst<T>(work: (tx: Tx) => Promise<T>): Promise<T>;
  /**
   * Runs a command by itself, together with others that come at the same time, and resolves after its commit is durable.
   * It fails alone, as a `write` of the same does.
   */
  execute: CommandRunner["execute"];
  /**
   * Runs a command that only reads, together with others of its kind that come at the same time. For what every call waits
   * for, and only for rows that are found by their key: the others wait for them.
   */
  lookUp: CommandRunner["execute"];
  /**
   * Runs a command on what all processes count together, with others of its kind that come at the same time; null where
   * the process is alone with its database, and counts in memory. It does not wait for the disk: a crash of the database
   * may forget what was counted. One whose answer was lost runs again, so it may count twice.
   */
  readonly countTogether:
    | (<Input, Output>(command: SharedCount<Input, Output>, input: Input) => Promise<Output>)
    | null;
  /**
   * From now on the listener is told of each end that this process has stored, before the write is answered. Of a commit
   * whose answer was lost it is told nothing.
   */
  onCallEnded(listener: CallEndListener): void;
  /** The tables whose rows go by age. */
  readonly periods: Periods;
  /** @throws Fault `unavailable` when the database does not take a write within `timeoutMs`. */
  probe(timeoutMs: number): Promise<void>;
  /** Puts into their table the totals that are kept apart now. */
  settle(): Promise<void>;
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
