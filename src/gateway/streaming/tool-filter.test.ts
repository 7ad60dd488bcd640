import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { silentLog } from "../../core/log.ts";
import { startCompute } from "../../kernel/compute.ts";
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

test("events that come together go on together", async () => {
  const given = "data: 1\n\n".repeat(3_000);
  const pieces = await pass(filterEvents(options({ memory: memoryOf(100_000) })), `${given}data: `, [10, 20_000]);
  expect(pieces.join("")).toBe(`${given}data: \n\n`);
  expect(pieces.length).toBeLessThanOrEqual(6);
});

describe("a JSON body", () => {
  test("loses the denied tools, whatever pieces it comes in", async () => {
    const given = list("good", "bad", "ünï");
    await fc.assert(
      fc.asyncProperty(fc.array(fc.integer({ min: 1, max: 20 })), async (sizes) => {
        const memory = memoryOf(10_000);
        expect((await pass(filterJson(options({ memory })), given, sizes)).join("")).toBe(list("good", "ünï"));
        expect(memory.left).toBe(10_000);
      }),
    );
  });

  test("loses them with a byte order mark too", async () => {
    expect(await pass(filterJson(options()), `\ufeff${list("bad")}`)).toEqual([list()]);
    expect(await pass(filterJson(options()), `\ufeff${list("good")}`)).toEqual([list("good")]);
  });

  test("does not pass when it is too long, and leaves no memory taken", async () => {
    const memory = memoryOf(10_000);
    const long = pass(filterJson(options({ bytesMax: 50, memory })), list("good", "better", "best"));
    expect(await long.catch((error) => error)).toBeInstanceOf(UnreadableAnswer);
    expect(memory.left).toBe(10_000);
    const scarce = pass(filterJson(options({ memory: memoryOf(10) })), list("good"));
    expect(await scarce.catch((error) => error)).toBeInstanceOf(UnreadableAnswer);
  });
});

