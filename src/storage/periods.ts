// Tables whose rows go by age: laid out by time, so that what is too old is dropped in whole pieces and not row by row.
// On Postgres the pieces are partitions (partitions/). A database without pieces drops nothing, and leaves it to whoever
// removes single rows.
import { type IdPrefix, idFloor, idTime } from "../core/id.ts";
import { DAY_MS, HOUR_MS } from "../core/time.ts";

/** Rows of a piece that is dropped. */
export interface DroppedRange {
  /** The table that holds just these rows. */
  readonly rows: string;
  /** Keys, as SQL says them: from `from` on, and below `to`. */
  readonly from: string;
  readonly to: string;
}

export interface TimedTable {
  readonly name: string;
  /** The column that rises with time. */
  readonly key: string;
  /** The lowest key of a row of this time (milliseconds) or later. */
  keyAt(time: number): string;
  /** The time of such a key. */
  timeAt(key: string): number;
  /** Whether its rows, and the open calls of the same time, are what the totals count (`invocation_counts`). */
  readonly isCounted: boolean;
  /**
   * A query of the `tenant` and the key of the rows that must outlive the others of their time, in the SQL that both databases
   * share; null when there are none. It must find them along indexes, since it is asked while writers may wait.
   */
  readonly kept: ((range: DroppedRange) => string) | null;
  /** On Postgres: what makes the indexes that each piece has, and the table as a whole has not. */
  readonly ownIndexes?: (piece: string) => string[];
}

/** For a table whose key is an ID. */
export const keyedById = (prefix: IdPrefix) => ({
  keyAt: (time: number): string => idFloor(prefix, time),
  timeAt: idTime,
});

export interface Periods {
  /** Before the first write: undoes what a process that was ended while it prepared tables has left in the way. */
  clearTheWay(tables: readonly TimedTable[]): Promise<void>;
  /**
   * Makes room for what comes, in pieces of so many hours.
   *
   * @returns where each piece begins, in hours since the epoch, in their order; the first is 0. Totals may be brought together
   * under the first hour of a piece, as far as it reaches.
   */
  prepare(table: TimedTable, hours: number): Promise<readonly number[]>;
  /**
   * Drops the pieces of which every row is older than `before` (milliseconds), with their part of the totals, but for the
   * rows that are kept. Several processes may do this at once.
   *
   * @returns the time below which there may still be rows, to be removed one by one
   */
  drop(table: TimedTable, before: number): Promise<number>;
}

const LADDER_HOURS = [1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 720, 1440, 2880] as const;
const ENDLESS_HOURS = 720;
/** With those made ahead there are about 60. */
const PIECES_MAX = 52;

/**
 * The width of the pieces for rows that are kept for so many days, 0 for ever: the narrowest of which there are not too
 * many. So rows stay longer than they should by at most a twentieth of their time, and by an hour at one day.
 */
export function periodHours(days: number): number {
  if (days === 0) return ENDLESS_HOURS;
  const least = (days * DAY_MS) / HOUR_MS / PIECES_MAX;
  return LADDER_HOURS.find((hours) => hours >= least) ?? Math.ceil(least / ENDLESS_HOURS) * ENDLESS_HOURS;
}
