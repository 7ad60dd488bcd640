// When a request begins. Requests that arrive in one turn of the event loop begin at once, for up to a few
// milliseconds; the others follow in the next turns, one tenant after the other, for as long again. So a thousand
// requests that arrive together hold up no timers and no streams, and a tenant that sends few waits behind few.
// One per thread, since a thread has one event loop, and all requests share its turns.
import { AsyncLocalStorage } from "node:async_hooks";
import { createRoundRobin } from "./round-robin.ts";

/** Includes what a request does up to its first wait, such as a query of SQLite. */
const BEGUN_MS_MAX = 8;
/** Requests that begin together before their cost is measured. */
const BEGUN_AT_ONCE = 4;
/** This many promise steps bring a request to its first wait, or far enough. */
const STEPS = 32;

const waiting = createRoundRobin<() => void>();
/** When the first request of this turn of the event loop began; null before that. */
let turnBeganAt: number | null = null;

const acting = new AsyncLocalStorage<string | null>();

/** The tenant whose request the calling code serves; null for the process's own work. The store shares its turns by it. */
export const actingTenant = (): string | null => acting.getStore() ?? null;

/** Runs `work`, with all that follows from it, for this tenant; null for work that a request only starts. */
export const actFor = <T>(tenant: string | null, work: () => T): T => acting.run(tenant, work);

/** Undefined when a request of the tenant may begin at once; else it may when this resolves. */
export function turnOf(tenant: string): Promise<void> | undefined {
  const now = performance.now();
  if (turnBeganAt === null) beginTurn(now);
  else if (waiting.size > 0 || now - turnBeganAt > BEGUN_MS_MAX) {
    return new Promise((resolve) => waiting.add(tenant, resolve));
  }
  return undefined;
}

/**
 * For work that another request has begun and this one waits for too. Thousands may wait for it, and would all go on at
 * once. So each goes on when a request of its tenant may begin.
 *
 * @throws what it rejects with
 */
export async function afterShared<T>(shared: Promise<T>, tenant: string): Promise<T> {
  try {
    return await shared;
  } finally {
    if (turnBeganAt === null) beginTurn(performance.now());
    await new Promise<void>((resolve) => waiting.add(tenant, resolve));
  }
}

function beginTurn(now: number): void {
  turnBeganAt = now;
  setImmediate(nextTurn);
}

async function nextTurn(): Promise<void> {
  turnBeganAt = null;
  if (waiting.size === 0) return;
  const began = performance.now();
  beginTurn(began);
  while (waiting.size > 0 && performance.now() - began <= BEGUN_MS_MAX) {
    for (let begun = 0; begun < BEGUN_AT_ONCE; begun++) waiting.next()?.item();
    for (let step = 0; step < STEPS; step++) await null;
  }
}
