import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { UnreadableAnswer } from "../../wire/tool-list.ts";
import { type FilterOptions, filterEvents, filterJson } from "./tool-filter.ts";

const encoder = new TextEncoder();
const memoryOf = (left: number) => ({
  left,
  take(bytes: number): number {
    const taken = Math.min(bytes, this.left);
    this.left -= taken;
    return taken;
  },
  giveBack(bytes: number): void {
    this.left += bytes;
  },
});
const options = (fields: Partial<FilterOptions> = {}): FilterOptions => ({
  isDenied: (tool) => tool === "bad",
  bytesMax: 1000,
  memory: memoryOf(10_000),
  tenant: "acme",
  signal: new AbortController().signal,
  ...fields,
});
const list = (...names: string[]) =>
  JSON.stringify({ jsonrpc: "2.0", id: 1, result: { tools: names.map((name) => ({ name })) } });

async function* chunksOf(bytes: Uint8Array, sizes: readonly number[] = []) {
  let at = 0;
  for (const size of sizes) {
    if (at >= bytes.length) return;
    yield bytes.slice(at, at + size);
    at += size;
  }
  if (at < bytes.length) yield bytes.slice(at);
}

async function pass(filter: ReturnType<typeof filterEvents>, given: string, sizes: readonly number[] = []) {
  const pieces: string[] = [];
  for await (const piece of filter(chunksOf(encoder.encode(given), sizes))) {
    pieces.push(Buffer.from(piece).toString());
  }
  return pieces;
}

test("events that come together go on together, whatever is denied", async () => {
  const given = "data: 1\n\n".repeat(3_000);
  for (const isDenied of [null, () => true]) {
    const filter = filterEvents({ ...options(), isDenied });
    const pieces = await pass(filter, `${given}data: `, [10, 20_000]);
    expect(pieces.join("")).toBe(`${given}data: `);
    expect(pieces.length).toBeLessThanOrEqual(6);
  }
});

describe("a JSON body", () => {
  test("loses what is denied, whatever pieces it comes in", async () => {
    const given = list("good", "bad", "ünï");
    await fc.assert(
      fc.asyncProperty(fc.array(fc.integer({ min: 1, max: 20 })), async (sizes) => {
        const memory = memoryOf(10_000);
        expect((await pass(filterJson(options({ memory })), given, sizes)).join("")).toBe(
          list("good", "ünï"),
        );
        expect(memory.left).toBe(10_000);
      }),
    );
  });

  test("with a byte order mark does too", async () => {
    expect(await pass(filterJson(options()), `\ufeff${list("bad")}`)).toEqual([list()]);
    expect(await pass(filterJson(options()), `\ufeff${list("good")}`)).toEqual([`\ufeff${list("good")}`]);
  });

  test("that is too long does not pass, and leaves no memory taken", async () => {
    const memory = memoryOf(10_000);
    const long = pass(filterJson(options({ bytesMax: 50, memory })), list("good", "better", "best"));
    expect(await long.catch((error) => error)).toBeInstanceOf(UnreadableAnswer);
    expect(memory.left).toBe(10_000);
    const scarce = pass(filterJson(options({ memory: memoryOf(10) })), list("good"));
    expect(await scarce.catch((error) => error)).toBeInstanceOf(UnreadableAnswer);
  });
});

describe("a long answer", () => {
  const long = list("good", "bad", "x".repeat(1_000_000));
  const left = list("good", "x".repeat(1_000_000));
  const roomy = (signal = new AbortController().signal) => {
    const memory = memoryOf(10_000_000);
    return { ...options({ bytesMax: 2_000_000, memory }), memory, signal };
  };

  test.each<[string, (given: ReturnType<typeof roomy>) => ReturnType<typeof filterJson>, string, string]>([
    ["JSON", filterJson, long, left],
    ["an event", filterEvents, `data: ${long}\n\n`, `data: ${left}\n\n`],
    [
      "an event of which nothing is denied",
      (given) => filterEvents({ ...given, isDenied: null }),
      `${long}\n\n`,
      `${long}\n\n`,
    ],
  ])("goes on bit by bit, and leaves no memory taken: %s", async (_, create, given, expected) => {
    const all = roomy();
    const pieces = await pass(create(all), given, Array(2_000).fill(1_000));
    expect(pieces.join("")).toBe(expected);
    expect(Math.max(...pieces.map((piece) => piece.length))).toBeLessThanOrEqual(131_072);
    expect(all.memory.left).toBe(10_000_000);
  });

  test("ends with its exchange, in the middle of the work", async () => {
    const ending = new AbortController();
    const all = roomy(ending.signal);
    let asked = 0;
    const isDenied = () => {
      if (++asked === 1) ending.abort(new Error("gone"));
      return false;
    };
    const names = Array(5_000).fill("a");
    for (const [filter, given] of [
      [filterJson({ ...all, isDenied }), list(...names)],
      [filterEvents({ ...all, isDenied }), `data: ${list(...names)}\n\n`],
    ] as const) {
      expect(await pass(filter, given).catch(({ message }) => message)).toBe("gone");
      expect(asked).toBeLessThan(1_000);
      expect(all.memory.left).toBe(10_000_000);
    }
  });
});

