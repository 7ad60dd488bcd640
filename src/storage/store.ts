// The storage port: what the product asks of a database, and the words in which queries are written once
// for both. Only a `Tx` can write, so a write outside `write()` does not compile.
import { type Column, type SQL, sql } from "drizzle-orm";
import type { BaseSQLiteDatabase } from "drizzle-orm/sqlite-core";
import type { CountDimension, Tables } from "../../db/schema.ts";
import type { Clock } from "../core/clock.ts";
import { Fault } from "../core/fault.ts";

/** Drizzle in its SQLite types. The Postgres adapter casts to it: the two build queries with the same words. */
export type Queries = BaseSQLiteDatabase<"async", unknown, Record<string, never>>;

export interface Reader {
  readonly db: Pick<Queries, "select" | "selectDistinct" | "$with" | "with">;
  readonly tables: Tables;
}

export interface Tx extends Reader {
  readonly db: Queries;
  /** The database's own time at the moment at which a statement reads it, in milliseconds since the epoch. */
  readonly now: SQL<number>;
  /**
   * Adds to the exact totals of a tenant's history. The additions of one work are applied with its commit,
   * merged, so that a group of works touches each total once.
   */
  count(tenant: string, dimension: CountDimension, value: string, delta: number): void;
  /**
   * Holds the others that ask for the same key until this work has ended. Works on SQLite run one after
   * another anyway; on Postgres it is an advisory lock of the transaction.
   */
  lock(key: string): Promise<void>;
}

export interface Store {
  readonly dialect: "sqlite" | "postgres";
  /**
   * The time that is written into records and compared with them: the server's on Postgres, so that all replicas
   * agree on it, and the machine's on SQLite.
   */
  readonly clock: Clock;
  readonly read: Reader;
  /**
   * Reads that every call waits for, of which no tenant causes more than a few a second: where connections are few, over
   * some that nothing else keeps busy.
   */
  readonly readFirst: Reader;
  /**
   * Runs `work` in a transaction and resolves after its commit is durable. What `work` throws rolls back its
   * own writes and nothing else, and is thrown again. Inside `work`: nothing but calls on `tx`, each awaited, and
   * no catching of their errors, for the transaction is over after one. A work may be undone for the sake of
   * another and then runs again, so it changes nothing outside.
   *
   * @throws CommitUnknown, which is a Fault `unavailable` too; any other Fault `unavailable` when the database cannot
   * take the write: certainly nothing of it was stored then.
   * @throws UniqueViolation when the write breaks a uniqueness rule of the schema.
   */
  write<T>(work: (tx: Tx) => Promise<T>): Promise<T>;
  /** @throws Fault `unavailable` when the database does not take a write within `timeoutMs`. */
  probe(timeoutMs: number): Promise<void>;
  close(): Promise<void>;
}

/**
 * The commit was on its way when its answer was lost or late: what was written is stored, is not, or will appear
 * later. Measured on Postgres: no time limit of the server bounds a commit.
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
 * A query that is built once per connection and then only executed: building one costs several times what
 * running it does. Values are named with `bind`.
 */
export function prepared<H extends Reader, P>(
  build: (handle: H) => { prepare(name?: string): P },
): (handle: H) => P {
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
