import { expect, test } from "bun:test";
import { join } from "node:path";
import { Glob } from "bun";
import { LIMITS, type Limit } from "../../kernel/limits.ts";

const page = (name: string) => Bun.file(join(import.meta.dir, `${name}.md`)).text();

const MIB = 1024 * 1024;
const SCOPES = { process: "in all", tenant: "a tenant", agent: "an agent", each: "each" };
const number = (value: number) => value.toLocaleString("en-US");

function sizeOf({ size, unit }: Limit): string {
  if (unit === "ms") return `${number(size / 1000)} s`;
  if (unit === "bytes" && size % 1024 === 0) return size % MIB === 0 ? `${size / MIB} MiB` : `${size / 1024} KiB`;
  return unit === "count" ? number(size) : `${number(size)} ${unit}`;
}

const table = (head: readonly string[], rows: readonly (readonly string[])[]) =>
  [head, head.map(() => "---"), ...rows]
    .map((cells) => `| ${cells.join(" | ")} |\n`)
    .join("")
    .replaceAll(" --- ", "---");

test("the page on limits shows every bound of the table, by its headings", async () => {
  const text = await page("limits");
  for (const [heading, limits] of Object.entries(LIMITS)) {
    if (heading === "Memory") continue;
    const rows = Object.values<Limit>(limits).map((limit) => [
      limit.what,
      sizeOf(limit),
      SCOPES[limit.per],
      limit.beyond,
    ]);
    expect(text).toContain(`\n## ${heading}\n\n${table(["what", "limit", "of", "beyond it"], rows)}\n`);
  }
});

test("the page on operations shows the memory budgets, and what they are together", async () => {
  const budgets = Object.values<Limit>(LIMITS.Memory);
  expect(budgets.filter(({ unit, per }) => unit !== "bytes" || per !== "process")).toEqual([]);
  const together = budgets.reduce((sum, { size }) => sum + size, 0);
  const rows = budgets.map((limit) => [limit.what, sizeOf(limit), limit.beyond]);
  rows.push(["together", `${number(together / MIB)} MiB`, ""]);
  expect(await page("operations")).toContain(`\n${table(["what", "at most", "beyond it"], rows)}\n`);
});

test("every row of the table bounds something", async () => {
  const root = join(import.meta.dir, "../../..");
  const paths = [...new Glob("src/**/*.ts").scanSync({ cwd: root })].filter((path) => !path.endsWith(".test.ts"));
  const code = (await Promise.all(paths.map((path) => Bun.file(join(root, path)).text()))).join("\n");
  const taken = new Set([...code.matchAll(/\bMAX\.(\w+)/g)].map(([, name]) => name));
  // The two of core are below the table, which shows them.
  const shown = ["urlCharacters", "allowedHosts"];
  const names = Object.values(LIMITS).flatMap((limits) => Object.keys(limits));
  expect(names.filter((name) => !taken.has(name) && !shown.includes(name))).toEqual([]);
  expect(names.length).toBeGreaterThan(100);
});
