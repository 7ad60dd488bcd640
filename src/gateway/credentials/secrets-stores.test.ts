import { describe, expect, test } from "bun:test";
import { posix } from "node:path";
import fc from "fast-check";
import { isPlainSegment, parseVaultRef } from "./secrets-stores.ts";

const parsed = (segments: string[], key: string | null) => ({ ok: true as const, ref: { segments, key } });

describe("a vault reference", () => {
  test.each([
    ["key", parsed(["key"], null)],
    ["a/b-c/d.e#f.g", parsed(["a", "b-c", "d.e"], "f.g")],
    ["...", parsed(["..."], null)],
    ["..data/x", parsed(["..data", "x"], null)],
    ["a b/ü:@=+", parsed(["a b", "ü:@=+"], null)],
    ["a#b/../c%2f", parsed(["a"], "b/../c%2f")],
  ])("may be %j", (text, expected) => {
    expect(parseVaultRef(text)).toEqual(expected);
  });

  test.each([
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/..",
    "a/../b",
    "a/./b",
    "a\\b",
    "..\\a",
    "%2e%2e/a",
    "a%2fb",
    "a?version=1",
    "#key",
    "a#",
    "a#b#c",
    "a\0b",
    "a\nb",
    "a\u0085b",
    "a#b\n",
    "\ud800",
    "x".repeat(1025),
  ])("may not be %j", (text) => {
    expect(parseVaultRef(text).ok).toBe(false);
  });

  test("stays below its prefix, as a file path and as a URL", () => {
    const pieces = fc.constantFrom("a", ".", "..", "/", "\\", "%", "2e", "2f", "#", "?", "\0", "\t", ";", ":", "ä");
    fc.assert(
      fc.property(fc.array(pieces, { maxLength: 12 }), (parts) => {
        const result = parseVaultRef(parts.join(""));
        if (!result.ok) return;
        const { segments } = result.ref;
        expect(
          posix
            .join("/dir/tenant", ...segments)
            .split("/")
            .slice(3),
        ).toEqual([...segments]);
        const { pathname, search } = new URL(`http://vault/v1/p/${segments.map(encodeURIComponent).join("/")}`);
        expect([search, pathname.split("/").slice(3).map(decodeURIComponent)]).toEqual(["", [...segments]]);
      }),
      { numRuns: 2_000 },
    );
  });
});

test.each(["", ".", "..", "a/b", "a\\b", "%2e", "a?b", "a#b", "a\0", "a\n", "\udfff"])(
  "%j is no plain segment of a vault reference",
  (segment) => {
    expect(isPlainSegment(segment)).toBe(false);
  },
);
