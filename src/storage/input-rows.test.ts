// What commands hand to Postgres arrives there as it was.
import { expect, test } from "bun:test";
import fc from "fast-check";
import { startPostgres } from "../../test/support/stores/postgres.ts";
import { postgresClient } from "./postgres/pool.ts";
import { inputRows } from "./store.ts";

interface Input {
  readonly text: string | null;
  readonly number: number | null;
  readonly flag: boolean | null;
  readonly bytes: Uint8Array | null;
}

const INPUT = inputRows<Input>({
  place: ["bigint", () => 0],
  text: ["text", ({ text }) => text],
  number: ["bigint", ({ number }) => number],
  flag: ["boolean", ({ flag }) => flag],
  bytes: ["bytea", ({ bytes }) => bytes],
});

/** Postgres knows no character 0. */
const ODD = ["", "null", "NULL", " ", "{}", '"', "\\", "a,b", "\n", "\\x00", "é\u{1f600}", "{a}", "\u00a0", "\u0001"];
const text = fc.oneof(
  fc.constantFrom(...ODD),
  fc.string({ unit: "grapheme" }).map((any) => any.replaceAll("\0", "")),
);
const inputs = fc.array(
  fc.record({
    text: fc.option(text),
    number: fc.option(fc.maxSafeInteger()),
    flag: fc.option(fc.boolean()),
    bytes: fc.option(fc.uint8Array({ maxLength: 40 })),
  }),
  { minLength: 1, maxLength: 20 },
);

test("rows of commands arrive as they were, whatever stands in them, and columns without any value too", async () => {
  await using client = postgresClient(await (await startPostgres()).freshDatabase());
  const statement = `select text, number, flag, bytes from ${INPUT.source} order by n`;
  await fc.assert(
    fc.asyncProperty(inputs, async (given) => {
      const rows = await client.unsafe(statement, INPUT.values(given)).values();
      const expected = given.map(({ text, number, flag, bytes }) => [
        text,
        number === null ? null : String(number),
        flag,
        bytes === null ? null : Buffer.from(bytes),
      ]);
      expect([...rows]).toEqual(expected);
    }),
    { numRuns: 200 },
  );
});
