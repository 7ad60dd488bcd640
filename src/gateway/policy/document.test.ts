import { expect, test } from "bun:test";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import { checkRules, formatRules, parseRules, type Rule } from "./document.ts";

const AGENT = newId("agt", 0);

async function problem(match: Rule["match"]): Promise<string | null> {
  try {
    const rules: Rule[] = [
      { action: "deny", match: {} },
      { action: "deny", match },
    ];
    await checkRules(rules, "t");
    return null;
  } catch (error) {
    expect(error).toBeInstanceOf(Fault);
    return (error as Fault).message;
  }
}

test.each<[string, Rule["match"]]>([
  ["an empty agent", { agents: [AGENT, ""] }],
  ["an agent with a wildcard", { agents: [AGENT, "agt_*"] }],
  ["the bare wildcard for an agent", { agents: [AGENT, "*"] }],
  ["an agent with a lone surrogate", { agents: [AGENT, "\ud800"] }],
  ["a long agent", { agents: [AGENT, "a".repeat(1025)] }],
  ["the name of an agent", { agents: [AGENT, "echo"] }],
  ["part of an ID", { agents: [AGENT, AGENT.slice(0, 12)] }],
])("a policy with a bad field is refused, and the place is named: %s", async (_, match) => {
  expect(await problem(match)).toStartWith("rules.1.match.agents.1: must ");
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
])("a policy with a bad tool is refused, and the place is named: %s", async (_, tool) => {
  expect(await problem({ tools: ["read_*", tool] })).toStartWith("rules.1.match.tools.1: must ");
});

test("a tool may have any other name", async () => {
  for (const tool of ["*", "a*", "read file", " ", "a\u0085b", "日本*", "a".repeat(1024), "\ud83d\ude00*"])
    expect(await problem({ tools: [tool] })).toBeNull();
});

test("stored rules come back, and what this program does not know is an error", async () => {
  const one: Rule = { action: "warn", match: { tools: ["a*", "},\n{", ",\n"], max_body_bytes: 1 } };
  for (const rules of [[], [one], [one, one, { action: "allow" as const, match: {} }]]) {
    const stored = await formatRules(rules, "t");
    expect([JSON.parse(stored), await parseRules(stored, "t")]).toEqual([rules, rules]);
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
    expect(parseRules(stored, "t")).rejects.toThrow();
});