describe("an event stream", () => {
  const PROGRESS = 'event: message\nid: 7\ndata: {"method":"notifications/progress"}\n\n';

  test("loses what is denied, and nothing else, whatever pieces and line ends it has", async () => {
    const ends = fc.constantFrom("\n", "\r", "\r\n");
    await fc.assert(
      fc.asyncProperty(ends, fc.array(fc.integer({ min: 1, max: 30 })), async (end, sizes) => {
        const lines = (text: string) => text.replaceAll("\n", end);
        const before = lines(`: hello\n\n${PROGRESS}retry: 5\n\n`);
        const given = `${before}${lines(`id: 8\ndata: ${list("good", "bad")}\n\n`)}${lines(PROGRESS)}`;
        const got = (await pass(filterEvents(options()), given, sizes)).join("");
        const [start, rest] = [got.slice(0, before.length), got.slice(before.length)];
        expect(start).toBe(before);
        // The line feed of a carriage return that ended the changed event is one empty line more.
        expect(
          rest
            .replaceAll(/\r\n|\r/g, "\n")
            .replace("\n\n\n", "\n\n")
            .trim(),
        ).toBe(`id: 8\ndata: ${list("good")}\n\n${PROGRESS}`.trim());
      }),
    );
  });

  test("of which nothing is denied passes event by event too, whatever is in them", async () => {
    const event = 'data: {"result":{"tools":[{"name":"bad"},NaN]}}\n\n';
    const all = filterEvents({ ...options(), isDenied: null });
    expect(await pass(all, event.repeat(2), [5, 5])).toEqual([event, event]);
  });

  test("passes each event as soon as it is whole", async () => {
    for (const end of ["\n", "\r", "\r\n"]) {
      const event = `data: 1${end}${end}`;
      expect(await pass(filterEvents(options()), event.repeat(2), [event.length])).toEqual([event, event]);
    }
    // The line feed of a carriage return that came before it.
    expect(await pass(filterEvents(options()), "data: 1\r\n\r\n", [10])).toEqual(["data: 1\r\n\r", "\n"]);
  });

  test("may have its data in several lines, fields in any order, and no blank line at its end", async () => {
    const start = '{"jsonrpc":"2.0",';
    const rest = (...names: string[]) => list(...names).slice(start.length);
    const given = `data:${start}\nid: 1\ndata: ${rest("good", "bad")}\n`;
    const left = `id: 1\ndata: ${start}\ndata: ${rest("good")}\n\n`;
    expect(await pass(filterEvents(options()), given)).toEqual([left]);
  });

  test("with a byte order mark is no way around", async () => {
    expect((await pass(filterEvents(options()), `\ufeffdata: ${list("bad")}\n\n`)).join("")).not.toContain(
      "bad",
    );
  });

  test("with an event that is too long breaks off, after those before it", async () => {
    const memory = memoryOf(10_000);
    const filter = filterEvents(options({ bytesMax: 100, memory }));
    const seen: string[] = [];
    const given = encoder.encode(`data: 1\n\ndata: ${"x".repeat(200)}\n\n`);
    const read = async () => {
      for await (const piece of filter(chunksOf(given, [9, 50, 60])))
        seen.push(Buffer.from(piece).toString());
    };
    expect(await read().catch((error) => error)).toBeInstanceOf(UnreadableAnswer);
    expect([seen, memory.left]).toEqual([["data: 1\n\n"], 10_000]);
  });
});