/** A thread as the product's, and when it is given work. */
function workerThat(isGiven: () => void): Worker {
  const worker = new Worker(new URL("../../compute/worker.ts", import.meta.url).href);
  const post = worker.postMessage.bind(worker) as (...message: unknown[]) => void;
  worker.postMessage = (...message: unknown[]) => {
    post(...message);
    isGiven();
  };
  return worker;
}

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
  ])("goes on bit by bit, and leaves no memory taken: %s", async (_, create, given, expected) => {
    const all = roomy();
    const pieces = await pass(create(all), given, Array(2_000).fill(1_000));
    expect(pieces.join("")).toBe(expected);
    expect(Math.max(...pieces.map((piece) => piece.length))).toBeLessThanOrEqual(131_072);
    expect(all.memory.left).toBe(10_000_000);
  });

  test.each<[string, (given: ReturnType<typeof roomy>) => ReturnType<typeof filterJson>, string, string]>([
    ["JSON", filterJson, long, left],
    ["an event", filterEvents, `id: 7\ndata: ${long}\n\n`, `id: 7\ndata: ${left}\n\n`],
    ["an event of many lines", filterEvents, `data: {"a":[\n${"data: 1,\n".repeat(60_000)}data: 1]}\n\n`, ""],
  ])("is read on another thread, and leaves no memory taken: %s", async (_, create, given, expected) => {
    let onWork = () => {};
    const stop = startCompute({ log: silentLog, spawn: () => workerThat(() => onWork()) });
    try {
      const all = roomy();
      expect((await pass(create(all), given, Array(20).fill(100_000))).join("")).toBe(expected || given);
      expect(all.memory.left).toBe(10_000_000);
      const ending = new AbortController();
      const leaving = roomy(ending.signal);
      const ended = pass(create(leaving), given).catch((reason) => reason);
      onWork = () => ending.abort("gone");
      expect(await ended).toBe("gone");
      expect(leaving.memory.left).toBe(10_000_000);
    } finally {
      stop();
    }
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

  test("loses the denied tools, and no other fields, whatever pieces and line ends it has", async () => {
    const ends = fc.constantFrom("\n", "\r", "\r\n");
    await fc.assert(
      fc.asyncProperty(ends, fc.array(fc.integer({ min: 1, max: 30 })), async (end, sizes) => {
        const event = (...names: string[]) => `id: 8\ndata: ${list(...names)}\n\n`;
        const answer = (first: string, ...names: string[]) =>
          `${first}${PROGRESS}retry: 5\n\n${event(...names)}${PROGRESS}`;
        const given = answer(": hello\n\n", "good", "bad").replaceAll("\n", end);
        // Each line ends as all clients take it.
        expect((await pass(filterEvents(options()), given, sizes)).join("")).toBe(answer(":\n", "good"));
      }),
    );
  });

  test("passes each event as soon as it is whole", async () => {
    const plain = "data: 1\n\n";
    for (const end of ["\n", "\r", "\r\n"]) {
      const event = `data: 1${end}${end}`;
      expect(await pass(filterEvents(options()), event.repeat(2), [event.length])).toEqual([plain, plain]);
    }
    // The line feed of a carriage return that came before it.
    expect(await pass(filterEvents(options()), "data: 1\r\n\r\n", [10])).toEqual([plain]);
  });

  test("may have its data in several lines, fields in any order, and no blank line at its end", async () => {
    const start = '{"jsonrpc":"2.0",';
    const rest = (...names: string[]) => list(...names).slice(start.length);
    const given = `data:${start}\nid: 1\ndata: ${rest("good", "bad")}\n`;
    const left = `id: 1\ndata: ${start}\ndata: ${rest("good")}\n\n`;
    expect(await pass(filterEvents(options()), given)).toEqual([left]);
  });

  test("is filtered with a byte order mark too", async () => {
    expect((await pass(filterEvents(options()), `\ufeffdata: ${list("bad")}\n\n`)).join("")).not.toContain("bad");
  });

  /** What clients read, by where they end lines and which byte order marks they take away. */
  const CLIENTS = [/\r\n|\n|\r/, /\n/, /\r?\n/, /\r\n|[\n\r\v\f\x85\u2028\u2029]/].flatMap((ends) =>
    [/^\ufeff/, /(^|(?<=\n))\ufeff/g].map((mark) => (text: string) => {
      const read: string[] = [];
      let data: string[] = [];
      for (const line of [...text.replace(mark, "").split(ends), ""]) {
        if (line === "") {
          read.push(data.join("\n"));
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(5));
      }
      return read;
    }),
  );

  function showsDenied(data: string): boolean {
    try {
      return JSON.parse(data).result.tools.some((tool: { name: string }) => tool.name === "bad");
    } catch {
      return false;
    }
  }

  const shown = (text: string) => CLIENTS.some((read) => read(text).some(showsDenied));
  const HIDDEN = [
    'data: 1\n\n\ufeffdata:x\ndata: {"result":{"tools":[{"name":"bad"}]}}\n\n',
    'data:\r{"result":{"tools":[{"name":"bad"}]}}\n\n',
    'data: {"result":{"tools":\r\r[{"name":"bad"}]}}\n\n',
    'event: a\x0bdata: {"result":{"tools":[{"name":"bad"}]}}\n\n',
    'data:\u2028data: {"result":{"tools":[{"name":"bad"}]}}\n\n',
    'data:\u2028y\ndata: {"result":{"tools":[{"name":"bad"}]}}\n\n',
  ];

  async function passed(given: string, sizes?: number[]): Promise<string> {
    const seen: string[] = [];
    try {
      for await (const piece of filterEvents(options())(chunksOf(encoder.encode(given), sizes)))
        seen.push(Buffer.from(piece).toString());
    } catch (error) {
      expect(error).toBeInstanceOf(UnreadableAnswer);
    }
    return seen.join("");
  }

  test.each(HIDDEN)("shows no client a denied tool, wherever it ends lines: %j", async (given) => {
    expect(shown(given)).toBe(true);
    expect(shown(await passed(given))).toBe(false);
  });

  test("shows no client a denied tool, however its parts are put together", async () => {
    const parts = fc.constantFrom(
      ...["data:", "data: ", "event: a", "\n", "\n\n", "\r", "\r\n", "\u2028", "\x0b", "\x85", "\ufeff", "x", " "],
      ...['{"result":{"tools":', '[{"name":"bad"}]}}', '{"result":{"tools":[{"name":"bad"}]}}', '{"a":"', '"}'],
    );
    await fc.assert(
      fc.asyncProperty(
        fc.array(parts, { minLength: 2, maxLength: 14 }),
        fc.array(fc.integer({ min: 1, max: 20 })),
        async (given, sizes) => expect(shown(await passed(given.join(""), sizes))).toBe(false),
      ),
      { numRuns: 5_000 },
    );
  });

  test("breaks off at an event that is too long, after those before it", async () => {
    const memory = memoryOf(10_000);
    const filter = filterEvents(options({ bytesMax: 100, memory }));
    const seen: string[] = [];
    const given = encoder.encode(`data: 1\n\ndata: ${"x".repeat(200)}\n\n`);
    const read = async () => {
      for await (const piece of filter(chunksOf(given, [9, 50, 60]))) seen.push(Buffer.from(piece).toString());
    };
    expect(await read().catch((error) => error)).toBeInstanceOf(UnreadableAnswer);
    expect([seen, memory.left]).toEqual([["data: 1\n\n"], 10_000]);
  });
});
