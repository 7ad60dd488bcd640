// The look at an SQLite database. Its service may run beside it, may have ended well, or may have been killed.
import { Database, SQLiteError } from "bun:sqlite";
import { accessSync, constants, existsSync, statSync } from "node:fs";
import { drizzle } from "drizzle-orm/bun-sqlite";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { StartupProblem } from "../../core/startup.ts";
import { sqliteFailure } from "../failures.ts";
import { type DatabaseLook, NO_KEYS, numbered, type TenantKeyRow, type WrappedKeys } from "../look.ts";
import { schemaOf, versionsOnSqlite } from "../migrate.ts";
import type { Queries } from "../store.ts";

/** A statement that is not done with would keep its connection open, past the end of whatever else holds the file. */
class FinishedDatabase extends Database {
  readonly #statements: { finalize(): void }[] = [];

  override prepare: Database["prepare"] = (text: string, ...rest: never[]) => {
    const statement = super.prepare<never, never[]>(text, ...rest);
    this.#statements.push(statement);
    return statement as never;
  };

  override close(): void {
    for (const statement of this.#statements) statement.finalize();
    super.close();
  }
}

/** @throws StartupProblem when it is no database that can be read */
export function lookAtSqlite(path: string): DatabaseLook | null {
  // An empty file is as good as none, and opening it would make a journal beside it.
  if (!existsSync(path) || statSync(path).size === 0) return null;
  // One that can only read would leave its working files behind.
  if (!isWritable(path)) throw new StartupProblem(`${path} may not be written by this user`);
  const { connection, close } = connect(path);
  try {
    const schema = schemaOf(versionsOnSqlite(connection));
    const isMade = schema.version > 0;
    return {
      dialect: "sqlite",
      schema,
      capabilities: null,
      read: { db: drizzle(connection) as unknown as Queries, tables: defineSchema(columns.sqlite) },
      wrappedKeys: async () => (isMade ? wrappedKeys(connection) : NO_KEYS),
      tryWrite: () => tryWrite(connection, isMade),
      now: async () => null,
      close: async () => close(),
    };
  } catch (cause) {
    close();
    throw cause instanceof SQLiteError ? unreadable(path, cause) : cause;
  }
}

function isWritable(path: string): boolean {
  try {
    accessSync(path, constants.R_OK | constants.W_OK);
    return true;
  } catch {
    return false;
  }
}

/**
 * The connection that closes a database last moves its log into it, and that would be a change. So where there is a log, a connection
 * that can only read is closed last: it can't move anything, and while it is there the other one does not. Where there
 * is no log there is nothing to move, and SQLite removes its two working files again.
 */
function connect(path: string) {
  try {
    const hasLog = existsSync(`${path}-wal`);
    const connection = new FinishedDatabase(path, { readwrite: true, create: false });
    const last = hasLog ? new FinishedDatabase(path, { readonly: true }) : null;
    last?.query("select count(*) from sqlite_schema").get();
    connection.run("pragma busy_timeout = 50");
    const close = () => {
      connection.close();
      last?.close();
    };
    return { connection, close };
  } catch (cause) {
    throw cause instanceof SQLiteError ? unreadable(path, cause) : cause;
  }
}

function unreadable(path: string, cause: SQLiteError): StartupProblem {
  return new StartupProblem(`${path} can't be read as a database (${cause.code})`, { cause });
}

async function tryWrite(connection: Database, hasSchema: boolean): Promise<number> {
  // A running service holds the write lock for milliseconds, a migration for longer.
  const until = performance.now() + 3_000;
  for (;;) {
    const from = performance.now();
    try {
      connection.run("begin immediate");
      if (hasSchema) connection.run("update schema_versions set applied_at = applied_at + 1");
      return performance.now() - from;
    } catch (error) {
      const isBusy = error instanceof SQLiteError && error.code?.startsWith("SQLITE_BUSY") === true;
      if (!isBusy) throw refused(error);
      if (performance.now() > until) throw new StartupProblem("another process holds its write lock", { cause: error });
    } finally {
      if (connection.inTransaction) connection.run("rollback");
    }
    await Bun.sleep(20);
  }
}

function refused(error: unknown): unknown {
  if (!(error instanceof SQLiteError) || sqliteFailure(error) === error) return error;
  return new StartupProblem(`it takes no write (${error.code})`, { cause: error });
}

export function wrappedKeys(database: Database): WrappedKeys {
  const tenantKeys = database.query<TenantKeyRow, []>("select tenant, number, wrapped_key from tenant_keys");
  const signingKeys = database.query<WrappedKeys["signingKeys"][number], []>(
    "select kid, purpose, wrapped_private_key from signing_keys",
  );
  return { tenantKeys: numbered(tenantKeys.all()), signingKeys: signingKeys.all() };
}

/**
 * Whether a database file holds keys that a master key wraps, asked before there is a store: a file that a facilitator or
 * `tollgate account` made holds none, and a gateway may still make its master key beside it. An unreadable file counts as
 * holding some: a new master key beside keys wrapped by another one would lose them.
 */
export function holdsWrappedKeys(path: string): boolean {
  if (!existsSync(path)) return false;
  try {
    const file = new Database(path, { readwrite: true });
    try {
      return file.query("select 1 from signing_keys union all select 1 from tenant_keys limit 1").get() !== null;
    } finally {
      file.close();
    }
  } catch (error) {
    return !(error instanceof SQLiteError && error.message.startsWith("no such table"));
  }
}
