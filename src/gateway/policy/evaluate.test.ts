import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { POLICY_ACTIONS, type PolicyAction } from "../../core/states.ts";
import type { PolicyReplace, Rule } from "./document.ts";
import {
  addRule,
  compile,
  createRuleSet,
  type EvaluatedCall,
  evaluate,
  indexNames,
  intersect,
  nextRule,
  type RuleSet,
  toolsDeniedToAll,
} from "./evaluate.ts";

/** The rules as interface.md and decisions.md have them, word for word and with no thought for speed. */
function reference(document: PolicyReplace, call: EvaluatedCall): [PolicyAction, number | null] {
  const at = document.rules.findIndex(({ match }) => {
    const conditions = [
      match.agents === undefined || match.agents.length === 0 || match.agents.includes(call.agent_id),
      match.tools === undefined || match.tools.length === 0 || match.tools.some((tool) => isTool(tool, call)),
      match.max_body_bytes === undefined || call.body_bytes >= match.max_body_bytes,
      match.rate_per_min === undefined || call.rate > match.rate_per_min,
    ];
    return conditions.every((holds) => holds);
  });
  const rule = document.rules[at];
  return rule === undefined ? [document.default, null] : [rule.action, at + 1];
}

function isTool(pattern: string, { protocol, mcp_tool }: EvaluatedCall): boolean {
  if (protocol !== "mcp" || mcp_tool === null) return false;
  return pattern.endsWith("*") ? mcp_tool.startsWith(pattern.slice(0, -1)) : mcp_tool === pattern;
}

// Few letters, so that names and prefixes meet; some beside the plain ones, whose order is another in UTF-8.
const name = fc.string({ unit: fc.constantFrom("a", "b", "_", "é", "\ud83d\ude00", "\uffee"), maxLength: 4 });
const tool = fc.oneof(
  name.filter((text) => text !== ""),
  name.map((text) => `${text}*`),
);
const agent = fc.constantFrom("agt_1", "agt_2", "agt_3");
const action = fc.constantFrom(...POLICY_ACTIONS);
const threshold = fc.integer({ min: 1, max: 5 });
const match = fc.record(
  {
    agents: fc.array(agent, { maxLength: 2 }),
    tools: fc.array(tool, { maxLength: 6 }),
    max_body_bytes: threshold,
    rate_per_min: threshold,
  },
  { requiredKeys: [] },
) as fc.Arbitrary<Rule["match"]>;
const rule = fc.record({ action, match });
// Some with more rules than a word of a set has bits.
const rules = fc.oneof(
  { weight: 9, arbitrary: fc.array(rule, { maxLength: 12 }) },
  { weight: 1, arbitrary: fc.array(rule, { minLength: 30, maxLength: 100, size: "max" }) },
);
const policy: fc.Arbitrary<PolicyReplace> = fc.record({ default: action, on_error: action, rules });
const call: fc.Arbitrary<EvaluatedCall> = fc.record({
  agent_id: agent,
  protocol: fc.constantFrom("http", "mcp"),
  mcp_tool: fc.option(name),
  body_bytes: fc.integer({ min: 0, max: 6 }),
  rate: fc.integer({ min: 1, max: 7 }),
});

describe("for any policy and any call", () => {
  test("the compiled form says what the plain rules say", async () => {
    await fc.assert(
      fc.asyncProperty(policy, fc.array(call, { minLength: 1, maxLength: 20 }), async (document, calls) => {
        const compiled = await compile(document, "t");
        for (const one of calls) {
          const { action: said, matched_rule } = evaluate(compiled, one);
          expect([said, matched_rule]).toEqual(reference(document, one));
        }
      }),
      { numRuns: 2_000 },
    );
  });

  test("a tool is denied to all exactly when no size and no rate gets a call of it through", async () => {
    const outcomes = new Set<boolean>();
    await fc.assert(
      fc.asyncProperty(policy, agent, name, async (document, agent_id, mcp_tool) => {
        const every = [1, 2, 3, 4, 5, 6].flatMap((body_bytes) =>
          [1, 2, 3, 4, 5, 6, 7].map((rate) => ({
            ...{ agent_id, protocol: "mcp" as const, mcp_tool },
            ...{ body_bytes, rate },
          })),
        );
        const denied = every.every((one) => reference(document, one)[0] === "deny");
        expect(toolsDeniedToAll(await compile(document, "t"), agent_id)(mcp_tool)).toBe(denied);
        outcomes.add(denied);
      }),
      { numRuns: 2_000 },
    );
    expect(outcomes.size).toBe(2);
  });

  test("reasons are coarse and fit for a header", async () => {
    await fc.assert(
      fc.asyncProperty(policy, call, async (document, one) => {
        const { reason, action: said } = evaluate(await compile(document, "t"), one);
        expect(reason).toMatch(/^(rule [0-9]+|default): (allow|warn|deny)$/);
        expect(reason).toEndWith(said);
      }),
    );
  });
});

const CALL: EvaluatedCall = {
  agent_id: "agt_1",
  protocol: "mcp",
  mcp_tool: "read_file",
  body_bytes: 10,
  rate: 5,
};

const deny = async (conditions: Rule["match"], changes: Partial<EvaluatedCall> = {}) => {
  const document = { default: "allow" as const, rules: [{ action: "deny" as const, match: conditions }] };
  return evaluate(await compile(document, "t"), { ...CALL, ...changes }).action === "deny";
};

