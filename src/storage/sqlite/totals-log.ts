// The totals of the history on SQLite. Each tenant has six rows or more in `invocation_counts`, on pages that no other
// tenant needs, so a group of works of many tenants would write all of these. It writes one row instead, with all that it
// adds, into a log; and later what many groups have added is moved into the table, a little with each group.
// A total is the sum of both. What stands in the log is kept in memory as well, and read when another connection has written
// to it, which is rare: at most one gateway runs on a database.
import type { Database } from "bun:sqlite";
import type { CountDimension } from "../../../db/schema.ts";
import type { LoggedTotals } from "../store.ts";
import { addCount, addCounts, type Count, type Counts, inOrder } from "../totals.ts";

/** The IDs of the first and the last row. Others have written to the log when these are not the same any more. */
interface Ends {
  readonly first: number | null;
  readonly last: number | null;
}

const NONE: Ends = { first: null, last: null };

/** What others have written. */
interface LogNews {
  /** Whether all that was known before still stands there. */
  readonly isLonger: boolean;
  readonly added: Counts;
  readonly bytes: number;
}

function statements(writer: Database) {
  return {
    insert: writer.prepare<never, [number, number, string]>(
      "insert into count_additions (id, is_moved, additions) values (?, ?, ?)",
    ),
    // Two seeks.
    ends: writer.prepare<Ends, []>(
      "select (select min(id) from count_additions) as first, (select max(id) from count_additions) as last",
    ),
    forget: writer.prepare<never, [number]>("delete from count_additions where id <= ? or is_moved = 1"),
    behind: writer.prepare<{ id: number; additions: string }, [number]>(
      "select id, additions from count_additions where id > ? order by id",
    ),
    // Another number after each commit of another connection.
    others: writer.prepare<{ data_version: number }, []>("pragma data_version"),
  };
}

type TotalsLog = ReturnType<typeof createTotalsLog>;

