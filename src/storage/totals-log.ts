// The log of additions to totals on SQLite, as rows: see sqlite-totals.ts. It knows which of them this process has seen.
import type { Database } from "bun:sqlite";
import type { CountDimension } from "../../db/schema.ts";
import { addCount, addCounts, type Counts } from "./counts.ts";

/** The IDs of the first and the last row. Others have written to the log when these are not the same any more. */
interface Ends {
  readonly first: number | null;
  readonly last: number | null;
}

const NONE: Ends = { first: null, last: null };

/** What others have written. */
export interface LogNews {
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

export type TotalsLog = ReturnType<typeof createTotalsLog>;

export function createTotalsLog(writer: Database) {
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
      // Whoever finds nothing begins at another number, so that no two logs have the same ends.
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
