import { expect, test } from "bun:test";
import { Fault } from "../../core/fault.ts";
import { atOnce } from "../../kernel/turns.ts";
import { checkRules, formatRules, parseRules, type Rule } from "./document.ts";

function problem(match: Rule["match"]): string | null {
  try {
    const rules: Rule[] = [
      { action: "deny", match: {} },
      { action: "deny", match },
    ];
    atOnce(checkRules(rules));
    return null;
  } catch (error) {
    expect(error).toBeInstanceOf(Fault);
    return (error as Fault).message;
  }
}

test.each<[string, Rule["match"]]>([
  ["an empty agent", { agents: ["agt_1", ""] }],
  ["an agent with a wildcard", { agents: ["agt_1", "agt_*"] }],
  ["the bare wildcard for an agent", { agents: ["agt_1", "*"] }],
  ["an agent with a lone surrogate", { agents: ["agt_1", "\ud800"] }],
  ["a long agent", { agents: ["agt_1", "a".repeat(1025)] }],
])("a policy with a bad field is refused, and the place is named: %s", (_, match) => {
  expect(problem(match)).toStartWith("rules.1.match.agents.1: must ");
});

test.each<[string, string]>([
  ["empty", ""],
  ["a wildcard in the middle", "read_*_file"],
  ["a wildcard at the start", "*_file"],
  ["two wildcards at the end", "read_**"],
  ["only two wildcards", "**"],
  ["a wildcard in the middle and one at the end", "a*b*"],
  ["U+0000", "a\0b"],
  ["a lone surrogate", "a\udc00"],
  ["too long", "a".repeat(1025)],
])("a policy with a bad tool is refused, and the place is named: %s", (_, tool) => {
  expect(problem({ tools: ["read_*", tool] })).toStartWith("rules.1.match.tools.1: must ");
});

test("a tool may have any other name", () => {
  for (const tool of ["*", "a*", "read file", " ", "a\u0085b", "日本*", "a".repeat(1024), "\ud83d\ude00*"])
    expect(problem({ tools: [tool] })).toBeNull();
});

test("stored rules come back, and what this program does not know is an error", () => {
  const one: Rule = { action: "warn", match: { tools: ["a*", "},\n{", ",\n"], max_body_bytes: 1 } };
  for (const rules of [[], [one], [one, one, { action: "allow" as const, match: {} }]]) {
    const stored = atOnce(formatRules(rules));
    expect([JSON.parse(stored), atOnce(parseRules(stored))]).toEqual([rules, rules]);
  }
  for (const stored of [
    "",
    "{}",
    "[1]",
    "[",
    "]",
    '[{"action":"deny","match":{}},\n]',
    '[{"action":"deny","match":{}}],\n[{"action":"deny","match":{}}]',
    `[${Array(501).fill('{"action":"deny","match":{}}').join(",\n")}]`,
    '[{"action":"quarantine","match":{}}]',
    '[{"action":"deny","match":{"hours":[9]}}]',
    '[{"action":"deny","match":{"tools":["a*b"]}}]',
    '[{"action":"deny","match":{"rate_per_min":0}}]',
  ])
    expect(() => atOnce(parseRules(stored))).toThrow();
});
