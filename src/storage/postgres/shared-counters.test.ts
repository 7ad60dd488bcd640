// Statements that replicas count with: whole messages, which leave nothing behind on a connection.
import { expect, test } from "bun:test";
import { SQL } from "bun";
import fc from "fast-check";
import { eachPostgres } from "../../../test/support/stores/postgres-kinds.ts";
import { clock, outcome, postgresPlace } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import { inputRows, type SharedCounter } from "../store.ts";
import { openPostgres } from "./store.ts";

const INPUT = inputRows<string>({ text: ["text", (text) => text] });

/** Gives each text back; one that begins with `/` is divided by. */
const echo: SharedCounter<string, string> = {
  name: "echo",
  kind: "counter",
  tenantOf: (text) => text.slice(0, 1),
  bytesOf: () => 1,
  postgres: {
    text: `select text, case when left(text, 1) = '/' then 1 / (length(text) - length(text)) end from ${INPUT.source} order by n`,
    valuesOf: INPUT.values,
    outputsOf: (_, rows) => rows.map((row) => String(row["text"])),
  },
};

eachPostgres((kind) => {
  test("texts arrive as they are, and one that fails does so alone", async () => {
    const store = await (await postgresPlace(await kind.freshDatabase())).open();
    const execute = store.execute;
    const text = fc.oneof(
      fc.constantFrom("", "'", "\\", "\\'", "''", "$1", "$&", "{}", "null", '"', "--", " /*", "é\u{1f600}"),
      fc.string({ unit: "grapheme" }).map((any) => any.replaceAll("\0", "").replace(/^\/+/, "")),
    );
    await fc.assert(
      fc.asyncProperty(fc.array(text, { minLength: 1, maxLength: 20 }), async (texts) => {
        expect(await Promise.all(texts.map((one) => execute(echo, one)))).toEqual(texts);
      }),
      { numRuns: 30 },
    );
    const told = await Promise.all(["a", "/", "b", "c"].map((one) => execute(echo, one).catch(() => "failed")));
    expect(told).toEqual(["a", "failed", "b", "c"]);
    await store.close();
  });
});

test("a statement that waits for a lock is given up in time, and the next one is right", async () => {
  const place = await postgresPlace();
  const store = await openPostgres({ databaseUrl: place.url, clock, log: silentLog, callMsMax: 400 });
  await using client = new SQL(place.url, { max: 1 });
  const count = {
    ...echo,
    postgres: { ...echo.postgres, text: `with l as (select 1 from agent_buckets) ${echo.postgres.text}` },
  };
  const ask = () => outcome(store.execute(count, "a"));
  await client.begin(async (tx) => {
    await tx.unsafe("lock table agent_buckets");
    expect(await ask()).toBe("unavailable");
  });
  expect(await ask()).toBe("stored");
  await store.close();
});

test("of thousands that wait a neighbour does not wait for those of another tenant", async () => {
  const store = await (await postgresPlace()).open();
  const execute = store.execute;
  let counted = 0;
  const hostile = Array.from({ length: 5_000 }, (_, at) => execute(echo, `h${at}`).then(() => counted++));
  expect(await execute(echo, "neighbour")).toBe("neighbour");
  // One statement may have been under way.
  expect(counted).toBeLessThanOrEqual(512);
  await Promise.all(hostile);
  expect(counted).toBe(hostile.length);
  await store.close();
});
