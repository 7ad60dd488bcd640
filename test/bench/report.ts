// How figures are shown while they come: one line each, at once, so that a run can be watched and cut short. All rows
// stand together in one table at the end.
import { type Figures, newRow, printedRow, type Row, type RowOptions } from "./table.ts";

export interface Rate {
  /** How many. */
  readonly count: number;
  /** What they took, of whatever the figure is about. */
  readonly seconds: number;
}

export function perSecond({ count, seconds }: Rate): number {
  return count / seconds;
}

export function say(line: string): void {
  process.stdout.write(`${line}\n`);
}

/** Takes the rows of one part, and shows each. */
export interface Report {
  add(work: string, figures: Figures, options?: RowOptions): Row;
}

/** @param rows gets all of them */
export function createReport(part: string, rows: Row[]): Report {
  return {
    add(work, figures, options) {
      const row = newRow(part, work, figures, options);
      rows.push(row);
      say(printedRow(row));
      return row;
    },
  };
}
