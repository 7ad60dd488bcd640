// Which rules name a text, by the text itself or by its start. The lists of all rules make one index, so that an answer
// takes two searches for any number and length of lists. Sorted lists and no maps: a map that grows past a hundred
// thousand texts blocks the event loop for 10 ms and more, each time (measured).
import type { Pace } from "../../concurrency/pace.ts";
import type { Steps } from "../../concurrency/steps.ts";
import { addRule, createRuleSet, type RuleSet } from "./rule-bits.ts";

export interface Names {
  /** The rules that name the text, and those that name none, which match any. Null is named by none. */
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

/** Sorted by code units, which is how texts compare. */
function once(texts: string[]): string[] {
  return texts.sort(byCodeUnits).filter((text, at) => text !== texts[at - 1]);
}

/** The prefixes, without those that start with another of them. */
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
 * In sorted order, everything between a prefix and the text starts with that prefix too. So all prefixes of the text
 * are among those of the last entry that is not greater than the text.
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
