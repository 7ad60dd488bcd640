import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { MAX } from "../kernel/limits.ts";
import { arrayOutline, type FoundKey, objectOutline, skipSpace, type Watched, watch } from "./json-scan.ts";

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

function outline(text: string, watched: Watched[] = []) {
  const bytes = encoder.encode(text);
  const start = skipSpace(bytes, 0);
  const { findings, end, problem } = objectOutline(bytes, start, watched);
  const isWhole = problem === null && skipSpace(bytes, end) === bytes.length;
  const textOf = ({ value }: FoundKey) =>
    value === null ? null : decoder.decode(bytes.subarray(value.start, value.end));
  return { isWhole, values: findings.map(textOf), problem, findings, textOf };
}

/** How the key `watched` was found in an object of these keys. */
function found(watched: string, ...quotedKeys: string[]) {
  const text = `{${quotedKeys.map((key, index) => `${key}:${index}`).join()}}`;
  const { values, findings } = outline(text, [watch(watched)]);
  return [values[0], findings[0]!.isRepeated, findings[0]!.isMiscased];
}

describe("the outline of a JSON object", () => {
  test("finds watched members wherever they stand, and nothing inside others", () => {
    const text = ' { "a" : {"id":1, "x":["id"]} , "id":\t"7\\"}" ,"z":[{"id":2}],"result" : -1.5e+3 }\n';
    const { isWhole, values } = outline(text, [watch("id"), watch("result"), watch("x")]);
    expect([isWhole, values]).toEqual([true, ['"7\\"}"', "-1.5e+3", null]]);
  });

  test("finds a key however it is escaped", () => {
    expect(found("id", '"\\u0069d"')).toEqual(["0", false, false]);
    expect(found("a/B", '"\\u0061\\/\\u0042"')).toEqual(["0", false, false]);
    expect(found("id", '"\\u0069d\\u0001"', '"\\nd"', '"i\\u0064d"', '"i"', '"idd"', '"ïd"', '"😀"')).toEqual([
      null,
      false,
      false,
    ]);
  });

  test("tells keys that come again or in another case, and takes the last that is spelled right", () => {
    expect(found("id", '"id"', '"\\u0069d"')).toEqual(["1", true, false]);
    expect(found("id", '"id"', '"\\u0049d"')).toEqual(["0", true, true]);
    expect(found("id", '"ID"')).toEqual([null, false, true]);
  });

  test("takes for another case of a key what some decoder takes for it", () => {
    for (const key of ["paramſ", "PARAM\\u017f", "parAms"]) expect(found("params", `"${key}"`)[2]).toBe(true);
    for (const key of ["ıd", "İd", "\\u0131D"]) expect(found("id", `"${key}"`)[2]).toBe(true);
    expect(found("key", '"\u212aey"')[2]).toBe(true);
    for (const key of ["id\\u0000", "Id\\u0000and more", "\\u0069\\u0064\\u0000\\u0000"]) {
      expect(found("id", '"id"', `"${key}"`)).toEqual(["0", true, true]);
    }
    expect(found("id", '"i\\u0000d"', '"idd\\u0000"', '"id\\\\u0000"')).toEqual([null, false, false]);
    expect(found("id", '"1d"')[2]).toBe(false);
    expect(found("_meta", '"\u007fmeta"')[2]).toBe(false);
  });

  test("agrees with JSON.parse on which key is meant", () => {
    const characters = fc.constantFrom("i", "d", "I", "ſ", "\n", '"', "\\", "/", "é", "😀", "\ud800");
    const keys = fc.array(fc.tuple(characters, fc.boolean()), { maxLength: 4 }).map((parts) => {
      const inHex = (text: string) =>
        [...Array(text.length).keys()].map((at) => `\\u${text.charCodeAt(at).toString(16).padStart(4, "0")}`).join("");
      const quoted = parts.map(([text, isEscaped]) => (isEscaped ? inHex(text) : JSON.stringify(text).slice(1, -1)));
      return `"${quoted.join("")}"`;
    });
    fc.assert(
      fc.property(keys, (key) => {
        const meant = JSON.parse(key) as string;
        const expected = [meant === "id" ? "0" : null, false, meant !== "id" && meant.toLowerCase() === "id"];
        expect(found("id", key)).toEqual(expected);
      }),
      { numRuns: 2000, examples: [['"\\u0069\\u0064"'], ['"i\\u0044"']] },
    );
  });

  test("finds keys inside the value of another, the last one where that comes again", () => {
    const watched = [watch("error", watch("code"), watch("data"))];
    const inside = (text: string) => {
      const { findings, textOf } = outline(text, watched);
      return findings[0]!.inside.map(textOf);
    };
    expect(inside('{"code":1,"error":{"a":{"code":2},"code":3,"data":{}}}')).toEqual(["3", "{}"]);
    expect(inside('{"error":{"code":3,"data":4},"error":{"data":5}}')).toEqual([null, "5"]);
    expect(inside('{"error":{"code":3},"error":[]}')).toEqual([null, null]);
    expect(inside('{"error":{"code":3},"ERROR":{"code":4}}')).toEqual(["3", null]);
  });

  test("costs memory of no member, and little more time than a scan that looks for nothing", () => {
    const repeated = (start: string, unit: string, end: string) => encoder.encode(start + unit.repeat(800_000) + end);
    const bodies = ["", "id", "ix", "\\u0061b"].map((key) => repeated('{"a":1', `,"${key}":1`, "}"));
    const watched = [watch("id"), watch("name"), watch("key")];
    const time = (body: Uint8Array, keys: Watched[]) => {
      const started = performance.now();
      objectOutline(body, 0, keys);
      return performance.now() - started;
    };
    for (const body of bodies) {
      const plain = Math.min(...[1, 2, 3].map(() => time(body, [])));
      const looking = Math.min(...[1, 2, 3].map(() => time(body, watched)));
      expect(looking).toBeLessThan(plain * 10 + 10);
    }
    Bun.gc(true);
    const before = process.memoryUsage().heapUsed;
    const outlines = bodies.map((body) => objectOutline(body, 0, watched));
    expect(process.memoryUsage().heapUsed - before).toBeLessThan(4_000_000);
    expect(outlines.map(({ problem }) => problem)).toEqual([null, null, null, null]);
  });

  test("agrees with JSON.parse on what is an object", () => {
    const texts = fc.oneof(
      fc.json({ depthSize: "medium" }),
      fc.jsonValue().map((value) => JSON.stringify({ value, more: [value] }, null, 1)),
      fc
        .array(
          fc.constantFrom("{", "}", "[", "]", ",", ":", '"', '"a"', "\\", "0", "1", "-", ".", "e", "+", "true", " "),
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
    const { values, problem } = outline('{"id":12,"result":{"a":[1,2', [watch("id"), watch("result")]);
    expect([values, problem]).toEqual([["12", null], "malformed"]);
    expect(outline('{"id":12', [watch("id")]).values).toEqual([null]);
  });

  test("refuses what is nested too deep, without recursing into it", () => {
    const deep = (levels: number) => `{"a":${"[".repeat(levels)}${"]".repeat(levels)}}`;
    expect(outline(deep(MAX.jsonDepth - 1)).isWhole).toBe(true);
    expect(outline(deep(MAX.jsonDepth)).problem).toBe("too deep");
    expect(outline(`{"a":${"[".repeat(1_000_000)}`).problem).toBe("too deep");
  });
});

describe("an array", () => {
  const WATCHED = [watch("id"), watch("params", watch("name"), watch("_meta", watch("v")))];
  const member = fc.tuple(
    fc.constantFrom('"id"', '"i\\u0064"', '"ID"', '"params"', '"name"', '"_meta"', '"v"', '""', '"a\\"b"'),
    fc.jsonValue().map((value) => JSON.stringify(value)),
  );
  const object = fc.array(member, { maxLength: 5 }).map((all) => `{${all.map((each) => each.join(":")).join()}}`);

  test("finds in each item of a batch what a scan of that alone finds", () => {
    fc.assert(
      fc.property(fc.array(object, { minLength: 1, maxLength: 4 }), (all) => {
        const bytes = encoder.encode(`[${all.join(" , ")}]`);
        const { items, problem } = arrayOutline(bytes, 0, 4, WATCHED);
        expect([items.length, problem]).toEqual([all.length, null]);
        for (const { start, end, findings } of items) {
          expect(objectOutline(bytes, start, WATCHED)).toEqual({ findings, end, problem: null });
        }
        expect(arrayOutline(bytes, 0, all.length - 1, []).problem).toBe("too many");
      }),
    );
  });
});
