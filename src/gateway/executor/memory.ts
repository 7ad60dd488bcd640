// How much memory the answers that a worker is reading may take. Short answers are free. A longer one first takes
// a place that is as large as all it may come to need, and is not read on before it has that: so nobody who has
// begun waits for somebody else who has, and who waits loses nothing but time, up to its own deadline.
import { CAPTURE_BYTES_MAX } from "../../core/limits.ts";
import { createPlaces } from "../../core/places.ts";

/** What one call holds. */
export interface Hold {
  /** To be awaited before `bytes` in all are kept; undefined when there is nothing to wait for. */
  grow(bytes: number): Promise<void> | undefined;
  release(): void;
}

export interface Memory {
  /** @param signal its reason ends a wait */
  hold(agentId: string, signal: AbortSignal): Hold;
}

const FREE_BYTES = 64 * 1024;
/** Most answers that are not short are no longer than this. */
const USUAL_BYTES = 256 * 1024;
/** What is captured, and the slack that the exchange of an id needs. */
const CAPTURED_BYTES = CAPTURE_BYTES_MAX + 1024;
/** One agent gets this part of the places at most. */
const AGENT_SHARE = 4;
const TOTAL_BYTES = 768 * 1024 * 1024;

interface Room {
  /** Undefined when there was a place at once. */
  enter(agentId: string, signal: AbortSignal): Promise<void> | undefined;
  leave(agentId: string): void;
}

interface Waiting {
  readonly agentId: string;
  readonly enter: () => void;
}

/** First come, first served, but no agent holds so many places that the others find none. */
function createRoom(size: number): Room {
  const places = createPlaces({
    per_agent: Math.ceil(size / AGENT_SHARE),
    in_all: size,
    body_bytes: Number.MAX_SAFE_INTEGER,
  });
  const queue = new Set<Waiting>();

  function admit(): void {
    for (const waiting of queue) {
      if (places.full()) return;
      if (places.take(waiting.agentId, 0) !== "taken") continue;
      queue.delete(waiting);
      waiting.enter();
    }
  }

  return {
    enter(agentId, signal) {
      if (places.take(agentId, 0) === "taken") return undefined;
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      const giveUp = () => {
        queue.delete(waiting);
        reject(signal.reason);
      };
      const enter = () => {
        signal.removeEventListener("abort", giveUp);
        resolve();
      };
      const waiting: Waiting = { agentId, enter };
      queue.add(waiting);
      signal.addEventListener("abort", giveUp, { once: true });
      if (signal.aborted) giveUp();
      return promise;
    },
    leave(agentId) {
      places.release(agentId, 0);
      admit();
    },
  };
}

/**
 * The share of one of `workers`, a third of it for each length of answers, the last one for messages in event
 * streams, which must be had whole. Who needs more than one takes them in this order, so none waits for another
 * in a circle.
 */
export function createMemory(workers: number, messageBytesMax: number, total = TOTAL_BYTES): Memory {
  const room = (bytes: number) => createRoom(Math.max(1, Math.floor(total / workers / 3 / bytes)));
  const steps = [
    { above: FREE_BYTES, room: room(USUAL_BYTES) },
    { above: USUAL_BYTES, room: room(CAPTURED_BYTES) },
    { above: CAPTURED_BYTES, room: room(messageBytesMax) },
  ];
  return {
    hold(agentId, signal) {
      const held: Room[] = [];
      async function enter(bytes: number): Promise<void> {
        for (const step of steps.slice(held.length)) {
          if (bytes <= step.above) return;
          await step.room.enter(agentId, signal);
          held.push(step.room);
        }
      }
      return {
        grow(bytes) {
          const next = steps[held.length];
          return next === undefined || bytes <= next.above ? undefined : enter(bytes);
        },
        release() {
          for (const room of held.splice(0)) room.leave(agentId);
        },
      };
    },
  };
}
