// Evaluates a policy for a call: the first rule that matches decides, then the default. A document is compiled once per
// version, in steps, since its tenant chooses its size. After that a call or a tool costs the same for lists of any
// length. Pure.
import { createPace } from "../../concurrency/pace.ts";
import type { Steps } from "../../concurrency/steps.ts";
import type { PolicyAction, Protocol } from "../../core/states.ts";
import type { PolicyReplace, Rule } from "./document.ts";
import { indexNames, type Names } from "./name-index.ts";
import { addRule, createRuleSet, haveCommon, keepCommon, nextRule, type RuleSet } from "./rule-bits.ts";

export interface PolicyVerdict {
  readonly action: PolicyAction;
  /** The position of the rule, from 1; null when the action is that of `default` or `on_error`. */
  readonly matched_rule: number | null;
  /** Coarse, in printable ASCII, since it goes into a header. */
  readonly reason: string;
}

export interface EvaluatedCall {
  readonly agent_id: string;
  readonly protocol: Protocol;
  /** The tool of a `tools/call`; null for every other call. */
  readonly mcp_tool: string | null;
  readonly body_bytes: number;
  /** Calls of the caller to the agent in the last 60 seconds, this one included. */
  readonly rate: number;
}

/** The least call: no `tools/call` has an empty body, and each counts itself in the rate. */
const BYTES_LEAST = 1;
const RATE_LEAST = 1;

/** The work of comparing the thresholds of two rules. */
const COMPARE_WORK = 8;

/** Without a threshold in the document, the value here matches every call. */
interface CompiledRule {
  readonly verdict: PolicyVerdict;
  /** Matches a body of at least this many bytes. */
  readonly bytes_min: number;
  /** Matches a rate above this one. */
  readonly rate_above: number;
  /** The earlier rules that deny the least call which this rule's thresholds match. */
  readonly deniedBefore: RuleSet;
}

export interface CompiledPolicy {
  /** The last one is the default, as a rule without conditions. */
  readonly rules: readonly CompiledRule[];
  readonly agents: Names;
  readonly tools: Names;
  /** The rules that ask for the rate; null when none does. */
  readonly onRate: RuleSet | null;
}

export function* compile(document: Pick<PolicyReplace, "default" | "rules">): Steps<CompiledPolicy> {
  const pace = createPace();
  const withDefault: readonly Rule[] = [...document.rules, { action: document.default, match: {} }];
  const agents = yield* indexNames(
    withDefault.map(({ match }) => match.agents ?? []),
    pace,
  );
  const tools = yield* indexNames(
    withDefault.map(({ match }) => match.tools ?? []),
    pace,
  );
  const rules: CompiledRule[] = [];
  for (const [at, rule] of withDefault.entries()) {
    const verdict = at === document.rules.length ? defaultVerdict(rule) : ruleVerdict(rule, at + 1);
    const { max_body_bytes: bytes_min = 0, rate_per_min: rate_above = -1 } = rule.match;
    const deniedBefore = denyingLeast({ bytes_min, rate_above }, rules, withDefault.length);
    rules.push({ verdict, bytes_min, rate_above, deniedBefore });
    if (pace(COMPARE_WORK * at)) yield;
  }
  return { rules, agents, tools, onRate: rulesOnRate(withDefault) };
}

function rulesOnRate(rules: readonly Rule[]): RuleSet | null {
  const onRate = createRuleSet(rules.length);
  let hasAny = false;
  for (const [at, { match }] of rules.entries()) {
    if (match.rate_per_min === undefined) continue;
    addRule(onRate, at);
    hasAny = true;
  }
  return hasAny ? onRate : null;
}

/** Whether a rule asks for the rate of calls to the agent. */
export function asksForRate({ agents, onRate }: CompiledPolicy, agentId: string): boolean {
  return onRate !== null && haveCommon(agents.rulesOf(agentId), onRate);
}

function ruleVerdict({ action }: Rule, position: number): PolicyVerdict {
  return { action, matched_rule: position, reason: `rule ${position}: ${action}` };
}

function defaultVerdict({ action }: Rule): PolicyVerdict {
  return { action, matched_rule: null, reason: `default: ${action}` };
}

/** The rules that deny the least call which the thresholds match. */
function denyingLeast(
  { bytes_min, rate_above }: Pick<CompiledRule, "bytes_min" | "rate_above">,
  rules: readonly CompiledRule[],
  count: number,
): RuleSet {
  const denying = createRuleSet(count);
  const [bytes, rate] = [Math.max(bytes_min, BYTES_LEAST), Math.max(rate_above + 1, RATE_LEAST)];
  for (const [at, rule] of rules.entries()) {
    const matches = rule.bytes_min <= bytes && rule.rate_above < rate;
    if (matches && rule.verdict.action === "deny") addRule(denying, at);
  }
  return denying;
}

export function evaluate({ rules, agents, tools }: CompiledPolicy, call: EvaluatedCall): PolicyVerdict {
  const named = tools.rulesOf(call.protocol === "mcp" ? call.mcp_tool : null);
  keepCommon(named, agents.rulesOf(call.agent_id));
  for (let at = nextRule(named, 0); at !== -1; at = nextRule(named, at + 1)) {
    const rule = rules[at];
    if (rule === undefined) break;
    if (call.body_bytes >= rule.bytes_min && call.rate > rule.rate_above) return rule.verdict;
  }
  throw new Error("a policy without a default");
}

/**
 * Whether every call of a tool of an mcp agent is denied, at any size and rate.
 *
 * A rule's thresholds match all calls at or above a least one. So a rule decides some call exactly when it decides its
 * least one, that is, when no earlier rule matches that call. Of the earlier rules only those that deny need a check:
 * any other rule that decided a call has already ended the search.
 */
export function toolsDeniedToAll({ rules, agents, tools }: CompiledPolicy, agentId: string): (tool: string) => boolean {
  const ofAgent = agents.rulesOf(agentId);
  return (tool) => {
    const named = tools.rulesOf(tool);
    keepCommon(named, ofAgent);
    for (let at = nextRule(named, 0); at !== -1; at = nextRule(named, at + 1)) {
      const rule = rules[at];
      if (rule === undefined) break;
      if (rule.verdict.action !== "deny" && !haveCommon(named, rule.deniedBefore)) return false;
    }
    return true;
  };
}
