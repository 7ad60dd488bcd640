// Evaluates a policy for a call: the first rule that matches decides, then the default. A document is compiled once per
// version, in turns, since its tenant chooses its size. After that a call or a tool costs the same for lists of any length:
// the rules that name an agent or a tool are found in an index of all lists, and sets of rules are bits. Pure.

import type { PolicyAction, Protocol } from "../../core/states.ts";
import { eachInTurns } from "../../kernel/turns.ts";
import { type PolicyReplace, type Rule, workOf } from "./document.ts";

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
const ANY_RATE = -1;

/** Without a threshold in the document, the value here matches every call. */
interface CompiledRule {
  readonly verdict: PolicyVerdict;
  /** Matches a body of at least this many bytes. */
  readonly bytes_min: number;
  /** Matches a rate above this one. */
  readonly rate_above: number;
}

export interface CompiledPolicy {
  /** The last one is the default, as a rule without conditions. */
  readonly rules: readonly CompiledRule[];
  readonly agents: Names;
  readonly tools: Names;
  /** Whether any rule asks for the rate. */
  readonly isOnRate: boolean;
}

type Ruled = Pick<PolicyReplace, "default" | "rules">;

export async function compile(document: Ruled, tenant: string): Promise<CompiledPolicy> {
  const withDefault: readonly Rule[] = [...document.rules, { action: document.default, match: {} }];
  const [agents, tools] = [indexNames(withDefault.length), indexNames(withDefault.length)];
  await eachInTurns(withDefault, tenant, (rule, at) => {
    agents.add(rule.match.agents ?? [], at);
    tools.add(rule.match.tools ?? [], at);
    return workOf(rule);
  });
  const rules = withDefault.map(({ action, match }, at): CompiledRule => {
    const matched_rule = at === document.rules.length ? null : at + 1;
    const reason = `${matched_rule === null ? "default" : `rule ${matched_rule}`}: ${action}`;
    const { max_body_bytes: bytes_min = 0, rate_per_min: rate_above = ANY_RATE } = match;
    return { verdict: { action, matched_rule, reason }, bytes_min, rate_above };
  });
  return {
    rules,
    agents: agents.made(),
    tools: tools.made(),
    isOnRate: rules.some(({ rate_above }) => rate_above !== ANY_RATE),
  };
}

/** Whether a rule asks for the rate of calls to the agent. */
export function asksForRate({ rules, agents, isOnRate }: CompiledPolicy, agentId: string): boolean {
  if (!isOnRate) return false;
  const named = agents.rulesOf(agentId);
  for (let at = nextRule(named, 0); at !== -1; at = nextRule(named, at + 1)) {
    if (rules[at]?.rate_above !== ANY_RATE) return true;
  }
  return false;
}

function hasReached(rule: CompiledRule, { body_bytes, rate }: Pick<EvaluatedCall, "body_bytes" | "rate">): boolean {
  return body_bytes >= rule.bytes_min && rate > rule.rate_above;
}

export function evaluate({ rules, agents, tools }: CompiledPolicy, call: EvaluatedCall): PolicyVerdict {
  const named = tools.rulesOf(call.protocol === "mcp" ? call.mcp_tool : null);
  keepCommon(named, agents.rulesOf(call.agent_id));
  for (let at = nextRule(named, 0); at !== -1; at = nextRule(named, at + 1)) {
    const rule = rules[at];
    if (rule === undefined) break;
    if (hasReached(rule, call)) return rule.verdict;
  }
  throw new Error("a policy without a default");
}

/**
 * Whether every call of a tool of an mcp agent is denied, at any size and rate.
 *
 * A rule's thresholds match all calls at or above a least one. So a rule decides some call exactly when it decides its least
 * one, that is, when no earlier rule matches that call. Of the earlier rules only those that deny need a check: any other
 * rule that decided a call has already ended the search.
 */
export function toolsDeniedToAll({ rules, agents, tools }: CompiledPolicy, agentId: string): (tool: string) => boolean {
  const ofAgent = agents.rulesOf(agentId);
  return (tool) => {
    const named = tools.rulesOf(tool);
    keepCommon(named, ofAgent);
    const denying: CompiledRule[] = [];
    for (let at = nextRule(named, 0); at !== -1; at = nextRule(named, at + 1)) {
      const rule = rules[at];
      if (rule === undefined) break;
      const least = {
        body_bytes: Math.max(rule.bytes_min, BYTES_LEAST),
        rate: Math.max(rule.rate_above + 1, RATE_LEAST),
      };
      if (rule.verdict.action === "deny") denying.push(rule);
      else if (!denying.some((earlier) => hasReached(earlier, least))) return false;
    }
    return true;
  };
}

/** Rules of one policy as bits, by their positions from 0, so that hundreds of rules are handled at once. */
export type RuleSet = Uint32Array;

export function createRuleSet(rules: number): RuleSet {
  return new Uint32Array(Math.ceil(rules / 32));
}

export function addRule(set: RuleSet, rule: number): void {
  set[rule >>> 5] = (set[rule >>> 5] ?? 0) | (1 << (rule & 31));
}

/** Removes from `set` what is not in `other`. */
export function keepCommon(set: RuleSet, other: RuleSet): void {
  for (let at = 0; at < set.length; at++) set[at] = (set[at] ?? 0) & (other[at] ?? 0);
}

/** The first rule of the set at or after `from`; -1 when there is none. */
export function nextRule(set: RuleSet, from: number): number {
  for (let at = from; at < 32 * set.length; at++) {
    const word = set[at >>> 5] ?? 0;
    if (word === 0) at |= 31;
    else if ((word & (1 << (at & 31))) !== 0) return at;
  }
  return -1;
}

/** Which rules name a text, by the text itself or by its start. */
interface Names {
  /** The rules that name the text, and the rules that name none, which match any. No rule names null. */
  rulesOf(text: string | null): RuleSet;
}

/** @param count of the rules that are added */
export function indexNames(count: number) {
  const anyText = createRuleSet(count);
  /** The rules that have each name, and each start of a name without its `*`. */
  const [names, starts] = [new Map<string, number[]>(), new Map<string, number[]>()];
  return {
    /** @param list with `*` at the end of a start; empty: any text */
    add(list: readonly string[], rule: number): void {
      if (list.length === 0) addRule(anyText, rule);
      for (const entry of list) {
        const isStart = entry.endsWith("*");
        const [index, text] = isStart ? [starts, entry.slice(0, -1)] : [names, entry];
        const rules = index.get(text);
        if (rules === undefined) index.set(text, [rule]);
        else rules.push(rule);
      }
    },
    made(): Names {
      const lengths = [...new Set([...starts.keys()].map(({ length }) => length))];
      return {
        rulesOf(text) {
          const named = anyText.slice();
          if (text === null) return named;
          addAll(named, names.get(text));
          for (const length of lengths) {
            if (length <= text.length) addAll(named, starts.get(text.slice(0, length)));
          }
          return named;
        },
      };
    },
  };
}

function addAll(set: RuleSet, rules: readonly number[] = []): void {
  for (const rule of rules) addRule(set, rule);
}
