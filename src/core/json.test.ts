import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { invalidField } from "./fault.ts";
import { parseJson } from "./json.ts";

const bytes = (text: string) => new TextEncoder().encode(text);

describe("parseJson", () => {
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

  const refused: [string, string, string][] = [
    ["a key given twice", '{"a":1,"a":2}', "a: given twice"],
    ["a key given twice in another spelling", '{"a":1,"\\u0061":2}', "a: given twice"],
    ["a nested key given twice", '{"p":{"x":[{"y":1,"y":2}]}}', "y: given twice"],
    ["an infinite number", '{"n":1e999}', "n: a number that is too large to be kept exactly"],
    ["an integer beyond 2^53", '{"n":9007199254740993}', "n: a number that is too large to be kept exactly"],
    ["deep nesting", "[".repeat(70), "body: nested deeper than 64 levels"],
    ["a very deep body", "[".repeat(1_000_000), "body: nested deeper than 64 levels"],
    ["malformed text", '{"a":', "body: not valid JSON"],
    ["a trailing comma", '{"a":1,}', "body: not valid JSON"],
    ["an empty body", "", "body: not valid JSON"],
    ["an unclosed string", '{"a', "body: not valid JSON"],
    ["a lone closing brace", "}}}", "body: not valid JSON"],
    ["a bare minus sign", "-", "body: not valid JSON"],
  ];
  test.each(refused)("refuses %s", (_name, text, message) => {
    expect(() => parseJson(bytes(text))).toThrow(message);
  });

  test("refuses what is not UTF-8", () => {
    expect(() => parseJson(Uint8Array.of(0x22, 0xff, 0x22))).toThrow("body: not valid UTF-8");
  });

  test("names no field at length", () => {
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
    expect(() => parseJson(bytes('{"metadata":{},"metadata":{}}'), "metadata")).toThrow(
      "metadata: given twice",
    );
    expect(() => parseJson(bytes('{"x":{"metadata":{"a":1,"a":1}}}'), "metadata")).toThrow("a: given twice");
  });

  test("a colon or a comma inside a string is no structure", () => {
    expect(parseJson(bytes('{"a":"b\\",\\"a\\":1","c":"{[,"}'))).toEqual({ a: 'b","a":1', c: "{[," });
  });
});
