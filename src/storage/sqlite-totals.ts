// The totals of the history on SQLite. Each tenant has six rows or more in `invocation_counts`, on pages that no other
// tenant needs, so a group of works of many tenants would write all of these. It writes one row instead, with all that it
// adds, into a log; and later what many groups have added is moved into the table, a little with each group.
// A total is the sum of both. What stands in the log is kept in memory as well, and read again when another connection has
// written to the file, which is rare: at most one gateway runs on a database.
import type { Database } from "bun:sqlite";
import type { CountDimension } from "../../db/schema.ts";
import { addCount, addCounts, type Count, type Counts, changedCounts } from "./counts.ts";

/**
 * The log is moved when it has this size: what each total gets is then the sum of many additions, and reading the log
 * after a crash takes 20 ms. Measured, accepts of 1,000 tenants: 8.8 KB each at 256 KiB, 8.0 at 1 MiB, 7.8 at 4 MiB.
 */
const LOG_BYTES = 1024 * 1024;
/** It is moved too when it is about so many totals, which are put in order at once: callers name models as they like. */
const TOTALS_MAX = 8_192;
/** Totals that one group brings up to date: about 1 ms. */
const MOVED_AT_ONCE = 256;
/** All have been moved after so many groups, or the log would grow faster than it is moved. */
const GROUPS_MAX = 16;

/** Totals as far as they stand in the log only. */
export interface LoggedTotals {
  /** Another number when something may have moved from the log into the table. */
  version(): number;
  of(tenant: string, dimension: CountDimension, value: string): number;
}

/** A part of the log on its way into the table: what its first rows add, and how far that has come. */
interface Move {
  readonly totals: readonly Count[];
  readonly lastRow: number;
  readonly bytes: number;
  readonly isAsked: boolean;
  readonly done: number;
}

export interface SqliteTotals extends LoggedTotals {
  /**
   * Writes what a group has added, as a part of its transaction.
   *
   * @returns to be called right after the commit, and not at all if there is none
   */
  write(added: Counts): () => void;
  /** From now on each group moves on what is in the log. Returns whether all of it has been moved. */
  hurry(): () => boolean;
}

function statements(writer: Database) {
  return {
    log: writer.prepare<never, [number, string]>("insert into count_additions (is_moved, additions) values (?, ?)"),
    add: writer.prepare(
      `insert into invocation_counts (tenant, dimension, value, period, shard, count) values (?, ?, ?, ?, 0, ?)
       on conflict (tenant, dimension, value, period, shard) do update set count = count + excluded.count`,
    ),
    lastRow: writer.prepare<{ id: number }, []>("select coalesce(max(id), 0) as id from count_additions"),
    forget: writer.prepare<never, [number]>("delete from count_additions where id <= ? or is_moved = 1"),
    all: writer.prepare<{ additions: string }, []>("select additions from count_additions"),
    // Another number after each commit of another connection.
    others: writer.prepare<{ data_version: number }, []>("pragma data_version"),
  };
}

/** @param writer its transactions write into the log last of all */
export function createSqliteTotals(
  writer: Database,
  { logBytes = LOG_BYTES, totalsMax = TOTALS_MAX, movedAtOnce = MOVED_AT_ONCE } = {},
): SqliteTotals {
  const sql = statements(writer);
  let logged: Counts = new Map();
  let size = 0;
  /** No fewer than there are totals in `logged`. */
  let most = 0;
  let version = 0;
  let move: Move | null = null;
  /** All that is in the log is to be moved, however little it is. */
  let isAsked = false;
  let others = Number.NaN;
  readOthers();

  function readOthers(): void {
    const now = sql.others.get()?.data_version ?? 0;
    if (now === others) return;
    others = now;
    logged = new Map();
    size = 0;
    move = null;
    version += 1;
    for (const { additions } of sql.all.all()) {
      addCounts(logged, decoded(additions));
      size += additions.length;
    }
    most = totalsIn(logged);
  }

  function isLarge(): boolean {
    if (size >= logBytes) return true;
    // Most groups add to totals that are there, so it is counted rarely.
    if (most >= totalsMax) most = totalsIn(logged);
    return most >= totalsMax;
  }

  /** All that is in the log now, as the next part to be moved. */
  function wholeLog(): Move {
    return { totals: changedCounts(logged), lastRow: sql.lastRow.get()?.id ?? 0, bytes: size, isAsked, done: 0 };
  }

  /** Moves some totals, in a transaction. Returns what to do after its commit. */
  function moveSome(current: Move, limit: number): () => void {
    const totals = current.totals.slice(current.done, current.done + limit);
    const moved: Counts = new Map();
    for (const { tenant, period, dimension, value, delta } of totals) {
      sql.add.run(tenant, dimension, value, period, delta);
      addCount(moved, tenant, period, dimension, value, -delta);
    }
    const done = current.done + totals.length;
    const isDone = done === current.totals.length;
    if (isDone) sql.forget.run(current.lastRow);
    else sql.log.run(1, encoded(moved));
    return () => {
      addCounts(logged, moved);
      version += 1;
      move = isDone ? null : { ...current, done };
      if (!isDone) return;
      size -= current.bytes;
      if (current.isAsked) isAsked = false;
    };
  }

  return {
    version() {
      readOthers();
      return version;
    },
    of(tenant, dimension, value) {
      let sum = 0;
      for (const tenants of logged.values()) sum += tenants.get(tenant)?.get(dimension)?.get(value) ?? 0;
      return sum;
    },
    write(added) {
      readOthers();
      // What moves now was there before this group.
      const current = move ?? (isAsked || isLarge() ? wholeLog() : null);
      const limit = Math.max(movedAtOnce, Math.ceil((current?.totals.length ?? 0) / GROUPS_MAX));
      const moved = current === null ? null : moveSome(current, limit);
      const additions = encoded(added);
      if (additions !== NOTHING) sql.log.run(0, additions);
      return () => {
        moved?.();
        addCounts(logged, added);
        size += additions.length;
        most += totalsIn(added);
      };
    },
    hurry() {
      isAsked = size > 0;
      return () => !isAsked;
    },
  };
}

function totalsIn(counts: Counts): number {
  let sum = 0;
  for (const tenants of counts.values()) {
    for (const dimensions of tenants.values()) for (const values of dimensions.values()) sum += values.size;
  }
  return sum;
}

const NOTHING = "[]";

/** A list for each tenant and period: these, then dimension, value and what is added, again and again. */
function encoded(counts: Counts): string {
  const lists: (string | number)[][] = [];
  for (const [period, tenants] of counts) {
    for (const [tenant, dimensions] of tenants) {
      const list = [tenant, period];
      for (const [dimension, values] of dimensions) addDeltas(list, dimension, values);
      if (list.length > 2) lists.push(list);
    }
  }
  return JSON.stringify(lists);
}

function addDeltas(list: (string | number)[], dimension: CountDimension, values: ReadonlyMap<string, number>): void {
  for (const [value, delta] of values) if (delta !== 0) list.push(dimension, value, delta);
}

function decoded(additions: string): Counts {
  const counts: Counts = new Map();
  for (const [tenant, period, ...own] of JSON.parse(additions) as [string, number, ...(string | number)[]][]) {
    for (let i = 0; i < own.length; i += 3) {
      const [dimension, value, delta] = own.slice(i, i + 3) as [CountDimension, string, number];
      addCount(counts, tenant, period, dimension, value, delta);
    }
  }
  return counts;
}
