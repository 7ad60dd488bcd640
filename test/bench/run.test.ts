// The benchmark itself, at its smallest: what it measures is asserted nowhere, only that it measures.
import { expect, test } from "bun:test";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DATABASES } from "./databases.ts";
import { accepts, wholeCalls } from "./measure.ts";
import { type Part, runParts } from "./run.ts";
import { openFloor, quickUpstream } from "./targets.ts";

const SECONDS = 0.2;

for (const open of DATABASES) {
  test(`the bare server of the floor accepts, calls and records what it is asked (${open.name})`, async () => {
    const database = await open();
    let visits = 0;
    await using upstream = quickUpstream(() => visits++);
    await using floor = await openFloor(database, upstream);
    const one = await accepts(floor, { seconds: SECONDS, connections: 1, answersMax: 20 });
    expect(one.note).toBe("");
    expect(one.figures.rate).toBeGreaterThan(0);

    const before = visits;
    const whole = await wholeCalls(floor, SECONDS, floor.left);
    expect(whole.note).toBe("");
    expect(whole.accepted).toBeGreaterThan(0);
    expect(visits - before).toBeGreaterThanOrEqual(whole.accepted);
    expect(await floor.left()).toBe(0);
  });

  test(`the bare server of the floor of accepts stores what it is asked (${open.name})`, async () => {
    await using floor = await openFloor(await open());
    const one = await accepts(floor, { seconds: SECONDS, connections: 4, answersMax: 20 });
    expect(one.note).toBe("");
    expect(one.figures.rate).toBeGreaterThan(0);
  });
}

test("what answers something else is not counted, and is told", async () => {
  await using other = quickUpstream();
  const target = { pid: process.pid, port: Number(new URL(other.url).port), requests: [ASK] };
  const database = { serverSeconds: () => 0, written: async () => 0 };
  const { figures, note } = await accepts({ ...target, database }, { seconds: SECONDS, connections: 2, answersMax: 8 });
  expect([figures.rate, note]).toEqual([0, "8 answered 200"]);
});
const ASK = "GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";

test("a run is written to a file, which a later one is compared with", async () => {
  const dir = mkdtempSync(join(tmpdir(), "bench-"));
  try {
    const [first, second] = [join(dir, "first.json"), join(dir, "second.json")];
    const part: Part = async (seconds, report) => void report.add("work", { rate: seconds * 100 });
    expect(await runParts({ part }, ["--seconds", "2", "--json", first])).toBe(0);
    expect(await runParts({ part, never }, ["part", "--seconds", "3", "--against", first, "--json", second])).toBe(0);
    const rows = [first, second].map((path) => JSON.parse(readFileSync(path, "utf8")).rows);
    expect(rows.map(([row]) => [row.part, row.work, row.figures])).toEqual([
      ["part", "work", { rate: 200 }],
      ["part", "work", { rate: 300 }],
    ]);
    expect(await runParts({ never }, ["--fast"])).toBe(2);
    // A part that fails takes no other part's figures with it.
    expect(await runParts({ never, part }, ["--json", first])).toBe(1);
    expect(JSON.parse(readFileSync(first, "utf8")).rows).toHaveLength(1);
    const missing = join(dir, "missing.json");
    await expect(runParts({ never }, ["--against", missing])).rejects.toThrow(missing);
    expect(existsSync(missing)).toBe(false);
  } finally {
    rmSync(dir, { recursive: true });
  }
});
const never: Part = () => Promise.reject(new Error("nobody asked for this part"));
