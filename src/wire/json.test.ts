import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { invalidField } from "../core/fault.ts";
import { parseJson, readJson } from "./json.ts";

const same = (value: unknown) => value;

const bytes = (text: string) => new TextEncoder().encode(text);
const keys = (count: number) => `{"x":{${Array.from({ length: count }, (_, at) => `"k${at}":1`).join()}}}`;

function outcomeOf(parse: () => unknown): { readonly value: unknown; readonly problem: string | null } {
  try {
    return { value: parse(), problem: null };
  } catch (error) {
    return { value: undefined, problem: (error as Error).message };
  }
}

describe("the JSON parser", () => {
  test("gives what JSON.parse gives for any JSON value with keepable numbers", () => {
    fc.assert(
      fc.property(fc.jsonValue({ maxDepth: 8 }), (value) => {
        const text = JSON.stringify(value);
        const lost = JSON.stringify(value).match(/\d{16,}|e\+?\d{2,}/i) !== null;
        fc.pre(!lost);
        expect(parseJson(bytes(text))).toEqual(JSON.parse(text));
      }),
    );
  });

  test("agrees with JSON.parse on what is JSON, after one character was damaged", () => {
    const damaged = fc
      .tuple(fc.jsonValue({ maxDepth: 4 }), fc.nat(), fc.constantFrom(...'{}[]",:\\ux01-.eE+ \n\u0001tfn'))
      .map(([value, place, by]) => {
        const text = JSON.stringify({ value, "kéy\n": ["\u2028", true, null] });
        const at = place % text.length;
        return text.slice(0, at) + by + text.slice(at + 1);
      })
      .filter((text) => text.isWellFormed());
    fc.assert(
      fc.property(damaged, (text) => {
        const [own, plain] = [outcomeOf(() => parseJson(bytes(text))), outcomeOf(() => JSON.parse(text))];
        if (own.problem === null || own.problem.startsWith("body: not valid JSON")) {
          expect([own.problem === null, own.value]).toEqual([plain.problem === null, plain.value]);
        } else expect(own.problem).toMatch(/given twice$|kept exactly$/);
      }),
      { numRuns: 2000 },
    );
  });

  test("takes a key that names the prototype for an ordinary key", () => {
    const value = parseJson(bytes('{"__proto__":{"a":1},"constructor":2}')) as object;
    expect(Object.entries(value)).toEqual([
      ["__proto__", { a: 1 }],
      ["constructor", 2],
    ]);
    expect(Object.getPrototypeOf(value)).toBe(Object.prototype);
  });

  test("a long text is read and refused as a short one is", async () => {
    const long = (text: string) => bytes(`${" ".repeat(70_000)}${text}`);
    for (const text of ['{"a":[1e3,-0,"\\ud800"],"__proto__":{"b":null}}', '{"f":{"a":1,"b":2,"a":3}}', "[0.1]"]) {
      expect(await readJson(long(text), "f", "t", same)).toEqual(parseJson(bytes(text), "f"));
    }
    for (const text of ['{"a":1,"a":2}', "[9007199254740993]", "["]) {
      const { problem } = outcomeOf(() => parseJson(long(text), "f"));
      expect(await readJson(long(text), "f", "t", same).catch(({ message }) => message)).toBe(problem);
    }
  });

  const refused: [string, string, string][] = [
    ["a key given twice", '{"a":1,"a":2}', "a: given twice"],
    ["a key given twice in another spelling", '{"a":1,"\\u0061":2}', "a: given twice"],
    ["a nested key given twice", '{"p":{"x":[{"y":1,"y":2}]}}', "y: given twice"],
    ["an infinite number", '{"n":1e999}', "n: a number that is too large to be kept exactly"],
    ["an integer beyond 2^53", '{"n":9007199254740993}', "n: a number that is too large to be kept exactly"],
    ["deep nesting", "[".repeat(70), "body: nested deeper than 64 levels"],
    ["a very deep body", "[".repeat(1_000_000), "body: nested deeper than 64 levels"],
    ["more keys than any object may have", keys(4097), "k4096: the object has more than 4096 keys"],
    [
      "more objects than any request needs",
      `{"x":[${Array(3)
        .fill(`[${"{},".repeat(6_999)}{}]`)
        .join()}]}`,
      "body: more than 20000 objects",
    ],
    [
      "more items than any list may have, by the field that holds it",
      `{"m":{"x":[${"1,".repeat(8192)}1]}}`,
      "m: the list has more than 8192 items",
    ],
    ["more items than any list may have", `{"x":[${"1,".repeat(8192)}1]}`, "x: the list has more than 8192 items"],
    ["malformed text", '{"a":', "body: not valid JSON at line 1, character 6"],
    ["a trailing comma", '{"a":1,}', "body: not valid JSON at line 1, character 8"],
    ["an empty body", "", "body: not valid JSON, since it is empty"],
    ["a mistake in a later line", '{\n  "a": 1\n  "b": 2\n}', "body: not valid JSON at line 3, character 3"],
    ["an unclosed string", '{"a', "body: not valid JSON at line 1, character 2"],
    ["a lone closing brace", "}}}", "body: not valid JSON at line 1, character 1"],
    ["a bare minus sign", "-", "body: not valid JSON at line 1, character 1"],
  ];
  test.each(refused)("refuses %s", (_name, text, message) => {
    expect(() => parseJson(bytes(text))).toThrow(message);
  });

  test("refuses what is not UTF-8", () => {
    expect(() => parseJson(Uint8Array.of(0x22, 0xff, 0x22))).toThrow("body: not valid UTF-8");
  });

  test("names no long field in a message", () => {
    const key = `${"k".repeat(99)}\u{1f511}${"k".repeat(5000)}`;
    const shown = `${"k".repeat(99)}\ufffd…`;
    const cases = {
      [`{"${key}":1,"${key}":1}`]: "given twice",
      [`{"${key}":1e999}`]: "a number that is too large",
    };
    for (const [json, problem] of Object.entries(cases)) {
      expect(() => parseJson(Buffer.from(json))).toThrow(`${shown}: ${problem}`);
    }
    expect(invalidField(key, "unknown field").message).toBe(`${shown}: unknown field`);
  });

  test("lets equal keys pass below the free field only", () => {
    expect(parseJson(bytes('{"metadata":{"a":1,"a":{"b":1,"b":2}}}'), "metadata")).toEqual({
      metadata: { a: { b: 2 } },
    });
    expect(() => parseJson(bytes('{"metadata":{},"metadata":{}}'), "metadata")).toThrow("metadata: given twice");
    expect(() => parseJson(bytes('{"x":{"metadata":{"a":1,"a":1}}}'), "metadata")).toThrow("a: given twice");
    const many = (lists: number) => bytes(`{"metadata":{"x":[${`[${"1,".repeat(8190)}1],`.repeat(lists)}1]}}`);
    expect(parseJson(many(1), "metadata")).toHaveProperty("metadata.x.1", 1);
    expect(() => parseJson(many(3), "metadata")).toThrow("metadata: more than 16384 values");
    expect(parseJson(many(3))).toHaveProperty("metadata.x.3", 1);
    const same = `{"metadata":{${'"a":1,'.repeat(5000)}"b":2}}`;
    expect(parseJson(bytes(same), "metadata")).toEqual({ metadata: { a: 1, b: 2 } });
    expect(Object.keys(parseJson(bytes(keys(4096))) as object)).toEqual(["x"]);
  });

  test("takes no colon or comma inside a string for structure", () => {
    expect(parseJson(bytes('{"a":"b\\",\\"a\\":1","c":"{[,"}'))).toEqual({ a: 'b","a":1', c: "{[," });
  });
});

test("of many texts that come in one moment a few milliseconds' worth are read in a turn", async () => {
  const TEXTS = 300;
  let used = 0;
  const use = () => {
    used++;
    for (const until = performance.now() + 1; performance.now() < until; );
  };
  const all = Array.from({ length: TEXTS }, () => readJson(bytes("{}"), null, "t", use));
  let most = used;
  for (let before = used; used < TEXTS; before = used) {
    await new Promise((resolve) => setImmediate(resolve));
    most = Math.max(most, used - before);
  }
  await Promise.all(all);
  expect(most).toBeLessThanOrEqual(16);
});
