// The observed rate: how many calls of one caller to one agent came in the last 60 seconds, this one included. It
// is counted for every caller, whether or not a rule asks for it, since a policy that is put now judges by the
// minute before it. Exact to the millisecond: a call 60,000 ms ago is not counted any more, so that a caller who
// calls evenly N times a minute is observed at N. Calls of one millisecond share an entry, so a caller's memory
// is bounded at any rate. Each replica counts what it sees itself; from when a rule asks for the rate, several count
// together (shared-rate.ts), and each adds the calls that it saw by itself before.

import { tenantCache } from "../../concurrency/tenant-cache.ts";

export const RATE_WINDOW_MS = 60_000;
/** Callers that are kept. Beyond its share a tenant loses some of its own, which are then counted from zero. */
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

/**
 * @param now milliseconds of a clock that never goes back
 */
export function createCallRates(now: () => number = () => performance.now(), callersMax: number = CALLERS_MAX) {
  const known = tenantCache<string, Calls>(callersMax);

  function callsOf(tenant: string, key: string): Calls {
    const kept = known.get(key);
    if (kept !== undefined) return kept;
    const calls = { times: [], counts: [], first: 0, total: 0 };
    known.set(tenant, key, calls);
    return calls;
  }

  return {
    /** Counts a call and gives the rate with it. */
    observe(tenant: string, agentId: string, user: string): number {
      const at = Math.floor(now());
      // An agent belongs to one tenant, so its ID names both.
      const calls = callsOf(tenant, `${agentId} ${user}`);
      forget(calls, at - RATE_WINDOW_MS);
      add(calls, at);
      return calls.total;
    },
    /** The rate as it is without another call. */
    observed(agentId: string, user: string): number {
      const calls = known.get(`${agentId} ${user}`);
      if (calls === undefined) return 0;
      forget(calls, Math.floor(now()) - RATE_WINDOW_MS);
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
  // The arrays are cut when most entries are too old, so that the average cost per call stays constant.
  if (calls.first > 32 && calls.first * 2 > times.length) {
    calls.times = times.slice(calls.first);
    calls.counts = counts.slice(calls.first);
    calls.first = 0;
  }
}
