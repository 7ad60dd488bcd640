// The store on SQLite: a connection for writes, by group commit, which wait for the disk; one for reads; a thread for checkpoints.
import { Database, SQLiteError } from "bun:sqlite";
import { chmodSync, mkdirSync } from "node:fs";
import { dirname } from "node:path";
import { sql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/bun-sqlite";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import type { Log } from "../../core/log.ts";
import { PassingStartupProblem } from "../../core/startup.ts";
import type { Clock } from "../../core/time.ts";
import { ensurePrivateFile, requireUsable } from "../data-dir.ts";
import { isSqliteBusy, within } from "../failures.ts";
import { migrateSqlite } from "../migrate.ts";
import { type Command, type CommandEffects, createCallEnds, type Queries, type Store } from "../store.ts";
import { startCheckpoints } from "./checkpoints.ts";
import { commandsOn, createGroupCommit } from "./group.ts";
import { unreadable } from "./inspect.ts";

/** How long opening the database waits for another process that migrates it. */
const OPEN_BUSY_MS = 10_000;
/**
 * The write-ahead log is truncated to this size when it restarts; the blocks below are reused. It mostly grows to about this size:
 * the fsync of a commit that extends the file takes 290 µs, of one in existing blocks 135 (measured, ext4, 11 pages).
 */
const WAL_BYTES_KEPT = 80 * 1024 * 1024;
/**
 * The size at which the log is checkpointed at once: large bodies make it grow so fast that moving a second's worth would take
 * hundreds of milliseconds. It is above WAL_BYTES_KEPT, since a log that keeps this size would always be due.
 */
const WAL_BYTES_MAX = WAL_BYTES_KEPT + 16 * 1024 * 1024;
const CACHE_KIB = 16 * 1024;

const now = sql<number>`cast(unixepoch('subsec') * 1000 as integer)`.mapWith(Number);

interface SqliteOptions {
  readonly path: string;
  readonly log: Log;
  readonly clock: Clock;
}

/** For commands that only read. */
const NO_EFFECTS: CommandEffects = { count() {}, ended() {} };

function connect(path: string): Database {
  const connection = new Database(path, { readwrite: true });
  connection.run(`pragma busy_timeout = ${OPEN_BUSY_MS}`);
  enterWal(connection);
  connection.run("pragma synchronous = full");
  connection.run("pragma wal_autocheckpoint = 0");
  // Savepoints store copies of changed pages in temporary storage.
  connection.run("pragma temp_store = memory");
  connection.run(`pragma journal_size_limit = ${WAL_BYTES_KEPT}`);
  connection.run(`pragma cache_size = -${CACHE_KIB}`);
  return connection;
}

/**
 * Switches to WAL mode, with retries: the first connections to a new file all try that, and SQLite answers busy at once, whatever
 * the timeout, to one that already reads the file.
 */
function enterWal(connection: Database): void {
  const until = performance.now() + OPEN_BUSY_MS;
  for (;;) {
    try {
      connection.run("pragma journal_mode = wal");
      return;
    } catch (error) {
      if (!isSqliteBusy(error) || performance.now() > until) throw error;
    }
    Bun.sleepSync(5 + Math.random() * 10);
  }
}

/** Migrates on a connection of its own, since a connection reads the schema's statistics when it opens. */
function migrate({ path, clock, log }: SqliteOptions): void {
  let connection: Database | null = null;
  try {
    connection = connect(path);
    migrateSqlite(connection, { clock, log });
  } catch (cause) {
    const isBroken = cause instanceof SQLiteError && /^SQLITE_(NOTADB|CORRUPT)/.test(cause.code ?? "");
    if (isSqliteBusy(cause)) {
      const advice = "end what writes to it (a copy that is being made, an SQLite shell), and start again";
      const problem = `another program has locked ${path} for ${OPEN_BUSY_MS / 1000} s: ${advice}`;
      throw new PassingStartupProblem(problem, { cause });
    }
    const advice = "; check its disk, or put a backup in its place (tollgate restore FILE)";
    throw isBroken ? unreadable(path, cause, advice) : cause;
  } finally {
    connection?.close();
  }
}

/** @throws Error when the database belongs to a newer program, or can't be opened; StartupProblem when the file is broken */
export async function openSqlite(options: SqliteOptions): Promise<Store> {
  const { path, log, clock } = options;
  mkdirSync(dirname(path), { recursive: true, mode: 0o700 });
  requireUsable(path);
  // For its owner only. SQLite gives its log and index files the same mode.
  ensurePrivateFile(path);
  chmodSync(path, 0o600);
  migrate(options);
  const writer = connect(path);
  const reader = connect(path);
  reader.run("pragma query_only = on");

  const tables = defineSchema(columns.sqlite);
  // This driver is synchronous, but its query builders can be awaited, which is how the "async" type uses them.
  const ends = createCallEnds(log);
  const db = drizzle(writer) as unknown as Queries;
  // Waiting for the write lock inside SQLite would block the event loop. The group commit retries with timers instead.
  writer.run("pragma busy_timeout = 0");
  // Readers wait only for a process that rebuilds the log's index after a crash.
  reader.run("pragma busy_timeout = 50");
  const group = createGroupCommit({ writer, db, tables, now, log, ended: ends.publish });
  const checkpoints = startCheckpoints({ writer, path, log, walBytes: WAL_BYTES_MAX });
  // The value changes each time, since an unchanged row would not be written.
  const touching = writer.prepare(
    "insert into job_leases (job, next_at) values ('probe', 1) on conflict (job) do update set next_at = next_at + 1",
  );

  const touch = async () => void touching.run();

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
      if (command.kind === "counter") throw new Error(`${command.name}: shared counters need a shared database`);
      return command.kind === "look_up" ? lookUp(command, input) : group.execute(command, input);
    },
    onCallEnded: ends.subscribe,
    probe: (timeoutMs) => within(timeoutMs, group.write(touch)),
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
