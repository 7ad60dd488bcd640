// The policy document on the wire and in the store: its schema, and the checks of its texts. A stored document is validated
// again when it is read, so that a newer program's document, or a damaged one, is never taken for a policy with fewer rules.
import { type Static, Type } from "@sinclair/typebox";
import { TypeCompiler } from "@sinclair/typebox/compiler";
import { invalidField } from "../../core/fault.ts";
import { isId } from "../../core/id.ts";
import { POLICY_ACTIONS } from "../../core/states.ts";
import { checkText } from "../../core/text.ts";
import { optional, shape, timestamp } from "../../http/input.ts";
import { MAX } from "../../kernel/limits.ts";
import { eachInTurns } from "../../kernel/turns.ts";

/** Entries may contain control characters, since tool names may, and a rule must be able to name every tool. */
export const ENTRY = { min: 1, max: MAX.policyEntryCharacters, controls: true };

export const actionField = (description: string) =>
  Type.Union(
    POLICY_ACTIONS.map((action) => Type.Literal(action)),
    { description, "x-expected": `one of ${POLICY_ACTIONS.join(", ")}` },
  );

const list = (description: string) =>
  Type.Optional(
    Type.Array(Type.String({ "x-bounds": { minLength: 1, maxLength: MAX.policyEntryCharacters } }), {
      maxItems: MAX.policyList,
      description,
      "x-expected": `an array of at most ${MAX.policyList} strings`,
    }),
  );

export const countField = (least: number, description: string) =>
  Type.Optional(
    Type.Integer({
      minimum: least,
      maximum: Number.MAX_SAFE_INTEGER,
      description,
      "x-expected": `an integer of at least ${least}`,
    }),
  );

const Rule = shape(
  "PolicyRule",
  {
    action: actionField("What the rule does with a call that it matches."),
    match: Type.Object(
      {
        agents: list("IDs of agents."),
        tools: list(
          "Names of MCP tools; one `*` at the end makes it a prefix. Only a `tools/call` of an mcp agent has a tool.",
        ),
        max_body_bytes: countField(1, "Matches a request body of at least this many bytes."),
        rate_per_min: countField(
          1,
          "Matches when the caller has made more calls than this to the agent in the last 60 seconds, this call included.",
        ),
      },
      {
        additionalProperties: false,
        description: "All conditions that are present and not empty must match; `{}` matches every call.",
        "x-expected": "an object of conditions",
      },
    ),
  },
  { "x-expected": "a rule" },
);
export type Rule = Static<typeof Rule>;

const Rules = Type.Array(Rule, {
  maxItems: MAX.policyRules,
  description: "In order: the first that matches decides.",
  "x-expected": `an array of at most ${MAX.policyRules} rules`,
});

const actions = {
  default: actionField("What happens to a call that no rule matches."),
  on_error: actionField("What happens to a call when the policy can't be read or evaluated."),
};
const fields = { ...actions, rules: Rules };

export const PolicyReplace = shape("PolicyReplace", fields, {
  description:
    "`default` applies when no rule matches, `on_error` when the policy cannot be read or evaluated. No part may be left out.",
  "x-expected": "a policy document",
});
export type PolicyReplace = Static<typeof PolicyReplace>;

export const Policy = shape("Policy", {
  version: Type.Integer({ minimum: 0, description: "Rises with each change; 0 when the tenant has no policy." }),
  ...optional(actions),
  rules: Rules,
  updated_at: Type.Optional(timestamp("When it was last replaced.")),
});

/** The fixed part of the work for an entry or a rule: the checks of the schema, and building the field's name. */
const ENTRY_WORK = 200;

/** Checks the rules' texts, which the schema does not. @param prefix of field names @throws Fault `invalid_request` */
export function checkRules(rules: readonly Rule[], tenant: string, prefix = ""): Promise<void> {
  return eachInTurns(rules, tenant, (rule, index) => {
    const field = `${prefix}rules.${index}.match`;
    checkRule(rule, field);
    const misnamed = rule.match.agents?.findIndex((agent) => !isId("agt", agent)) ?? -1;
    // A rule that has an agent's name here would never match. The agent itself is not looked up: it may have been deleted.
    if (misnamed >= 0)
      throw invalidField(`${field}.agents.${misnamed}`, "must be an agent's ID, as GET /v1/agents lists it");
    return workOf(rule);
  });
}

/** The work of checking or compiling a rule, in the units of `eachInTurns`. */
export function workOf({ match: { agents = [], tools = [] } }: Rule): number {
  return [agents, tools].flat().reduce((work, entry) => work + ENTRY_WORK + entry.length, ENTRY_WORK);
}

function checkRule({ match: { agents = [], tools = [] } }: Rule, field: string): void {
  for (const [at, agent] of agents.entries()) {
    checkEntry(`${field}.agents.${at}`, agent, agent, "must not contain *; only the name of a tool may end with *");
  }
  for (const [at, tool] of tools.entries()) {
    const plain = tool.endsWith("*") ? tool.slice(0, -1) : tool;
    checkEntry(`${field}.tools.${at}`, tool, plain, "must contain * only once, as its last character");
  }
}

/** @param plain the part of the entry in which no wildcard may stand */
function checkEntry(field: string, entry: string, plain: string, wildcard: string): void {
  checkText(field, entry, ENTRY);
  if (plain.includes("*")) throw invalidField(field, wildcard);
}

/** The stored form is JSON with line breaks only between rules, so that it can be parsed rule by rule, in turns. */
const BETWEEN_RULES = ",\n";

export async function formatRules(rules: readonly Rule[], tenant: string): Promise<string> {
  const lines: string[] = [];
  await eachInTurns(rules, tenant, (rule) => {
    const line = JSON.stringify(rule);
    lines.push(line);
    return line.length;
  });
  return `[${lines.join(BETWEEN_RULES)}]`;
}

const storedRule = TypeCompiler.Compile(Rule);

/** Parses rules from their stored form. @throws Error when this program does not understand all of them */
export async function parseRules(stored: string, tenant: string): Promise<Rule[]> {
  const rules: Rule[] = [];
  if (stored === "[]") return rules;
  if (!stored.startsWith("[") || !stored.endsWith("]")) throw new Error("stored rules that are not a list");
  await eachInTurns(stored.slice(1, -1).split(BETWEEN_RULES), tenant, (line) => {
    const rule: unknown = JSON.parse(line);
    if (rules.length === MAX.policyRules || !storedRule.Check(rule)) {
      throw new Error("stored rules of a form that this program does not know");
    }
    checkRule(rule, "rules");
    rules.push(rule);
    return workOf(rule);
  });
  return rules;
}
