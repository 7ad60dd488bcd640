// The observed rate where several replicas see calls of one caller: each asks the database for all of its waiting calls at
// once. Only callers whose policy has a rule on the rate are counted so; the others cost nothing more than memory.
import { createGathering } from "../../concurrency/gathered.ts";
import { within } from "../../storage/failures.ts";
import type { Store } from "../../storage/store.ts";
import { createCallRates } from "./observed-rate.ts";
import { type CallsOfCaller, countCalls } from "./shared-calls.ts";

type CallingUser = Omit<CallsOfCaller, "count">;

/** So late the answer may be there already, and the process only stood still. */
const STOOD_STILL_MS = 250;

function createSharedCallRates(execute: Store["execute"]) {
  const counting = countCalls();
  const questions = createGathering(async (caller: CallingUser, count) => {
    const rate = await execute(counting, { ...caller, count });
    return (place) => rate - count + place + 1;
  });
  return (caller: CallingUser): Promise<number> => questions.join(`${caller.agentId} ${caller.user}`, caller);
}

/** The outcome of `work`, unless that takes more than `ms` of the time in which this process is at work. */
async function inTime<T>(ms: number, work: Promise<T>): Promise<T> {
  const startedAt = performance.now();
  try {
    return await within(ms, work);
  } catch (error) {
    if (performance.now() - startedAt < ms + STOOD_STILL_MS) throw error;
    return within(ms, work);
  }
}

/** @param now milliseconds of a clock that never goes back */
export function createObservedRates({ isShared, execute }: Pick<Store, "isShared" | "execute">, now?: () => number) {
  const own = createCallRates(now);
  const shared = isShared ? createSharedCallRates(execute) : null;
  return {
    /**
     * Counts a call and gives the rate with it: at once, if nobody asks for what others have counted. Calls that were
     * counted here alone, before there was a rule, are in it too.
     *
     * @param sharedMsMax how long it may take to count it with those of others; null: nobody asks for these
     * @throws Fault `unavailable`, as rejection, when it can't be counted with those of others
     */
    observe({ tenant, agentId, user }: CallingUser, sharedMsMax: number | null): Bun.MaybePromise<number> {
      if (shared === null || sharedMsMax === null) return own.observe(tenant, agentId, user);
      return inTime(sharedMsMax, shared({ tenant, agentId, user })).then(
        (rate) => rate + own.observed(agentId, user),
        (error) => {
          own.observe(tenant, agentId, user);
          throw error;
        },
      );
    },
  };
}
