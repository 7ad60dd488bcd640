// Evaluates a policy for a call: the first rule that matches decides, then the default. A document is compiled once per
// version, in steps, since its tenant chooses its size. After that a call or a tool costs the same for lists of any
// length: the rules that name an agent or a tool are found by two searches in an index of all lists, and sets of rules are
// bits. Pure.

import type { PolicyAction, Protocol } from "../../core/states.ts";
import type { Steps } from "../../kernel/turns.ts";
import { createPace, type Pace } from "../../kernel/turns.ts";
import type { PolicyReplace, Rule } from "./document.ts";

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

export function haveCommon(one: RuleSet, other: RuleSet): boolean {
  for (let at = 0; at < one.length; at++) if (((one[at] ?? 0) & (other[at] ?? 0)) !== 0) return true;
  return false;
}

/** The first rule of the set at or after `from`; -1 when there is none. */
export function nextRule(set: RuleSet, from: number): number {
  for (let at = from >>> 5; at < set.length; at++) {
    // The bits before `from` are shifted out and in again as zeros.
    const shift = at === from >>> 5 ? from & 31 : 0;
    const word = ((set[at] ?? 0) >>> shift) << shift;
    if (word !== 0) return 32 * at + 31 - Math.clz32(word & -word);
  }
  return -1;
}

/**
 * Which rules name a text, by the text itself or by its start. The index is sorted lists, not a map: a map that grows past a
 * hundred thousand texts blocks the event loop for 10 ms and more, each time (measured).
 */
interface Names {
  /** The rules that name the text, and the rules that name none, which match any. No rule names null. */
  rulesOf(text: string | null): RuleSet;
}

/** The work for an entry, without its characters. */
const ENTRY_WORK = 200;

interface NamedRules {
  readonly text: string;
  /** The rules that have it, in their order. */
  readonly rules: readonly number[];
}

/** A prefix of names, and the longest shorter prefix that it starts with. */
interface Prefix extends NamedRules {
  readonly shorter: Prefix | null;
}

/** @param lists of each rule, with `*` at the end of a start; empty: any text */
export function* indexNames(lists: readonly (readonly string[])[], pace: Pace): Steps<Names> {
  const anyText = createRuleSet(lists.length);
  const [names, starts]: [NamedRules[][], NamedRules[][]] = [[], []];
  for (const [rule, list] of lists.entries()) {
    if (list.length === 0) addRule(anyText, rule);
    const rules = [rule];
    const toEntry = (text: string): NamedRules => ({ text, rules });
    names.push(once(list.filter((text) => !text.endsWith("*"))).map(toEntry));
    starts.push(shortest(list.filter((text) => text.endsWith("*"))).map(toEntry));
    if (pace(list.reduce((work, text) => work + ENTRY_WORK + text.length, ENTRY_WORK))) yield;
  }
  const exact = yield* merged(names, pace);
  const prefixes = yield* linked(yield* merged(starts, pace), pace);
  return {
    rulesOf(text) {
      const named = anyText.slice();
      if (text === null) return named;
      const name = lastUpTo(exact, text);
      if (name?.text === text) addAll(named, name.rules);
      for (let at = longestPrefix(prefixes, text); at !== null; at = at.shorter) addAll(named, at.rules);
      return named;
    },
  };
}

function addAll(set: RuleSet, rules: readonly number[]): void {
  for (const rule of rules) addRule(set, rule);
}

/** Each text once, sorted by code units, which is how texts compare. */
function once(texts: string[]): string[] {
  return texts.sort(byCodeUnits).filter((text, at) => text !== texts[at - 1]);
}

/** The prefixes, without any that starts with another one. */
function shortest(entries: readonly string[]): string[] {
  const kept: string[] = [];
  for (const start of entries.map((entry) => entry.slice(0, -1)).sort(byCodeUnits)) {
    const last = kept.at(-1);
    // In sorted order, all texts with a prefix follow right after it.
    if (last === undefined || !start.startsWith(last)) kept.push(start);
  }
  return kept;
}

function byCodeUnits(one: string, other: string): number {
  return one < other ? -1 : 1;
}

/** Merges sorted lists into one, each text once, with all rules that have it. */
function* merged(lists: readonly NamedRules[][], pace: Pace): Steps<readonly NamedRules[]> {
  let round = lists.filter((list) => list.length > 0);
  while (round.length > 1) {
    const next: NamedRules[][] = [];
    for (let at = 0; at < round.length; at += 2) {
      next.push(yield* mergedPair(round[at] ?? [], round[at + 1] ?? [], pace));
    }
    round = next;
  }
  return round[0] ?? [];
}

function* mergedPair(left: readonly NamedRules[], right: readonly NamedRules[], pace: Pace): Steps<NamedRules[]> {
  const both: NamedRules[] = [];
  let [atLeft, atRight] = [0, 0];
  for (;;) {
    const [one, other] = [left[atLeft], right[atRight]];
    const entry = one === undefined || other === undefined ? (one ?? other) : first(one, other);
    if (entry === undefined) return both;
    if (entry !== other) atLeft++;
    if (entry !== one) atRight++;
    both.push(entry);
    if (pace(ENTRY_WORK + entry.text.length)) yield;
  }
}

/** The smaller of two entries, or both merged if their text is the same. */
function first(one: NamedRules, other: NamedRules): NamedRules {
  if (one.text === other.text) return { text: one.text, rules: [...one.rules, ...other.rules] };
  return one.text < other.text ? one : other;
}

function* linked(sorted: readonly NamedRules[], pace: Pace): Steps<readonly Prefix[]> {
  const prefixes: Prefix[] = [];
  let shorter: Prefix | null = null;
  for (const { text, rules } of sorted) {
    while (shorter !== null && !text.startsWith(shorter.text)) shorter = shorter.shorter;
    shorter = { text, rules, shorter };
    prefixes.push(shorter);
    if (pace(ENTRY_WORK + text.length)) yield;
  }
  return prefixes;
}

/** The last of the sorted entries that is not greater than the text. */
function lastUpTo<E extends NamedRules>(sorted: readonly E[], text: string): E | null {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if ((sorted[middle]?.text ?? "") <= text) low = middle + 1;
    else high = middle;
  }
  return sorted[low - 1] ?? null;
}

/**
 * In sorted order, everything between a prefix and the text starts with that prefix too. So every prefix of the text is
 * the last entry that is not greater than the text, or a prefix of that entry.
 */
function longestPrefix(prefixes: readonly Prefix[], text: string): Prefix | null {
  let prefix = lastUpTo(prefixes, text);
  const common = prefix === null ? 0 : commonLength(prefix.text, text);
  while (prefix !== null && prefix.text.length > common) prefix = prefix.shorter;
  return prefix;
}

function commonLength(one: string, other: string): number {
  let at = 0;
  while (at < one.length && one.charCodeAt(at) === other.charCodeAt(at)) at++;
  return at;
}
