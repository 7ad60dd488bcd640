import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { JSON_DEPTH_MAX } from "./limits.ts";
import { outlineObject, skipSpace } from "./scan.ts";

const encoder = new TextEncoder();
const decoder = new TextDecoder();

function isJsonObject(text: string): boolean {
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

function outline(text: string, watched: string[] = []) {
  const bytes = encoder.encode(text);
  const start = skipSpace(bytes, 0);
  const found = outlineObject(bytes, start, watched);
  const isWhole = found.problem === null && skipSpace(bytes, found.end) === bytes.length;
  const values = found.members.map(({ key, start, end }) => [
    key,
    decoder.decode(bytes.subarray(start, end)),
  ]);
  return { isWhole, values, problem: found.problem };
}

describe("outlineObject", () => {
  test("finds watched members wherever they stand, and nothing inside others", () => {
    const text = ' { "a" : {"id":1, "x":["id"]} , "id":\t"7\\"}" ,"z":[{"id":2}],"result" : -1.5e+3 }\n';
    expect(outline(text, ["id", "result"])).toEqual({
      isWhole: true,
      values: [
        ["id", '"7\\"}"'],
        ["result", "-1.5e+3"],
      ],
      problem: null,
    });
  });

  test("finds a key however it is escaped or cased, and each time it appears", () => {
    expect(outline('{"\\u0069d":1,"ID":2,"id":3,"jſonrpc":4}', ["id", "jsonrpc"]).values).toEqual([
      ["id", "1"],
      ["ID", "2"],
      ["id", "3"],
      ["jſonrpc", "4"],
    ]);
  });

  test("agrees with JSON.parse on what is an object", () => {
    const texts = fc.oneof(
      fc.json({ depthSize: "medium" }),
      fc.jsonValue().map((value) => JSON.stringify({ value, more: [value] }, null, 1)),
      fc
        .array(
          fc.constantFrom(
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            '"',
            '"a"',
            "\\",
            "0",
            "1",
            "-",
            ".",
            "e",
            "+",
            "true",
            " ",
          ),
        )
        .map((parts) => `{${parts.join("")}}`),
    );
    fc.assert(
      fc.property(texts, (text) => {
        expect(outline(text).isWhole).toBe(isJsonObject(text));
      }),
      { numRuns: 1000 },
    );
  });

  test("agrees with JSON.parse after one byte was damaged", () => {
    const damaged = fc
      .tuple(fc.jsonValue(), fc.nat(), fc.constantFrom(...'{}[]",:\\ux01-.eE+ \n\u0001'))
      .map(([value, place, by]) => {
        const text = JSON.stringify({ value, "kéy\n": "\u2028" });
        const at = place % text.length;
        return text.slice(0, at) + by + text.slice(at + 1);
      })
      .filter((text) => text.isWellFormed());
    fc.assert(
      fc.property(damaged, (text) => {
        expect(outline(text).isWhole).toBe(isJsonObject(text));
      }),
      { numRuns: 1000 },
    );
  });

  test("reads a text that is cut off as far as it goes", () => {
    expect(outline('{"id":12,"result":{"a":[1,2', ["id", "result"])).toEqual({
      isWhole: false,
      values: [["id", "12"]],
      problem: "malformed",
    });
    expect(outline('{"id":12', ["id"]).values).toEqual([]);
  });

  test("refuses what is nested too deep, without recursing into it", () => {
    const deep = (levels: number) => `{"a":${"[".repeat(levels)}${"]".repeat(levels)}}`;
    expect(outline(deep(JSON_DEPTH_MAX - 1)).isWhole).toBe(true);
    expect(outline(deep(JSON_DEPTH_MAX)).problem).toBe("too deep");
    expect(outline(`{"a":${"[".repeat(1_000_000)}`).problem).toBe("too deep");
  });
});
