import { expect, test } from "bun:test";
import { jsonList } from "./json-list.ts";

interface Source extends AsyncIterable<number> {
  /** How many rows were asked for. */
  readonly asked: number;
  readonly isOver: boolean;
}

function rows(count: number, failsAt = -1): Source {
  const source = {
    asked: 0,
    isOver: false,
    async *[Symbol.asyncIterator]() {
      try {
        for (let i = 0; i < count; i++) {
          source.asked++;
          if (i === failsAt) throw new Error("the store is away");
          yield i;
        }
      } finally {
        source.isOver = true;
      }
    },
  };
  return source;
}

const asked = () => ({ tenant: "acme", request: new Request("http://localhost/") });

/** The answer with a list of what there is in `source`. */
function listed(
  source: AsyncIterable<number>,
  view: (row: number) => object,
  rest?: Readonly<Record<string, unknown>>,
): Promise<Response> {
  return jsonList(asked(), { name: "data", rows: () => source, view, ...(rest && { rest }) });
}

const small = (row: number) => ({ row, text: "…" });
const KIB = 1024;
const large = (row: number) => ({ row, text: "é".repeat(32 * KIB) });

test.each([0, 1, 100])("a short list of %d is sent whole, as its JSON would be", async (count) => {
  const response = await listed(rows(count), small, { total: count, limit: 20 });
  expect(response.headers.get("content-type")).toBe("application/json");
  const data = Array.from({ length: count }, (_, row) => small(row));
  expect(await response.text()).toBe(JSON.stringify({ data, total: count, limit: 20 }));
});

test("a list alone is sent as an object too", async () => {
  expect(await (await listed(rows(0), small)).text()).toBe('{"data":[]}');
});

test("of a long list no more is made than its caller takes", async () => {
  const source = rows(1_000);
  const response = await listed(source, large, { total: 1 });
  const begun = source.asked;
  expect(begun).toBeLessThan(30);
  const reader = response.body?.getReader() as ReadableStreamDefaultReader<Uint8Array>;
  await reader.read();
  for (let turns = 0; turns < 50; turns++) await new Promise((resolve) => setImmediate(resolve));
  expect(source.asked).toBe(begun);
  await reader.cancel();
  expect(source.isOver).toBe(true);

  const whole = await (await listed(rows(100), large, { total: 1 })).json();
  expect(whole).toEqual({ data: Array.from({ length: 100 }, (_, row) => large(row)), total: 1 });
});

test("a list that fails on the way never ends as if it were whole", async () => {
  await expect(listed(rows(10, 5), small)).rejects.toThrow("the store is away");
  const response = await listed(rows(1_000, 500), large);
  const broken = await response.text().catch((error: Error) => error.message);
  expect(broken).toBe("the store is away");
});

test("others have their turns while a long list is made", async () => {
  let turns = 0;
  let isDone = false;
  const turn = () => {
    turns++;
    if (!isDone) setImmediate(turn);
  };
  setImmediate(turn);
  const busy = (row: number) => {
    const until = performance.now() + 3;
    while (performance.now() < until);
    return { row };
  };
  await listed(rows(50), busy);
  isDone = true;
  expect(turns).toBeGreaterThanOrEqual(49);
});
