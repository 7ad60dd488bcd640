import { expect, test } from "bun:test";
import fc from "fast-check";
import { atOnce, createPace } from "../../kernel/turns.ts";
import { UnreadableAnswer, withoutTools } from "../../wire/tool-list.ts";
import { rewritten } from "./tool-filter.ts";

const isDenied = (tool: string) => tool === "bad";
const reserve = () => {};

const LINE_END = /\r\n|\n|\r/;
const isData = (line: string) => line === "data" || line.startsWith("data:");
const dataOf = (line: string) => line.slice("data:".length).replace(/^ /, "");

/** As the standard tells it, with all lines at once. */
function plain(event: string): string {
  const lines = event.replace(/^\ufeff/, "").split(LINE_END);
  const data = lines.filter(isData).map(dataOf).join("\n");
  if (!lines.some(isData)) return event;
  const left = Buffer.from(atOnce(withoutTools(Buffer.from(data), isDenied))).toString();
  if (left === data) return event;
  const others = lines.filter((line) => line !== "" && !isData(line));
  return [...others, ...left.split("\n").map((line) => `data: ${line}`), "", ""].join("\n");
}

const list = '{"result":{"tools":[{"name":"good"},{"name":"bad"},{"name":"ünï"}]}}';
const other = fc.constantFrom("", " ", ":", ": comment", "id: 7", "dat", "dataa: 1", "event: data:", "ü");
const others = fc.array(other, { maxLength: 3 });
/** Empty data is a line break of the JSON. */
const more = fc.array(fc.oneof({ weight: 9, arbitrary: other }, fc.constantFrom("data", "data:", "data: x")), {
  maxLength: 3,
});
const end = fc.constantFrom("\n", "\r", "\r\n");
/** The list in several lines of data, and other lines before, between and behind them. */
const event = fc
  .tuple(
    fc.constantFrom("", "\ufeff"),
    others,
    fc.array(fc.tuple(fc.constantFrom("data:", "data: "), others), { minLength: 1, maxLength: 5 }),
    more,
    fc.infiniteStream(end),
  )
  .map(([bom, before, parts, after, ends]) => {
    // Between its parts JSON may have line breaks.
    const pieces = list.split(/(?=,)/);
    const size = Math.ceil(pieces.length / parts.length);
    const data = parts.flatMap(([name, between], at) => {
      const piece = pieces.slice(at * size, (at + 1) * size).join("");
      return [name + piece, ...between];
    });
    return bom + [...before, ...data, ...after].map((line) => line + ends.next().value).join("");
  });

test("an event is rewritten as by the plain rule, whatever it holds", () => {
  const outcomes = new Set<string>();
  fc.assert(
    fc.property(event, (given) => {
      const got = () => {
        const bytes = Buffer.from(given);
        const left = atOnce(rewritten(bytes, { isDenied, reserve, isFirst: true }, createPace()));
        return left === bytes ? given : Buffer.from(left).toString();
      };
      const run = (work: () => string) => {
        try {
          return work();
        } catch (error) {
          expect(error).toBeInstanceOf(UnreadableAnswer);
          return "unreadable";
        }
      };
      const expected = run(() => plain(given));
      expect(run(got)).toBe(expected);
      outcomes.add(expected === "unreadable" ? expected : "other");
    }),
    { numRuns: 3_000 },
  );
  expect([...outcomes].sort()).toEqual(["other", "unreadable"]);
});

test("memory for what is held beside an event is reserved before", () => {
  const reserved = (given: string) => {
    let bytes = 0;
    const count = (more: number) => {
      bytes += more;
    };
    atOnce(rewritten(Buffer.from(given), { isDenied, reserve: count, isFirst: true }, createPace()));
    return bytes;
  };
  expect(reserved('data: {"result":{"tools":[{"name":"good"}]}}\n\n')).toBe(0);
  expect(reserved(`data: ${list}\n\n`)).toBe(Buffer.byteLength(plain(`data: ${list}\n\n`)));
  expect(reserved('data: {"a":\ndata: 1}\n\n')).toBe('{"a":\n1}\n'.length);
});

test("a step of the filter looks at its share of lines and no more", () => {
  const given = Buffer.from(`${"x\n".repeat(100_000)}data: 1\n\n`);
  let steps = 0;
  for (const work = rewritten(given, { isDenied, reserve, isFirst: true }, createPace()); !work.next().done; ) steps++;
  expect(steps).toBeGreaterThan(30);
});
