// When a request begins. Those that come in one turn of the event loop are begun at once for as long as a few
// milliseconds; the others follow in the next turns, one tenant after the other. So a thousand requests that come
// together hold up nobody's timers and streams, and a tenant that sends few waits behind few.
import { createRoundRobin } from "../core/round-robin.ts";

/** What follows a request's begin up to its first wait, such as a query of SQLite, counts too. */
const BEGUN_MS_MAX = 8;
/** Of those that waited, in one turn: so many as have cost this long of late, for what they cost shows only afterwards. */
const BEGUN_AFTER_WAIT_MIN = 4;
const BEGUN_AFTER_WAIT_MAX = 64;
/** What one cost counts at once when it is more than was thought, and is forgotten by this part in a turn. */
const FORGOTTEN = 0.1;

const waiting = createRoundRobin<() => void>();
/** When the first request of this turn of the event loop began; null before that. */
let turnBeganAt: number | null = null;
let begun = 0;
/** Of a request, in milliseconds. */
let cost = BEGUN_MS_MAX / BEGUN_AFTER_WAIT_MIN;

/** Undefined when a request of the tenant may begin at once; else it may when this resolves. */
export function turnOf(tenant: string): Promise<void> | undefined {
  const now = performance.now();
  if (turnBeganAt === null) beginTurn(now);
  else if (waiting.size > 0 || now - turnBeganAt > BEGUN_MS_MAX) {
    return new Promise((resolve) => waiting.add(tenant, resolve));
  }
  begun++;
  return undefined;
}

function beginTurn(now: number): void {
  turnBeganAt = now;
  setImmediate(nextTurn);
}

function nextTurn(): void {
  const now = performance.now();
  if (turnBeganAt !== null && begun > 0) {
    cost = Math.max((now - turnBeganAt) / begun, cost * (1 - FORGOTTEN));
  }
  [turnBeganAt, begun] = [null, 0];
  if (waiting.size === 0) return;
  beginTurn(now);
  const most = Math.min(
    Math.max(Math.floor(BEGUN_MS_MAX / cost), BEGUN_AFTER_WAIT_MIN),
    BEGUN_AFTER_WAIT_MAX,
  );
  for (; begun < most && waiting.size > 0; begun++) waiting.next()?.item();
}
