// Runs the parts of a benchmark, and says what came of them: a table, a file, and what has changed since an earlier
// file. Nothing here can fail for being slow.
import { readFileSync, writeFileSync } from "node:fs";
import { loadavg } from "node:os";
import { type BenchArguments, parseArguments, usage } from "./arguments.ts";
import { createReport, type Report, say } from "./report.ts";
import { changes, printed, printedChanges, type Row } from "./table.ts";

/** @param seconds of each of its loads */
export type Part = (seconds: number, report: Report) => Promise<void>;

/** What `--json` writes and `--against` reads. */
interface Run {
  readonly at: string;
  readonly bun: string;
  readonly cores: number;
  /** Of the minute before the run: what else the machine had to do. */
  readonly load_average_before: number;
  readonly took_seconds: number;
  readonly rows: readonly Row[];
}

/** Gives the exit status: 1 when a part could not measure what it is for, 2 for arguments that mean nothing. */
export async function runParts(parts: Parts, args: readonly string[]): Promise<number> {
  const names = Object.keys(parts);
  const parsed = parseArguments(args, names);
  if (typeof parsed === "string") {
    say(`${parsed}\n${usage(names)}`);
    return 2;
  }
  // Read before anything is measured: a file that isn't there is found out at once, and it may be the one written to.
  const earlier = parsed.against === null ? null : (JSON.parse(readFileSync(parsed.against, "utf8")) as Run);
  const { failed, ...run } = await measured(parts, parsed);
  say(`\n${printed(run.rows)}\n\n${Math.round(run.took_seconds)} s`);
  if (earlier !== null) {
    say(`\ntimes what it was at ${earlier.at}:\n${printedChanges(changes(run.rows, earlier.rows))}`);
  }
  if (parsed.json !== null) writeFileSync(parsed.json, `${JSON.stringify(run, null, 2)}\n`);
  if (failed.length > 0) say(`\nnot measured: ${failed.join(", ")}`);
  return failed.length > 0 ? 1 : 0;
}

type Parts = Readonly<Record<string, Part>>;

async function measured(
  parts: Parts,
  { seconds, chosen }: BenchArguments,
): Promise<Run & { readonly failed: readonly string[] }> {
  const [load = 0] = loadavg();
  const cores = navigator.hardwareConcurrency;
  say(`${cores} cores, Bun ${Bun.version}, ${seconds} s for each load; load average before: ${load.toFixed(2)}`);
  const at = new Date().toISOString();
  const startedAt = performance.now();
  const rows: Row[] = [];
  const failed: string[] = [];
  for (const [name, part] of Object.entries(parts)) {
    if (!chosen.includes(name)) continue;
    try {
      await part(seconds, createReport(name, rows));
    } catch (error) {
      // What the other parts say stays true.
      failed.push(name);
      say(`${name}: ${Bun.inspect(error)}`);
    }
  }
  const took_seconds = (performance.now() - startedAt) / 1000;
  return { at, bun: Bun.version, cores, load_average_before: load, took_seconds, rows, failed };
}
