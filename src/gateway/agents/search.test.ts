import { expect, test } from "bun:test";
import fc from "fast-check";
import { fold, searchText } from "./lists.ts";

const texts = fc.string({ unit: "binary" });

test("folding a part gives a part of the folded whole, so that a search finds a part of a name whatever its case", () => {
  fc.assert(
    fc.property(texts, texts, texts, (before, part, after) => {
      expect(fold(before + part + after)).toContain(fold(part));
      for (const cased of [part.toUpperCase(), part.toLowerCase()]) {
        expect(fold(cased)).toBe(fold(part));
      }
    }),
  );
});

test("a search matches nothing across the end of the name", () => {
  expect(searchText({ name: "ab", description: "cd" })).not.toContain(fold("abcd"));
  expect(searchText({ name: "ab", description: "cd" })).not.toContain(fold("ab\u0001cd"));
});
