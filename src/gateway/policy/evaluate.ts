// Evaluates a policy for a call: the first matching rule decides, else the default. A document is compiled once per version,
// in turns, since its tenant chooses its size. After that a call costs the same however long the lists are: an index finds
// the rules that name an agent or a tool, and sets of rules are bitsets. Pure.
import type { PolicyAction, Protocol } from "../../core/states.ts";
import { eachInTurns } from "../../kernel/turns.ts";
import { type PolicyReplace, type Rule, workOf } from "./document.ts";

export interface PolicyVerdict {
  readonly action: PolicyAction;
  /** The position of the rule, from 1; null when `default` or `on_error` decided. */
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

/** The smallest possible `tools/call`: its body is not empty, and its rate includes the call itself. */
const SMALLEST_BODY_BYTES = 1;
const SMALLEST_RATE = 1;
const ANY_RATE = -1;

/** A threshold that the document leaves out has a value that every call meets. */
interface CompiledRule {
  readonly verdict: PolicyVerdict;
  readonly bytes_min: number;
  readonly rate_above: number;
}

export interface CompiledPolicy {
  /** In order; the last one is the default, as a rule without conditions. */
  readonly rules: readonly CompiledRule[];
  readonly agents: NameIndex;
  readonly tools: NameIndex;
  readonly usesRate: boolean;
}

export async function compile(document: Pick<PolicyReplace, "default" | "rules">, tenant: string) {
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
  const usesRate = rules.some(({ rate_above }) => rate_above !== ANY_RATE);
  return { rules, agents, tools, usesRate } satisfies CompiledPolicy;
}

/** Whether any rule that applies to the agent has a rate threshold. */
export const asksForRate = ({ rules, agents, usesRate }: CompiledPolicy, agentId: string): boolean =>
  usesRate && firstOf(rules, agents.rulesOf(agentId), ({ rate_above }) => rate_above !== ANY_RATE) !== undefined;

function firstOf(rules: CompiledPolicy["rules"], set: RuleSet, test: (rule: CompiledRule) => boolean) {
  for (let at = nextRule(set, 0); at !== -1; at = nextRule(set, at + 1)) {
    const rule = rules[at];
    if (rule !== undefined && test(rule)) return rule;
  }
  return undefined;
}

const hasReached = (rule: CompiledRule, { body_bytes, rate }: Pick<EvaluatedCall, "body_bytes" | "rate">): boolean =>
  body_bytes >= rule.bytes_min && rate > rule.rate_above;

export function evaluate({ rules, agents, tools }: CompiledPolicy, call: EvaluatedCall): PolicyVerdict {
  const matching = tools.rulesOf(call.protocol === "mcp" ? call.mcp_tool : null);
  intersect(matching, agents.rulesOf(call.agent_id));
  const rule = firstOf(rules, matching, (each) => hasReached(each, call));
  if (rule === undefined) throw new Error("a policy without a default");
  return rule.verdict;
}

/**
 * Whether every call of a tool of an mcp agent is denied, whatever its size and rate. A rule's thresholds match all
 * calls at or above a smallest one, so it decides some call exactly when no earlier rule matches its smallest one. Only
 * earlier deny rules need the check: any other rule that decides a call ends the search.
 */
export function toolsDeniedToAll({ rules, agents, tools }: CompiledPolicy, agentId: string): (tool: string) => boolean {
  const ofAgent = agents.rulesOf(agentId);
  return (tool) => {
    const matching = tools.rulesOf(tool);
    intersect(matching, ofAgent);
    const denying: CompiledRule[] = [];
    const passing = firstOf(rules, matching, (rule) => {
      const smallest = {
        body_bytes: Math.max(rule.bytes_min, SMALLEST_BODY_BYTES),
        rate: Math.max(rule.rate_above + 1, SMALLEST_RATE),
      };
      const isDenying = rule.verdict.action === "deny";
      if (isDenying) denying.push(rule);
      return !isDenying && !denying.some((earlier) => hasReached(earlier, smallest));
    });
    return passing === undefined;
  };
}

/** A bitset of one policy's rules, by position from 0, so that 32 rules are handled per operation. */
export type RuleSet = Uint32Array;

export const createRuleSet = (rules: number): RuleSet => new Uint32Array(Math.ceil(rules / 32));

export function addRule(set: RuleSet, rule: number): void {
  set[rule >>> 5] = (set[rule >>> 5] ?? 0) | (1 << (rule & 31));
}

/** Intersects `set` with `other`, in place. */
export function intersect(set: RuleSet, other: RuleSet): void {
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

type NameIndex = Pick<ReturnType<typeof indexNames>, "rulesOf">;

/** An index of the rules that name a text, in full or by a prefix. @param count the number of rules in the policy */
export function indexNames(count: number) {
  const anyText = createRuleSet(count);
  /** The rules by full name, and by prefix without its `*`. */
  const [names, prefixes] = [new Map<string, number[]>(), new Map<string, number[]>()];
  const prefixLengths = new Set<number>();
  return {
    /** @param list full names, and prefixes ending in `*`; empty matches any text */
    add(list: readonly string[], rule: number): void {
      if (list.length === 0) addRule(anyText, rule);
      for (const entry of list) {
        const isPrefix = entry.endsWith("*");
        const [index, text] = isPrefix ? [prefixes, entry.slice(0, -1)] : [names, entry];
        index.getOrInsertComputed(text, () => []).push(rule);
        if (isPrefix) prefixLengths.add(text.length);
      }
    },
    /** The rules that name the text, and those with an empty list, which match any text and null. */
    rulesOf(text: string | null): RuleSet {
      const matching = anyText.slice();
      if (text === null) return matching;
      addAll(matching, names.get(text));
      for (const length of prefixLengths) {
        if (length <= text.length) addAll(matching, prefixes.get(text.slice(0, length)));
      }
      return matching;
    },
  };
}

function addAll(set: RuleSet, rules: readonly number[] = []): void {
  for (const rule of rules) addRule(set, rule);
}
