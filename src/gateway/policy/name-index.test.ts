import { expect, test } from "bun:test";
import fc from "fast-check";
import { createPace } from "../../concurrency/pace.ts";
import { atOnce } from "../../concurrency/steps.ts";
import { indexNames, nextRule, type RuleSet } from "./evaluate.ts";

function listOf(set: RuleSet): number[] {
  const rules: number[] = [];
  for (let at = nextRule(set, 0); at !== -1; at = nextRule(set, at + 1)) rules.push(at);
  return rules;
}

/** The rules as they are written, one by one. */
function plain(lists: readonly (readonly string[])[], text: string | null): number[] {
  const isNamed = (entry: string) =>
    entry.endsWith("*") ? text?.startsWith(entry.slice(0, -1)) === true : entry === text;
  return [...lists.keys()].filter((rule) => lists[rule]?.length === 0 || lists[rule]?.some(isNamed));
}

// Few letters, so that names and starts meet; some whose order is another in UTF-8.
const name = fc.string({ unit: fc.constantFrom("a", "b", "é", "\ud83d\ude00", "\uffee"), maxLength: 6 });
const entry = fc.oneof(
  name.filter((text) => text !== ""),
  name.map((text) => `${text}*`),
);
const lists = fc.array(fc.array(entry, { maxLength: 12 }), { maxLength: 40 });

test("a text is named by the rules that name it", () => {
  fc.assert(
    fc.property(lists, fc.array(fc.option(name), { minLength: 1 }), (given, texts) => {
      const names = atOnce(indexNames(given, createPace()));
      for (const text of texts) expect(listOf(names.rulesOf(text))).toEqual(plain(given, text));
    }),
    { numRuns: 1_000 },
  );
});

test("a long text finds the longest start of it among ever longer ones", () => {
  const given = Array.from({ length: 500 }, (_, at) => [`${"a".repeat(at)}*`, `${"a".repeat(at)}b`]);
  const names = atOnce(indexNames(given, createPace()));
  for (const text of ["a".repeat(1_000), `${"a".repeat(250)}c`, `${"a".repeat(7)}b`, ""]) {
    expect(listOf(names.rulesOf(text))).toEqual(plain(given, text));
  }
});

test("an index of a hundred thousand names is made in many steps", () => {
  const given = Array.from({ length: 500 }, (_, rule) =>
    Array.from({ length: 200 }, (_, at) => `${((rule * 200 + at) * 7_919) % 100_003}*`),
  );
  const work = 200_000;
  let steps = 0;
  for (const making = indexNames(given, createPace(work)); !making.next().done; ) steps++;
  // Each entry costs at least 200, once for each of the nine rounds in which lists become one.
  expect(steps).toBeGreaterThan((9 * 100_000 * 200) / work);
});