describe("the conditions of a rule", () => {
  test.each<[string, Rule["match"], Partial<EvaluatedCall>, boolean]>([
    ["none matches everything", {}, {}, true],
    ["empty lists match everything", { agents: [], tools: [] }, { protocol: "http", mcp_tool: null }, true],
    ["the agent", { agents: ["agt_2", "agt_1"] }, {}, true],
    ["another agent", { agents: ["agt_2"] }, {}, false],
    ["the tool", { tools: ["read_file"] }, {}, true],
    ["the start of the tool without a wildcard", { tools: ["read"] }, {}, false],
    ["a prefix", { tools: ["read_*"] }, {}, true],
    ["the whole name as a prefix", { tools: ["read_file*"] }, {}, true],
    ["a longer prefix", { tools: ["read_files*"] }, {}, false],
    ["the bare wildcard", { tools: ["*"] }, {}, true],
    ["the bare wildcard and a nameless tool", { tools: ["*"] }, { mcp_tool: "" }, true],
    ["the bare wildcard and another method", { tools: ["*"] }, { mcp_tool: null }, false],
    ["a tool of an http agent", { tools: ["*"] }, { protocol: "http" }, false],
    ["another letter case", { tools: ["Read_file"] }, {}, false],
    ["fewer bytes", { max_body_bytes: 11 }, {}, false],
    ["as many bytes", { max_body_bytes: 10 }, {}, true],
    ["more bytes", { max_body_bytes: 9 }, {}, true],
    ["a lower rate", { rate_per_min: 6 }, {}, false],
    ["the same rate", { rate_per_min: 5 }, {}, false],
    ["a higher rate", { rate_per_min: 4 }, {}, true],
    ["all but one", { agents: ["agt_1"], tools: ["read_*"], max_body_bytes: 11 }, {}, false],
  ])("match a call, or do not: %s", async (_, conditions, changes, expected) => {
    expect(await deny(conditions, changes)).toBe(expected);
  });
});

test("the first rule that matches decides a call, then the default, and both say so", async () => {
  const document = {
    default: "deny" as const,
    rules: [
      { action: "warn" as const, match: { tools: ["read_*"] } },
      { action: "deny" as const, match: { tools: ["read_file"] } },
    ],
  };
  const compiled = await compile(document, "t");
  expect(evaluate(compiled, CALL)).toEqual({ action: "warn", matched_rule: 1, reason: "rule 1: warn" });
  expect(evaluate(compiled, { ...CALL, mcp_tool: "write" })).toEqual({
    action: "deny",
    matched_rule: null,
    reason: "default: deny",
  });
});

test("a prefix in a rule does not hide a shorter one in another", async () => {
  for (const tools of [
    ["a*", "ab*"],
    ["ab*", "a*"],
    ["a*", "ab*", "abc", "b*"],
  ]) {
    for (const mcp_tool of ["a", "aa", "ab", "abc", "ax", "az"]) expect(await deny({ tools }, { mcp_tool })).toBe(true);
  }
});

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
      intersect(set, setOf(other));
      expect(listOf(set)).toEqual(both);
    }),
  );
});

/** The rules as they are written, one by one. */
function plain(lists: readonly (readonly string[])[], text: string | null): number[] {
  const isNamed = (entry: string) =>
    entry.endsWith("*") ? text?.startsWith(entry.slice(0, -1)) === true : entry === text;
  return [...lists.keys()].filter((rule) => lists[rule]?.length === 0 || lists[rule]?.some(isNamed));
}

// Few letters, so that names and starts meet; some whose order is another in UTF-8.
const listed = fc.string({ unit: fc.constantFrom("a", "b", "é", "\ud83d\ude00", "\uffee"), maxLength: 6 });
const entry = fc.oneof(
  listed.filter((text) => text !== ""),
  listed.map((text) => `${text}*`),
);
const lists = fc.array(fc.array(entry, { maxLength: 12 }), { maxLength: 40 });

function indexOf(lists: readonly (readonly string[])[]) {
  const names = indexNames(lists.length);
  for (const [rule, list] of lists.entries()) names.add(list, rule);
  return names;
}

test("a text is named by the rules that name it", () => {
  fc.assert(
    fc.property(lists, fc.array(fc.option(listed), { minLength: 1 }), (given, texts) => {
      const names = indexOf(given);
      for (const text of texts) expect(listOf(names.rulesOf(text))).toEqual(plain(given, text));
    }),
    { numRuns: 1_000 },
  );
});

test("a long text finds the longest start of it among ever longer ones", () => {
  const given = Array.from({ length: 500 }, (_, at) => [`${"a".repeat(at)}*`, `${"a".repeat(at)}b`]);
  const names = indexOf(given);
  for (const text of ["a".repeat(1_000), `${"a".repeat(250)}c`, `${"a".repeat(7)}b`, ""]) {
    expect(listOf(names.rulesOf(text))).toEqual(plain(given, text));
  }
});

test("a policy of a hundred thousand names is compiled in many turns", async () => {
  const rules = Array.from({ length: 500 }, (_, rule) => ({
    action: "deny" as const,
    match: { tools: Array.from({ length: 200 }, (_, at) => `${((rule * 200 + at) * 7_919) % 100_003}*`) },
  }));
  let turns = 0;
  let isOver = false;
  const turn = () => {
    turns++;
    if (!isOver) setImmediate(turn);
  };
  setImmediate(turn);
  await compile({ default: "allow", rules }, "t");
  isOver = true;
  expect(turns).toBeGreaterThanOrEqual(10);
});
