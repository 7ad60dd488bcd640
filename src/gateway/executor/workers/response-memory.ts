// How much memory the answers that a worker is reading may take, which is what is captured of them. Short ones are free.
// A longer one first takes a place that is as large as all it may come to need, and is not read on before it has that:
// so nobody who has begun waits for somebody else who has, and who waits loses nothing but time, up to its own deadline.
import { createFairQueue, enter, type FairQueue } from "../../../concurrency/fair-queue.ts";
import { createFairShare } from "../../../concurrency/fair-share.ts";
import { CAPTURE_BYTES_MAX } from "../../../core/limits.ts";
import { type AnswerReadAhead, createReadAhead } from "../../../http/read-ahead.ts";

/** What one call holds. */
export interface MemoryHold {
  readonly tenant: string;
  readonly agentId: string;
  /** To be awaited before `bytes` in all are kept; undefined when there is nothing to wait for. */
  grow(bytes: number): Promise<void> | undefined;
  /** What comes of the answer while that is waited for. */
  readonly ahead: AnswerReadAhead;
  release(): void;
}

export interface ResponseMemory {
  /** @param signal its reason ends a wait */
  hold(tenant: string, agentId: string, signal: AbortSignal): MemoryHold;
}

/** Answers up to this length are short. */
export const FREE_BYTES = 16 * 1024;
/** Most answers that are not short are no longer than this. */
const USUAL_BYTES = 256 * 1024;
/** What is captured, and the slack that the exchange of an id needs. */
const CAPTURED_BYTES = CAPTURE_BYTES_MAX + 8 * 1024;
/** Of all workers together. */
const TOTAL_BYTES = 112 * 1024 * 1024;
/** What comes of answers before they have a place, again of all workers together. */
const AHEAD_BYTES = 48 * 1024 * 1024;
/** However many workers there are, a tenant alone must not have all places of one. */
const PLACES_MIN = 4;

/**
 * The share of one of `workers`, half of it for each length of answers. Who needs more than one place takes them in this
 * order, so none waits for another in a circle.
 */
export function createResponseMemory(workers: number, total = TOTAL_BYTES): ResponseMemory {
  const room = (bytes: number) => {
    const size = Math.max(PLACES_MIN, Math.floor(total / workers / 2 / bytes));
    return createFairQueue(createFairShare({ size }));
  };
  const steps = [
    { above: FREE_BYTES, room: room(USUAL_BYTES) },
    { above: USUAL_BYTES, room: room(CAPTURED_BYTES) },
  ];
  const readAhead = createReadAhead(AHEAD_BYTES / workers);
  return {
    hold(tenant, agent, signal) {
      const ahead = readAhead.of(tenant);
      const held: FairQueue[] = [];
      const place = { tenant, agent, amount: 1 };
      async function takeUpTo(bytes: number): Promise<void> {
        for (const step of steps.slice(held.length)) {
          if (bytes <= step.above) return;
          await enter(step.room, place, signal);
          held.push(step.room);
          // It is read whatever the others of its tenant do: they may wait for what it holds.
          ahead.exempt();
        }
      }
      return {
        tenant,
        agentId: agent,
        ahead,
        grow(bytes) {
          const next = steps[held.length];
          return next === undefined || bytes <= next.above ? undefined : takeUpTo(bytes);
        },
        release() {
          for (const room of held.splice(0)) room.giveBack(tenant, agent, 1);
        },
      };
    },
  };
}
