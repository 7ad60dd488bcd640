import { expect, test } from "bun:test";
import fc from "fast-check";
import { findTools, UnreadableAnswer, withoutTools } from "../../wire/tool-list.ts";
import { filterEvents } from "./tool-filter.ts";

const isDenied = (tool: string) => tool === "bad";
const LINE_END = /\r\n|\n|\r/;

interface PlainEvent {
  readonly data: string | null;
  readonly others: readonly string[];
}

/** The events of a stream as the standard tells them, with all lines at once. */
function eventsOf(stream: string): PlainEvent[] {
  const lines = `${stream.replace(/^\ufeff/, "")}\n\n`.split(LINE_END).map((line) => {
    const [, name = "", value = ""] = /^([^:]*):? ?(.*)$/su.exec(line) ?? [];
    return { isEmpty: line === "", name, value };
  });
  const events: PlainEvent[] = [];
  let event: typeof lines = [];
  for (const line of lines) {
    if (!line.isEmpty) event.push(line);
    else {
      const data = event.filter(({ name }) => name === "data").map(({ value }) => value);
      const others = event.filter(({ name }) => ["event", "id", "retry"].includes(name));
      if (data.length + others.length > 0) {
        events.push({
          data: data.length === 0 ? null : data.join("\n"),
          others: others.map(({ name, value }) => `${name}: ${value}`),
        });
      }
      event = [];
    }
  }
  return events;
}

function left({ data, others }: PlainEvent): PlainEvent {
  if (data === null || !data.includes("[")) return { data, others };
  const [text, found] = [Buffer.from(data), findTools(Buffer.from(data))];
  if (typeof found === "string") throw new UnreadableAnswer(found);
  const tools = found.flatMap((list) => list.tools);
  const denied = new Set(tools.filter(({ name }) => name !== null && isDenied(name)));
  return { data: Buffer.concat(withoutTools(text, found, denied, false)).toString(), others };
}

/** A stream in pieces as it passes, up to where it breaks off. */
async function filtered(given: string, sizes: readonly number[]) {
  async function* chunks() {
    const bytes = Buffer.from(given);
    let at = 0;
    for (const size of sizes) {
      yield bytes.subarray(at, at + size);
      at += size;
    }
    yield bytes.subarray(at);
  }
  const memory = { take: (bytes: number) => bytes, giveBack() {} };
  const { signal } = new AbortController();
  const filter = filterEvents({ isDenied, bytesMax: 10_000_000, memory, tenant: "acme", signal });
  let text = "";
  let turns = 0;
  const count = () => {
    turns++;
    turning = setImmediate(count);
  };
  let turning = setImmediate(count);
  try {
    for await (const piece of filter(chunks())) text += Buffer.from(piece).toString();
    return { text, turns, isWhole: true };
  } catch (error) {
    expect(error).toBeInstanceOf(UnreadableAnswer);
    return { text, turns, isWhole: false };
  } finally {
    clearImmediate(turning);
  }
}

const list = '{"result":{"tools":[{"name":"good"},{"name":"bad"},{"name":"ünï"}]}}';
const other = fc.constantFrom(" ", ":", ": comment", "id: 7", "id", "retry:5", "dat", "dataa: 1", "event: data:", "ü");
const others = fc.array(other, { maxLength: 3 });
/** Empty data is a line break of the JSON. */
const more = fc.array(fc.oneof({ weight: 9, arbitrary: other }, fc.constantFrom("data", "data:", "data: x")), {
  maxLength: 3,
});
const end = fc.constantFrom("\n", "\r", "\r\n");
/** The list in several lines of data, and other lines before, between and behind them. */
const event = fc
  .tuple(
    others,
    fc.array(fc.tuple(fc.constantFrom("data:", "data: "), others), { minLength: 1, maxLength: 5 }),
    more,
    fc.infiniteStream(end),
  )
  .map(([before, parts, after, ends]) => {
    // Between its parts JSON may have line breaks.
    const pieces = list.split(/(?=,)/);
    const size = Math.ceil(pieces.length / parts.length);
    const data = parts.flatMap(([name, between], at) => {
      const piece = pieces.slice(at * size, (at + 1) * size).join("");
      return [name + piece, ...between];
    });
    return [...before, ...data, ...after, ""].map((line) => line + ends.next().value).join("");
  });
const stream = fc
  .tuple(fc.constantFrom("", "\ufeff"), fc.array(event, { maxLength: 3 }))
  .map(([bom, all]) => bom + all.join(""));

test("the events of a stream pass as by the plain rule, whatever they hold and however they are cut", async () => {
  const outcomes = new Set<boolean>();
  await fc.assert(
    fc.asyncProperty(stream, fc.array(fc.integer({ min: 1, max: 60 }), { maxLength: 5 }), async (given, sizes) => {
      const expected: PlainEvent[] = [];
      let isReadable = true;
      for (const each of eventsOf(given)) {
        try {
          expected.push(left(each));
        } catch {
          isReadable = false;
          break;
        }
      }
      const passed = await filtered(given, sizes);
      expect([eventsOf(passed.text), passed.isWhole]).toEqual([expected, isReadable]);
      outcomes.add(isReadable);
    }),
    { numRuns: 2_000 },
  );
  expect(outcomes.size).toBe(2);
});

test("long events let others have the event loop", async () => {
  const [lines, data] = ["x\n".repeat(1_000_000), `data: {"a":[1,\n${"data: 1,\n".repeat(200_000)}data: 1]}\n\n`];
  for (const given of [`${lines}data: 1\n\n`, data]) {
    const { isWhole, turns } = await filtered(given, []);
    expect(isWhole).toBe(true);
    expect(turns).toBeGreaterThan(2);
  }
});
