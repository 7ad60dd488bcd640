import { expect, test } from "bun:test";
import fc from "fast-check";
import { addRule, createRuleSet, haveCommon, keepCommon, nextRule, type RuleSet } from "./evaluate.ts";

const RULES_MAX = 501;
const positions = fc.uniqueArray(fc.integer({ min: 0, max: RULES_MAX - 1 }), { maxLength: 70 });

function setOf(rules: readonly number[]): RuleSet {
  const set = createRuleSet(RULES_MAX);
  for (const rule of rules) addRule(set, rule);
  return set;
}

function listOf(set: RuleSet): number[] {
  const rules: number[] = [];
  for (let at = nextRule(set, 0); at !== -1; at = nextRule(set, at + 1)) rules.push(at);
  return rules;
}

test("a rule set is what a set of numbers is", () => {
  fc.assert(
    fc.property(positions, positions, (one, other) => {
      const both = one.filter((rule) => other.includes(rule)).sort((a, b) => a - b);
      const set = setOf(one);
      expect(listOf(set)).toEqual(one.toSorted((a, b) => a - b));
      expect(haveCommon(set, setOf(other))).toBe(both.length > 0);
      keepCommon(set, setOf(other));
      expect(listOf(set)).toEqual(both);
    }),
  );
});
