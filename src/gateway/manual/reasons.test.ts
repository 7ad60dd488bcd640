// The manual explains every reason that a record or the log may give, and no other.
import { expect, test } from "bun:test";
import { join } from "node:path";
import { ERROR_CLASSES, ERROR_DETAILS } from "../../core/states.ts";
import { TOKEN_PROBLEMS } from "../identity/identity.ts";

/** The first cells of the table with this head, without their code marks. */
async function firstCells(page: string, head: string): Promise<string[]> {
  const text = await Bun.file(join(import.meta.dir, `${page}.md`)).text();
  const [, table = ""] = text.split(`\n${head}\n`);
  const [, ...rows] = table.split("\n\n", 1)[0]?.split("\n") ?? [];
  return rows.flatMap((row) => [...(row.split(" | ", 1)[0] ?? "").matchAll(/`([^`]+)`/g)].map(([, word = ""]) => word));
}

test("the page on troubleshooting has every reason for which a token is refused, in the order of the checks", async () => {
  expect(await firstCells("troubleshooting", "| `why` | means, and what to do |")).toEqual([...TOKEN_PROBLEMS]);
});

test("the page on the API has every error class and every error detail", async () => {
  expect((await firstCells("api", "| `error_class` | means |")).toSorted()).toEqual(ERROR_CLASSES.toSorted());
  expect(await firstCells("api", "| `error_detail` | means |")).toEqual([...ERROR_DETAILS]);
});
