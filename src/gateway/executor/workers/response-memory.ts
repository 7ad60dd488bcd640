// Limits the memory for captured answers of a worker. Short answers are free. A longer one first takes a place as large
// as all it may ever need, and is not read on before it has it. So no answer that has begun waits for another that has,
// and a waiting one loses nothing but time, up to its own deadline.

import { createFairQueue, enter, type FairQueue } from "../../../concurrency/fair-queue.ts";
import { createFairShare } from "../../../concurrency/fair-share.ts";
import type { StopSignal } from "../../../concurrency/stop.ts";
import { CAPTURE_BYTES_MAX } from "../../../core/limits.ts";
import { type AnswerReadAhead, createReadAhead } from "../../../http/client/read-ahead.ts";

/** Answers up to this length are short. */
export const FREE_BYTES = 16 * 1024;
/** Most answers that are not short are no longer than this. */
const USUAL_BYTES = 256 * 1024;
/** What is captured, and the slack that the exchange of an id needs. */
const CAPTURED_BYTES = CAPTURE_BYTES_MAX + 8 * 1024;
/** Of all workers together. */
const TOTAL_BYTES = 112 * 1024 * 1024;
/** Bytes that arrive before an answer has its place, of all workers together. */
const AHEAD_BYTES = 48 * 1024 * 1024;
/** However many workers there are, a tenant alone must not have all places of one. */
const PLACES_MIN = 4;

interface Step {
  readonly above: number;
  readonly room: FairQueue;
}

/** What one call holds. */
export class MemoryHold {
  readonly tenant: string;
  readonly agentId: string;
  /** Bytes that arrive while the answer waits for its place. */
  readonly ahead: AnswerReadAhead;
  readonly #steps: readonly Step[];
  readonly #signal: StopSignal;
  #held = 0;

  /** @param signal its reason ends a wait */
  constructor(tenant: string, agentId: string, steps: readonly Step[], ahead: AnswerReadAhead, signal: StopSignal) {
    this.tenant = tenant;
    this.agentId = agentId;
    this.ahead = ahead;
    this.#steps = steps;
    this.#signal = signal;
  }

  /** To be awaited before `bytes` in all are kept; undefined when there is nothing to wait for. */
  grow(bytes: number): Promise<void> | undefined {
    const next = this.#steps[this.#held];
    return next === undefined || bytes <= next.above ? undefined : this.#takeUpTo(bytes);
  }

  async #takeUpTo(bytes: number): Promise<void> {
    const place = { tenant: this.tenant, agent: this.agentId, amount: 1 };
    for (const step of this.#steps.slice(this.#held)) {
      if (bytes <= step.above) return;
      await enter(step.room, place, this.#signal);
      this.#held++;
      // From here on it is read regardless of its tenant's other answers, since they may wait for its place.
      this.ahead.exempt();
    }
  }

  release(): void {
    const held = this.#steps.slice(0, this.#held);
    this.#held = 0;
    for (const { room } of held) room.giveBack(this.tenant, this.agentId, 1);
  }
}

/**
 * The share of one of `workers`, half of it for each length of answers. An answer that needs both places takes them in
 * this order, so no circular wait is possible.
 */
export function createResponseMemory(workers: number, total = TOTAL_BYTES) {
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
    /** @param signal its reason ends a wait */
    hold: (tenant: string, agent: string, signal: StopSignal) =>
      new MemoryHold(tenant, agent, steps, readAhead.of(tenant), signal),
  };
}

export type ResponseMemory = ReturnType<typeof createResponseMemory>;
