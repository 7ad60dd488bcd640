// Inspects an SQLite database (see ../inspect.ts). Its service may be running, may have ended properly, or may have been killed.
import { Database, SQLiteError } from "bun:sqlite";
import { existsSync, statSync } from "node:fs";
import { drizzle } from "drizzle-orm/bun-sqlite";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { StartupProblem } from "../../core/startup.ts";
import { requireUsable } from "../data-dir.ts";
import { isSqliteBusy, sqliteFailure } from "../failures.ts";
import { type DatabaseInspection, NO_KEYS, type WrappedKeys } from "../inspect.ts";
import { schemaOf, versionsOnSqlite } from "../migrate.ts";
import type { Queries } from "../store.ts";

/** Finalises its statements when it is closed: an unfinalised one would keep the connection open after `close`. */
class FinalisingDatabase extends Database {
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

/** Null when there is no database. @throws StartupProblem when it can't be read */
export function inspectSqlite(path: string): DatabaseInspection | null {
  // An empty file holds no database, and opening it would create a journal file.
  if (!existsSync(path) || statSync(path).size === 0) return null;
  // A read-only connection would leave SQLite's working files behind.
  requireUsable(path);
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

/**
 * Opens the database so that closing it changes nothing. The last connection that closes a database checkpoints its write-ahead
 * log. So if there is a log, a read-only connection, which can't checkpoint, is closed last. Without a log there is nothing to
 * checkpoint, and SQLite removes its two working files again.
 */
function connect(path: string) {
  try {
    const hasLog = existsSync(`${path}-wal`);
    const connection = new FinalisingDatabase(path, { readwrite: true, create: false });
    const last = hasLog ? new FinalisingDatabase(path, { readonly: true }) : null;
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

export const unreadable = (path: string, cause: SQLiteError, advice = ""): StartupProblem =>
  new StartupProblem(`${path} can't be read as a database (${cause.code})${advice}`, { cause });

async function tryWrite(connection: Database, hasSchema: boolean): Promise<number> {
  // A running service holds the write lock for milliseconds, but a migration for longer.
  const until = performance.now() + 3_000;
  for (;;) {
    const from = performance.now();
    try {
      connection.run("begin immediate");
      if (hasSchema) connection.run("update schema_versions set applied_at = applied_at + 1");
      return performance.now() - from;
    } catch (error) {
      if (!isSqliteBusy(error)) throw refused(error);
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
  const all = (query: string) => database.query(query).all() as never;
  return {
    tenantKeys: all("select tenant, number, wrapped_key from tenant_keys"),
    signingKeys: all("select kid, purpose, wrapped_private_key from signing_keys"),
  };
}

/**
 * Whether a database file holds keys that a master key wraps. If it holds none, as the file of a facilitator or of `tollgate
 * account`, a gateway may generate a master key. An unreadable file counts as holding keys, which a new master key would lose.
 */
export function holdsWrappedKeys(path: string): boolean {
  if (!existsSync(path)) return false;
  try {
    using file = new Database(path, { readwrite: true });
    return file.query("select 1 from signing_keys union all select 1 from tenant_keys limit 1").get() !== null;
  } catch (error) {
    return !(error instanceof SQLiteError && error.message.startsWith("no such table"));
  }
}
