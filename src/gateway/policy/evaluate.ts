// What a policy says of a call. A document is compiled once per version into sets and thresholds, and evaluated
// for each call without making anything. Pure. Rules in order, the first that matches decides, then the default.
import type { PolicyAction, Protocol } from "../../core/states.ts";
import type { PolicyReplace, Rule } from "./document.ts";

export interface Verdict {
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

/** No `tools/call` is empty, and each counts itself. */
const BYTES_LEAST = 1;
const RATE_LEAST = 1;

/** A condition that is absent is null, or a threshold that every call passes. */
interface CompiledRule {
  readonly verdict: Verdict;
  readonly agents: ReadonlySet<string> | null;
  readonly tools: ToolNames | null;
  /** Matches a body of at least this many bytes. */
  readonly bytes_min: number;
  /** Matches a rate above this one. */
  readonly rate_above: number;
}

interface ToolNames {
  readonly exact: ReadonlySet<string>;
  /** Sorted, and none is the start of another. */
  readonly prefixes: readonly string[];
}

export interface CompiledPolicy {
  readonly rules: readonly CompiledRule[];
  readonly fallback: Verdict;
}

export function compile({
  default: action,
  rules,
}: Pick<PolicyReplace, "default" | "rules">): CompiledPolicy {
  return {
    rules: rules.map(compileRule),
    fallback: { action, matched_rule: null, reason: `default: ${action}` },
  };
}

function compileRule({ action, match }: Rule, index: number): CompiledRule {
  const { agents = [], tools = [], max_body_bytes, rate_per_min } = match;
  return {
    verdict: { action, matched_rule: index + 1, reason: `rule ${index + 1}: ${action}` },
    agents: agents.length === 0 ? null : new Set(agents),
    tools: tools.length === 0 ? null : compileTools(tools),
    bytes_min: max_body_bytes ?? 0,
    rate_above: rate_per_min ?? -1,
  };
}

function compileTools(tools: readonly string[]): ToolNames {
  const starts = tools.filter((tool) => tool.endsWith("*")).map((tool) => tool.slice(0, -1));
  const prefixes: string[] = [];
  // By code units, which is how texts compare: what starts with a prefix follows right after it.
  for (const start of starts.sort((a, b) => (a < b ? -1 : 1))) {
    const last = prefixes.at(-1);
    if (last === undefined || !start.startsWith(last)) prefixes.push(start);
  }
  return { exact: new Set(tools.filter((tool) => !tool.endsWith("*"))), prefixes };
}

export function evaluate({ rules, fallback }: CompiledPolicy, call: EvaluatedCall): Verdict {
  const tool = call.protocol === "mcp" ? call.mcp_tool : null;
  for (const rule of rules) {
    if (call.body_bytes < rule.bytes_min || call.rate <= rule.rate_above) continue;
    if (names(rule, call.agent_id, tool)) return rule.verdict;
  }
  return fallback;
}

function names({ agents, tools }: CompiledRule, agentId: string, tool: string | null): boolean {
  if (agents !== null && !agents.has(agentId)) return false;
  return tools === null || (tool !== null && includes(tools, tool));
}

function includes({ exact, prefixes }: ToolNames, tool: string): boolean {
  if (exact.has(tool)) return true;
  // Of prefixes none of which is the start of another, only the last one up to the name can be the start of it.
  let [low, high] = [0, prefixes.length];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if ((prefixes[middle] ?? "") <= tool) low = middle + 1;
    else high = middle;
  }
  const candidate = prefixes[low - 1];
  return candidate !== undefined && tool.startsWith(candidate);
}

/**
 * Whether every call of this tool of an mcp agent is denied, whatever its size and rate.
 *
 * The calls that a rule's thresholds let match are all those at or above a least one. So a rule decides any call
 * at all only when it decides its least one, which is when no rule before it matches that; and of those only the
 * ones that deny need to be looked at, since another one that decided anything has ended the search.
 */
export function toolDeniedToAll({ rules, fallback }: CompiledPolicy, agentId: string, tool: string): boolean {
  const denying: CompiledRule[] = [];
  const isOutOfReach = (bytes: number, rate: number) =>
    denying.some((rule) => rule.bytes_min <= bytes && rule.rate_above < rate);
  for (const rule of rules) {
    if (!names(rule, agentId, tool)) continue;
    if (rule.verdict.action === "deny") denying.push(rule);
    else if (!isOutOfReach(Math.max(rule.bytes_min, BYTES_LEAST), Math.max(rule.rate_above + 1, RATE_LEAST)))
      return false;
  }
  return fallback.action === "deny" || isOutOfReach(BYTES_LEAST, RATE_LEAST);
}