/** The log of additions, as rows. It knows which of them this process has seen. */
function createTotalsLog(writer: Database) {
  const sql = statements(writer);
  let ends = NONE;
  let others = Number.NaN;
  const endsNow = () => sql.ends.get() ?? NONE;

  function read(isLonger: boolean): LogNews {
    if (!isLonger) ends = NONE;
    const added: Counts = new Map();
    let bytes = 0;
    // Up to the last row that was seen here: one more may have come since its ends were looked at.
    for (const { id, additions } of sql.behind.all(ends.last ?? 0)) {
      addCounts(added, decoded(additions));
      bytes += additions.length;
      ends = { first: ends.first ?? id, last: id };
    }
    return { isLonger, added, bytes };
  }

  return {
    lastRow: () => ends.last ?? 0,
    /**
     * Null when others have not written to the log. Most of what they write is elsewhere: to read all of it for that held the
     * event loop for 24 to 56 ms (measured).
     */
    news(): LogNews | null {
      const now = sql.others.get()?.data_version ?? 0;
      if (now === others) return null;
      others = now;
      const { first, last } = endsNow();
      return first === ends.first && last === ends.last ? null : read(first === ends.first);
    },
    /**
     * Writes rows, in a transaction.
     *
     * @returns how many bytes the additions have, and what is to be called right after the commit
     */
    write(moved: Counts, added: Counts): { readonly bytes: number; readonly stored: () => void } {
      const [movedRow, addedRow] = [encoded(moved), encoded(added)];
      // A process that finds nothing begins at another number, so that no two logs have the same ends.
      let id = ends.last ?? Math.floor(Math.random() * 2 ** 52);
      if (movedRow !== NOTHING) sql.insert.run(++id, 1, movedRow);
      if (addedRow !== NOTHING) sql.insert.run(++id, 0, addedRow);
      const written = endsNow();
      return {
        bytes: addedRow.length,
        stored() {
          ends = written;
        },
      };
    },
    /** Removes the rows up to this one, and those that say what has been moved of them. */
    forget: (lastRow: number) => void sql.forget.run(lastRow),
  };
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

/**
 * The log is moved when it has this size: what each total gets is then the sum of many additions, and reading the log
 * after a crash takes 20 ms. Measured, accepts of 1,000 tenants: 8.8 KB each at 256 KiB, 8.0 at 1 MiB, 7.8 at 4 MiB.
 */
const LOG_BYTES = 1024 * 1024;
/** It is moved too when it is about so many totals, which are put in order at once: callers name models as they like. */
const TOTALS_MAX = 8_192;
/** Totals that one group brings up to date: about 1 ms. */
const MOVED_AT_ONCE = 256;

/** A part of the log on its way into the table. */
interface Move {
  /** What its rows add, as far as it has not been moved. */
  readonly counts: Counts;
  readonly bytes: number;
  readonly isAsked: boolean;
  /** Moves some totals, in a transaction, and gives what is taken back for it in the log. */
  some(): { readonly takenBack: Counts; readonly isDone: boolean; readonly stored: () => void };
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

/** @param writer its transactions write into the log last of all */
export function createSqliteTotals(
  writer: Database,
  { logBytes = LOG_BYTES, totalsMax = TOTALS_MAX, movedAtOnce = MOVED_AT_ONCE } = {},
): SqliteTotals {
  const log = createTotalsLog(writer);
  let logged: Counts = new Map();
  let size = 0;
  /** No fewer than there are totals in `logged`. */
  let most = 0;
  let version = 0;
  let move: Move | null = null;
  /** All that is in the log is to be moved, however little it is. */
  let isAsked = false;
  readOthers();

  function readOthers(): void {
    const news = log.news();
    if (news === null) return;
    if (!news.isLonger) [logged, size] = [new Map(), 0];
    else if (move !== null) addCounts(logged, move.counts);
    move = null;
    version += 1;
    addCounts(logged, news.added);
    size += news.bytes;
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
    const counts = logged;
    // All have been moved after so many groups, or the log would grow faster than it is moved.
    const limit = Math.max(movedAtOnce, Math.ceil(totalsIn(counts) / 16));
    logged = new Map();
    most = 0;
    return { counts, bytes: size, isAsked, some: mover(writer, log, counts, limit) };
  }

  function isOver({ bytes, isAsked: wasAsked }: Move): void {
    move = null;
    size -= bytes;
    if (wasAsked) isAsked = false;
  }

  return {
    version() {
      readOthers();
      return version;
    },
    of(tenant, dimension, value) {
      let sum = 0;
      for (const counts of move === null ? [logged] : [logged, move.counts]) {
        for (const tenants of counts.values()) sum += tenants.get(tenant)?.get(dimension)?.get(value) ?? 0;
      }
      return sum;
    },
    write(added) {
      readOthers();
      // What moves now was there before this group.
      if (move === null && (isAsked || isLarge())) move = wholeLog();
      const current = move;
      const moved = current?.some();
      const written = log.write(moved?.takenBack ?? new Map(), added);
      return () => {
        written.stored();
        moved?.stored();
        if (moved !== undefined) version += 1;
        if (current !== null && moved?.isDone === true) isOver(current);
        addCounts(logged, added);
        size += written.bytes;
        most += totalsIn(added);
      };
    },
    hurry() {
      isAsked = size > 0;
      return () => !isAsked;
    },
  };
}

/** Moves what all rows of the log add, so many totals at a time. They are put in order as they go: all at once took 14 ms. */
function mover(writer: Database, log: TotalsLog, counts: Counts, limit: number): Move["some"] {
  const add = writer.prepare(
    `insert into invocation_counts (tenant, dimension, value, period, shard, count) values (?, ?, ?, ?, 0, ?)
     on conflict (tenant, dimension, value, period, shard) do update set count = count + excluded.count`,
  );
  const lastRow = log.lastRow();
  const order = inOrder(counts);
  /** They stay the next until a group with them is stored. */
  let next: readonly Count[] | null = null;
  return () => {
    next ??= [...take(order, limit)];
    const moved: Counts = new Map();
    for (const { tenant, period, dimension, value, delta } of next) {
      add.run(tenant, dimension, value, period, delta);
      addCount(moved, tenant, period, dimension, value, -delta);
    }
    const isDone = next.length < limit;
    if (isDone) log.forget(lastRow);
    const stored = () => {
      addCounts(counts, moved);
      next = null;
    };
    return { takenBack: isDone ? new Map() : moved, isDone, stored };
  };
}

function* take<T>(items: Iterator<T, undefined>, count: number): Generator<T> {
  for (let taken = 0; taken < count; taken++) {
    const { done, value } = items.next();
    if (done === true) return;
    yield value;
  }
}

function totalsIn(counts: Counts): number {
  let sum = 0;
  for (const tenants of counts.values()) {
    for (const dimensions of tenants.values()) for (const values of dimensions.values()) sum += values.size;
  }
  return sum;
}
