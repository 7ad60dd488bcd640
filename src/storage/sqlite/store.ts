// The store on SQLite: one connection that writes in groups, one that only reads, and checkpoints on a
// thread of their own. Every commit waits for the disk (synchronous=FULL).
import { Database, SQLiteError } from "bun:sqlite";
import { chmodSync, mkdirSync } from "node:fs";
import { dirname } from "node:path";
import { sql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/bun-sqlite";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { ensurePrivateFile } from "../data-dir.ts";
import { within } from "../failures.ts";
import { migrateSqlite } from "../migrate.ts";
import { type Command, type CommandEffects, createCallEnds, type Queries, type Store } from "../store.ts";
import { startCheckpoints } from "./checkpoints.ts";
import { commandsOn, createGroupCommit } from "./group.ts";

/** How long opening waits for another process that migrates. */
const OPEN_BUSY_MS = 10_000;
/**
 * The log is cut to this size when it begins again; below it, its blocks are used again. It is about what it mostly grows to:
 * the fsync of a commit that makes the file longer takes 290 µs, of one in blocks that it has 135 (measured, ext4, 11 pages).
 */
const WAL_BYTES_KEPT = 80 * 1024 * 1024;
/**
 * Large bodies make the log grow so fast that moving a second's worth would take hundreds of milliseconds. It is more than is
 * kept: a log that has this size for good would be moved at every look at it.
 */
const WAL_BYTES_MAX = WAL_BYTES_KEPT + 16 * 1024 * 1024;
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
  ensurePrivateFile(path);
  chmodSync(path, 0o600);
}

function connect(path: string): Database {
  const connection = new Database(path, { readwrite: true });
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

/** @throws Error when the database belongs to a newer program, or cannot be opened. */
export async function openSqlite(options: SqliteOptions): Promise<Store> {
  const { path, log, clock } = options;
  createPrivateFile(path);
  migrate(options);
  const writer = connect(path);
  const reader = connect(path);
  reader.run("pragma query_only = on");

  const tables = defineSchema(columns.sqlite);
  // Drizzle runs the builders of this driver at once when they are awaited, as "async" promises.
  const ends = createCallEnds(log);
  const db = drizzle(writer) as unknown as Queries;
  // Waiting inside SQLite blocks the event loop. The group commit waits for the write lock without it.
  writer.run("pragma busy_timeout = 0");
  // Readers of the log wait for nobody, except for a process that rebuilds its index after a crash.
  reader.run("pragma busy_timeout = 50");
  const group = createGroupCommit({ writer, db, tables, now, log, ended: ends.publish });
  const checkpoints = startCheckpoints({ writer, path, log, walBytes: WAL_BYTES_MAX });
  // A row that stays as it was would not be written.
  const touch = writer.prepare(
    "insert into job_leases (job, next_at) values ('probe', 1) on conflict (job) do update set next_at = next_at + 1",
  );

  const lookUpOn = commandsOn(reader);
  const lookUp = async <Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output> =>
    lookUpOn(command)(input, NO_EFFECTS);
  const read = { db: drizzle(reader) as unknown as Queries, tables };
  return {
    isShared: false,
    clock,
    read: { ...read, urgent: read },
    write: group.write,
    execute(command, input) {
      if (command.kind === "counter")
        throw new Error(`${command.name}: counted in memory where nobody shares the database`);
      return command.kind === "look_up" ? lookUp(command, input) : group.execute(command, input);
    },
    onCallEnded: ends.subscribe,
    probe: (timeoutMs) =>
      within(
        timeoutMs,
        group.write(async () => void touch.run()),
      ),
    async close() {
      await group.close();
      await checkpoints.stop();
      try {
        writer.run("pragma wal_checkpoint(truncate)");
      } finally {
        reader.close();
        writer.close();
      }
    },
  };
}
