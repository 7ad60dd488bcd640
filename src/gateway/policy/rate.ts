// The observed rate: how many calls of one caller to one agent came in the last 60 seconds, this one included. It
// is counted for every caller, whether or not a rule asks for it, since a policy that is put now judges by the
// minute before it. Exact to the millisecond: a call 60,000 ms ago is not counted any more, so that a caller who
// calls evenly N times a minute is observed at N. Calls of one millisecond share an entry, so a caller's memory
// is bounded at any rate. Each replica counts what it sees itself.

export const RATE_WINDOW_MS = 60_000;
/** Callers that are kept. When there are more, those that called least lately start anew. */
const CALLERS_MAX = 200_000;

/** The calls of one caller, oldest first: entry i says that `counts[i]` of them came at `times[i]`. */
interface Calls {
  times: number[];
  counts: number[];
  /** The first entry that is not too old. */
  first: number;
  /** Of the entries from the first one on. */
  total: number;
}

export interface CallRates {
  /** Counts a call and gives the rate with it. */
  observe(agentId: string, user: string): number;
}

/**
 * @param now milliseconds of a clock that never goes back
 */
export function callRates(
  now: () => number = () => performance.now(),
  callersMax: number = CALLERS_MAX,
): CallRates {
  // Two generations: who calls is moved to the young one, so all in the old one have not called since it was
  // young. An agent belongs to one tenant, so its ID names both.
  let young = new Map<string, Calls>();
  let old = new Map<string, Calls>();
  let bornAt = Number.NEGATIVE_INFINITY;

  function age(at: number): void {
    [old, young, bornAt] = [young, new Map(), at];
  }

  function callsOf(key: string, at: number): Calls {
    if (at - bornAt >= RATE_WINDOW_MS) age(at);
    const fresh = young.get(key);
    if (fresh !== undefined) return fresh;
    const calls = old.get(key) ?? { times: [], counts: [], first: 0, total: 0 };
    old.delete(key);
    if (young.size >= callersMax / 2) age(at);
    young.set(key, calls);
    return calls;
  }

  return {
    observe(agentId, user) {
      const at = Math.floor(now());
      const calls = callsOf(`${agentId} ${user}`, at);
      forget(calls, at - RATE_WINDOW_MS);
      add(calls, at);
      return calls.total;
    },
  };
}

function add(calls: Calls, at: number): void {
  const last = calls.times.length - 1;
  calls.total += 1;
  if (calls.times[last] === at) {
    calls.counts[last] = (calls.counts[last] ?? 0) + 1;
    return;
  }
  calls.times.push(at);
  calls.counts.push(1);
}

/** Drops what came at `until` or before. */
function forget(calls: Calls, until: number): void {
  const { times, counts } = calls;
  while (calls.first < times.length && (times[calls.first] ?? 0) <= until) {
    calls.total -= counts[calls.first] ?? 0;
    calls.first += 1;
  }
  // The arrays are cut when most of them is past, so that a cut is paid for by the calls that made it.
  if (calls.first > 32 && calls.first * 2 > times.length) {
    calls.times = times.slice(calls.first);
    calls.counts = counts.slice(calls.first);
    calls.first = 0;
  }
}
