// Places of the streaming path: each agent has as many for its calls as on the transactional path, and they are its
// own, so that neither path holds up the other. What is no call (a notification, the answer to a question that a
// running call asks, an event stream) has places apart, or a call that waits for an answer would keep it out.
import { Fault } from "../../core/fault.ts";
import { createPlaces, type PlaceLimits, type Places } from "../../core/places.ts";
import type { Place } from "./service.ts";

const CALLS_MAX = 4096;
const CONNECTIONS_MAX = 8192;
const AGENT_CONNECTIONS_MAX = 1024;
/** Calls that were accepted before and find no place: shared out by tenant, since one may have any number of agents. */
const OWED_MAX = 2048;
const TENANT_OWED_MAX = 512;
/** A caller holds its connection while it waits, so it does not wait for long. */
const WAIT_MS = 10_000;
const WAITING_MAX = 4096;
const AGENT_WAITING_MAX = 256;
const RETRY_AFTER_SECONDS = 5;

export interface Room {
  /**
   * Waits a little for a place.
   *
   * @throws Fault `unavailable` when there is none, or the caller has gone
   */
  take(agentId: string, isCall: boolean, signal: AbortSignal): Promise<Place>;
  /**
   * A place for a call that was accepted before: beside the others when those are taken, so that it waits for nobody
   * and takes nobody's.
   *
   * @throws Fault `unavailable` when the tenant has very many of them
   */
  owed(tenant: string, agentId: string): Place;
}

export interface RoomOptions {
  /** Calls of one agent at once. */
  readonly agentConcurrency: number;
  /** Aborted when nobody is let in any more. */
  readonly stopping: AbortSignal;
  /** Tests shorten it. */
  readonly waitMs?: number;
}

export function createRoom({ agentConcurrency, stopping, waitMs = WAIT_MS }: RoomOptions): Room {
  const bodies = Number.MAX_SAFE_INTEGER;
  const calls = { per_agent: agentConcurrency, in_all: CALLS_MAX, body_bytes: bodies };
  const others = { per_agent: AGENT_CONNECTIONS_MAX, in_all: CONNECTIONS_MAX, body_bytes: bodies };
  const waits = { waitMs, stopping };
  const beside = createPlaces({ per_agent: TENANT_OWED_MAX, in_all: OWED_MAX, body_bytes: bodies });
  const [callQueue, otherQueue] = [createQueue(calls, waits), createQueue(others, waits)];
  return {
    take: (agentId, isCall, signal) => (isCall ? callQueue : otherQueue).take(agentId, signal),
    owed(tenant, agentId) {
      const ordinary = callQueue.takeNow(agentId);
      if (ordinary !== null) return ordinary;
      if (beside.take(tenant, 0) !== "taken") throw full();
      return once(() => beside.release(tenant, 0));
    },
  };
}

interface Waiting {
  readonly agentId: string;
  enter(): void;
}

interface Waits {
  readonly waitMs: number;
  readonly stopping: AbortSignal;
}

function createQueue(limits: PlaceLimits, { waitMs, stopping }: Waits) {
  const places = createPlaces(limits);
  const waiting = new Set<Waiting>();
  const waitingOf = new Map<string, number>();

  function count(agentId: string, delta: 1 | -1): void {
    const left = (waitingOf.get(agentId) ?? 0) + delta;
    if (left === 0) waitingOf.delete(agentId);
    else waitingOf.set(agentId, left);
  }

  function placeOf(agentId: string): Place {
    return once(() => {
      places.release(agentId, 0);
      admit(places, waiting);
    });
  }

  async function wait(agentId: string, signal: AbortSignal): Promise<Place> {
    const { promise, resolve, reject } = Promise.withResolvers<void>();
    const turn = { agentId, enter: resolve };
    const giveUp = () => {
      // At once: a place that was given to it now would be nobody's.
      waiting.delete(turn);
      reject(full());
    };
    const timer = setTimeout(giveUp, waitMs);
    for (const end of [signal, stopping]) end.addEventListener("abort", giveUp, { once: true });
    waiting.add(turn);
    count(agentId, 1);
    try {
      await promise;
      return placeOf(agentId);
    } finally {
      clearTimeout(timer);
      for (const end of [signal, stopping]) end.removeEventListener("abort", giveUp);
      waiting.delete(turn);
      count(agentId, -1);
    }
  }

  return {
    async take(agentId: string, signal: AbortSignal): Promise<Place> {
      if (signal.aborted || stopping.aborted) throw full();
      const own = waitingOf.get(agentId) ?? 0;
      if (own === 0 && places.take(agentId, 0) === "taken") return placeOf(agentId);
      if (own >= AGENT_WAITING_MAX || waiting.size >= WAITING_MAX) throw full();
      return wait(agentId, signal);
    },
    takeNow: (agentId: string): Place | null =>
      places.take(agentId, 0) === "taken" ? placeOf(agentId) : null,
  };
}

/** A second release is nothing. */
function once(release: () => void): Place {
  let isHeld = true;
  return {
    release() {
      if (isHeld) release();
      isHeld = false;
    },
  };
}

/** First come, first served, as far as each one's agent has a place. */
function admit(places: Places, waiting: Set<Waiting>): void {
  for (const turn of waiting) {
    if (places.full()) return;
    if (places.take(turn.agentId, 0) !== "taken") continue;
    waiting.delete(turn);
    turn.enter();
  }
}

function full(): Fault {
  const detail = { retryAfterSeconds: RETRY_AFTER_SECONDS };
  return new Fault("unavailable", "too many calls of this agent are running", detail);
}
