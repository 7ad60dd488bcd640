// The start on a database of the version that kept all calls in one table: open calls beside a few ended ones, and beside a
// million. What the migration takes may not grow with the history.
import { Database } from "bun:sqlite";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { SQL } from "bun";
import { systemClock } from "../../src/core/clock.ts";
import { silentLog } from "../../src/core/log.ts";
import { openStore } from "../../src/storage/open.ts";
import { temporaryRoot } from "../support/gateway/process.ts";
import { manyOlderCalls, olderSchema } from "../support/stores/older-calls.ts";
import { DATABASES, type OpenDatabase } from "./databases.ts";
import type { Report } from "./report.ts";
import type { Figures } from "./table.ts";

const OPEN = 20_000;
const [FEW, MANY] = [10_000, 1_000_000];

/** One start each: it can be done once. */
export async function migration(_seconds: number, report: Report): Promise<void> {
  for (const open of DATABASES) {
    const few = await startOf(open, FEW);
    const floor = report.add(`${OPEN} open calls set apart from ${FEW} ended ones, ${few.name}`, few.figures);
    const many = await startOf(open, MANY);
    const work = `${OPEN} open calls set apart from ${MANY} ended ones, ${many.name}`;
    report.add(work, many.figures, {
      floor: [floor, "p50_ms"],
      note: "the whole start, once; B written per open call",
    });
  }
}

async function startOf(open: OpenDatabase, ended: number): Promise<{ name: string; figures: Figures }> {
  const { name, url, written } = await open();
  const dataDir = mkdtempSync(join(temporaryRoot(), "migration-"));
  await fill(url, dataDir, ended);
  const before = await written(process.pid);
  const startedAt = performance.now();
  const store = await openStore({ databaseUrl: url, dataDir, log: silentLog, clock: systemClock });
  const p50_ms = performance.now() - startedAt;
  const figures = { p50_ms, written: ((await written(process.pid)) - before) / OPEN };
  await store.close();
  rmSync(dataDir, { recursive: true });
  return { name, figures };
}

async function fill(url: string | null, dataDir: string, ended: number): Promise<void> {
  const dialect = url === null ? "sqlite" : "postgres";
  const statements = [...olderSchema(dialect), ...manyOlderCalls(dialect, { ended, open: OPEN })];
  if (url === null) {
    using database = new Database(join(dataDir, "tollgate.db"));
    for (const statement of statements) database.run(statement);
    return;
  }
  await using client = new SQL(url, { max: 1 });
  for (const statement of statements) await client.unsafe(statement);
  // As the server does by itself after a while, and so that what was filled in is on the disk.
  await client.unsafe("vacuum analyze");
  await client.unsafe("checkpoint");
}
