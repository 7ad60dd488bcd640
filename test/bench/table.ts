// What a run has measured: rows of figures, most of them beside their floor in the same run, how they are printed, and
// how a run is compared with an earlier one. Pure.

/** What can be measured of a piece of work, in the order of the columns. Less is better, but for the rates. */
const COLUMNS = {
  rate: "/s",
  p50_ms: "p50 ms",
  p99_ms: "p99 ms",
  cpu_us: "CPU µs",
  main_us: "main µs",
  server_us: "server µs",
  rss_mb: "RSS MB",
  written: "B written",
  gas: "gas",
  mib_s: "MiB/s",
} as const;

export type Figure = keyof typeof COLUMNS;

/**
 * Per second; milliseconds; microseconds of a core per call: of the whole process, of its main thread, and of the
 * database server; the resident set in MB; bytes written to the disk per call (of Postgres, those of its log); gas of
 * a settlement; and the rate of a stream.
 */
export type Figures = { readonly [Name in Figure]?: number };

export interface Row {
  readonly part: string;
  readonly work: string;
  readonly figures: Figures;
  /** What the row is measured against in the same run: the work of that row, a figure, and this one by that one. */
  readonly floor: { readonly work: string; readonly by: Figure; readonly ratio: number } | null;
  readonly note: string;
}

/** The value below which this share of them lies; null when there are none. */
export function percentile(values: readonly number[], share: number): number | null {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] ?? null;
}

/** The middle and the worst hundredth of some milliseconds. */
export function latency(milliseconds: readonly number[]): Figures {
  const [p50_ms, p99_ms] = [percentile(milliseconds, 0.5), percentile(milliseconds, 0.99)];
  return p50_ms === null || p99_ms === null ? {} : { p50_ms, p99_ms };
}

export interface RowOptions {
  /** The row that this one is measured against, and by which figure of both. */
  readonly floor?: readonly [Row, Figure];
  readonly note?: string;
}

export function newRow(part: string, work: string, figures: Figures, { floor, note = "" }: RowOptions = {}): Row {
  if (floor === undefined) return { part, work, figures, floor: null, note };
  const [{ work: other, figures: theirs }, by] = floor;
  const [own, base] = [figures[by], theirs[by]];
  const isKnown = own !== undefined && base !== undefined && base > 0;
  return { part, work, figures, floor: isKnown ? { work: other, by, ratio: own / base } : null, note };
}

/** Every row on a line below the columns that any of them has. */
export function printed(rows: readonly Row[]): string {
  return grid(rows, shown, printedFloor);
}

/** One row by itself, with the name before each figure. */
export function printedRow(row: Row): string {
  const names = Object.keys(COLUMNS) as Figure[];
  const figures = names.flatMap((name) => {
    const value = row.figures[name];
    return value === undefined ? [] : `${COLUMNS[name]} ${shown(value)}`;
  });
  return [keyOf(row), ...figures, printedFloor(row), row.note].filter((text) => text !== "").join("  ");
}

/** A figure of a row by what it was in an earlier run. */
export function changes(now: readonly Row[], earlier: readonly Row[]): Row[] {
  const before = new Map(earlier.map((row) => [keyOf(row), row]));
  return now.flatMap((row) => {
    const old = before.get(keyOf(row));
    if (old === undefined) return [];
    const figures: Partial<Record<Figure, number>> = {};
    for (const name of Object.keys(COLUMNS) as Figure[]) {
      const [is, was] = [row.figures[name], old.figures[name]];
      if (is !== undefined && was !== undefined && was > 0) figures[name] = is / was;
    }
    const isRatio = row.floor !== null && old.floor !== null && old.floor.ratio > 0;
    const floor = isRatio && row.floor && old.floor ? { ...row.floor, ratio: row.floor.ratio / old.floor.ratio } : null;
    return [{ ...row, figures, floor, note: "" }];
  });
}

/** The same for changes, each as so many times what it was. */
export function printedChanges(rows: readonly Row[]): string {
  const times = (value: number) => `×${value.toFixed(2)}`;
  return grid(rows, times, ({ floor }) => (floor === null ? "" : `${times(floor.ratio)} what it was of its floor`));
}

/** One column holds ratios of all kinds, so each says by which figure and of which row it is. */
function printedFloor({ floor }: Row): string {
  return floor === null ? "" : `${floor.ratio.toFixed(2)} of the ${COLUMNS[floor.by]} of ${floor.work}`;
}

function keyOf({ part, work }: Row): string {
  return `${part}: ${work}`;
}

function grid(rows: readonly Row[], cell: (value: number) => string, last: (row: Row) => string): string {
  const text = (value: number | undefined) => (value === undefined ? "" : cell(value));
  const names = (Object.keys(COLUMNS) as Figure[]).filter((name) => rows.some(({ figures }) => name in figures));
  const lines = [
    ["", ...names.map((name) => COLUMNS[name]), "", ""],
    ...rows.map((row) => [keyOf(row), ...names.map((name) => text(row.figures[name])), last(row), row.note]),
  ];
  const widths = lines[0]?.map((_, column) => Math.max(...lines.map((line) => [...(line[column] ?? "")].length))) ?? [];
  return lines
    .map((line) =>
      line
        .map((text, column) => padded(text, column, names.length, widths))
        .join("  ")
        .trimEnd(),
    )
    .join("\n");
}

/** Numbers stand to the right, texts to the left. */
function padded(text: string, column: number, numbers: number, widths: readonly number[]): string {
  const width = widths[column] ?? 0;
  return column > 0 && column <= numbers ? text.padStart(width) : text.padEnd(width);
}

/** Three digits that count. */
function shown(value: number): string {
  return value >= 100 ? String(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2);
}
