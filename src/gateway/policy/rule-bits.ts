// Sets of rules of one policy as bits, by their positions from 0, so that hundreds of rules are handled at once.

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
    // Those before `from` are shifted out and in again as zeros.
    const shift = at === from >>> 5 ? from & 31 : 0;
    const word = ((set[at] ?? 0) >>> shift) << shift;
    if (word !== 0) return 32 * at + 31 - Math.clz32(word & -word);
  }
  return -1;
}
