// When a request begins. Those that come in one turn of the event loop are begun at once for as long as a few
// milliseconds; the others follow in the next turns, one tenant after the other. So a thousand requests that come
// together hold up nobody's timers and streams, and a tenant that sends few waits behind few.
import { createRoundRobin } from "../core/round-robin.ts";

/** What follows a request's begin up to its first wait, such as a query of SQLite, counts too. */
const BEGUN_MS_MAX = 8;
/** How long those will take that waited is not known before they have begun. */
const BEGUN_AFTER_WAIT_MAX = 4;

const waiting = createRoundRobin<() => void>();
/** When the first request of this turn of the event loop began; null before that. */
let turnBeganAt: number | null = null;

/** Undefined when a request of the tenant may begin at once; else it may when this resolves. */
export function turnOf(tenant: string): Promise<void> | undefined {
  const now = performance.now();
  if (turnBeganAt === null) begin(now);
  else if (waiting.size > 0 || now - turnBeganAt > BEGUN_MS_MAX) {
    return new Promise((resolve) => waiting.add(tenant, resolve));
  }
  return undefined;
}

function begin(now: number): void {
  turnBeganAt = now;
  setImmediate(nextTurn);
}

function nextTurn(): void {
  turnBeganAt = null;
  if (waiting.size === 0) return;
  begin(performance.now());
  for (let begun = 0; begun < BEGUN_AFTER_WAIT_MAX; begun++) waiting.next()?.item();
}
