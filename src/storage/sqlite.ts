// The store on SQLite: one connection that writes in groups, one that only reads, and checkpoints off the
// writers' path. Every commit waits for the disk (synchronous=FULL).
import { Database, SQLiteError } from "bun:sqlite";
import { chmodSync, closeSync, mkdirSync, openSync, statSync } from "node:fs";
import { dirname } from "node:path";
import { sql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/bun-sqlite";
import { columns } from "../../db/columns.ts";
import { defineSchema } from "../../db/schema.ts";
import { during } from "../concurrency/loop-profile.ts";
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { createCallEnds } from "./call-ends.ts";
import type { CommandEffects } from "./commands.ts";
import { within } from "./deadline.ts";
import { createGroupCommit } from "./group.ts";
import { migrateSqlite } from "./migrate.ts";
import { commandsOn } from "./sqlite-commands.ts";
import type { Queries, Store } from "./store.ts";

/** How long opening waits for another process that migrates. */
const OPEN_BUSY_MS = 10_000;
/** Waiting inside SQLite blocks the event loop. The group commit waits for the write lock without it. */
const WRITE_BUSY_MS = 0;
/** Readers of the log wait for nobody, except for a process that rebuilds its index after a crash. */
const READ_BUSY_MS = 50;
const CHECKPOINT_EVERY_MS = 1_000;
/** The log is cut to this size when it starts anew; below it, its blocks are used again. */
const WAL_BYTES_KEPT = 64 * 1024 * 1024;
/** Large bodies make it grow so fast that moving a second's worth would take hundreds of milliseconds. */
const WAL_BYTES_MAX = WAL_BYTES_KEPT + 16 * 1024 * 1024;
const WAL_LOOK_EVERY_MS = 50;
const CACHE_KIB = 16 * 1024;

const now = sql<number>`cast(unixepoch('subsec') * 1000 as integer)`.mapWith(Number);

interface SqliteOptions {
  readonly path: string;
  readonly log: Log;
  readonly clock: Clock;
}

/** Of commands that only read. */
const NO_EFFECTS: CommandEffects = { count() {}, ended() {} };

/** SQLite gives its log and index files the mode of the database file. */
function createPrivateFile(path: string): void {
  mkdirSync(dirname(path), { recursive: true, mode: 0o700 });
  closeSync(openSync(path, "a", 0o600));
  chmodSync(path, 0o600);
}

/** Reads block the event loop, so each names itself for the log of blocked loops. Groups name their writes. */
class ReadDatabase extends Database {
  override prepare: Database["prepare"] = (text: string, ...rest: never[]) => {
    const statement = super.prepare<never, never[]>(text, ...rest);
    for (const method of ["all", "get", "values"] as const) {
      const plain = statement[method].bind(statement) as (...args: never[]) => never;
      statement[method] = (...args: never[]) => during("sqlite read", () => plain(...args));
    }
    return statement as never;
  };
}

function connect(path: string, Connection = Database): Database {
  const connection = new Connection(path, { readwrite: true });
  connection.run(`pragma busy_timeout = ${OPEN_BUSY_MS}`);
  enterWal(connection);
  connection.run("pragma synchronous = full");
  connection.run("pragma wal_autocheckpoint = 0");
  // Savepoints keep copies of the pages that they may have to put back.
  connection.run("pragma temp_store = memory");
  connection.run(`pragma journal_size_limit = ${WAL_BYTES_KEPT}`);
  connection.run(`pragma cache_size = -${CACHE_KIB}`);
  return connection;
}

/**
 * The first connections to a new file all want to change its journal mode, and SQLite lets none of them wait that already
 * reads the file: it answers busy at once, whatever the timeout.
 */
function enterWal(connection: Database): void {
  const until = performance.now() + OPEN_BUSY_MS;
  for (;;) {
    try {
      connection.run("pragma journal_mode = wal");
      return;
    } catch (error) {
      const busy = error instanceof SQLiteError && error.code?.startsWith("SQLITE_BUSY");
      if (!busy || performance.now() > until) throw error;
    }
    Bun.sleepSync(5 + Math.random() * 10);
  }
}

/** Statistics of the schema are read when a connection opens, so the one that migrates is not used afterwards. */
function migrate({ path, clock, log }: SqliteOptions): void {
  const connection = connect(path);
  try {
    migrateSqlite(connection, { clock, log });
  } finally {
    connection.close();
  }
}

/** Moves the log into the database file each second or when it is large, between groups; the log then starts anew. */
function checkpoints(writer: Database, path: string, log: Log): { stop(): void } {
  const checkpoint = writer.prepare("pragma wal_checkpoint(passive)");
  const changes = writer.prepare<{ n: number }, []>("select total_changes() as n");
  let seen = -1;
  let lookedAt = Number.NEGATIVE_INFINITY;
  const timer = setInterval(() => {
    if (writer.inTransaction) return;
    try {
      const isDue = performance.now() - lookedAt >= CHECKPOINT_EVERY_MS;
      if (!isDue && statSync(`${path}-wal`).size <= WAL_BYTES_MAX) return;
      lookedAt = performance.now();
      const now = changes.get()?.n ?? 0;
      if (now === seen) return;
      during("sqlite checkpoint", () => checkpoint.run());
      seen = now;
    } catch (error) {
      log.warn("checkpoint_failed", { error });
    }
  }, WAL_LOOK_EVERY_MS);
  timer.unref();
  return { stop: () => clearInterval(timer) };
}

/** @throws Error when the database belongs to a newer program, or cannot be opened. */
export async function openSqlite(options: SqliteOptions): Promise<Store> {
  const { path, log, clock } = options;
  createPrivateFile(path);
  migrate(options);
  const writer = connect(path);
  writer.run(`pragma busy_timeout = ${WRITE_BUSY_MS}`);
  const reader = connect(path, ReadDatabase);
  reader.run(`pragma busy_timeout = ${READ_BUSY_MS}`);
  reader.run("pragma query_only = on");

  const tables = defineSchema(columns.sqlite);
  // Drizzle runs the builders of this driver at once when they are awaited, as "async" promises.
  const ends = createCallEnds(log);
  const db = drizzle(writer) as unknown as Queries;
  const group = createGroupCommit({ writer, db, tables, now, log, ended: ends.tell });
  const timer = checkpoints(writer, path, log);
  const touch = writer.prepare("update schema_migrations set applied_at = applied_at where version = 1");

  const lookUpOn = commandsOn(reader);
  const read = { db: drizzle(reader) as unknown as Queries, tables };
  return {
    dialect: "sqlite",
    clock,
    read,
    readFirst: read,
    write: group.write,
    execute: group.execute,
    lookUp: async (command, input) => lookUpOn(command)(input, NO_EFFECTS),
    onCallEnded: ends.listen,
    probe: (timeoutMs) =>
      within(
        timeoutMs,
        group.write(async () => void touch.run()),
      ),
    async close() {
      await group.close();
      timer.stop();
      try {
        writer.run("pragma wal_checkpoint(truncate)");
      } finally {
        reader.close();
        writer.close();
      }
    },
  };
}
