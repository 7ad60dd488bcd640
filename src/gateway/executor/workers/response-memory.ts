// Limits the memory for captured answers of a worker. Short answers are free. A longer one first takes a slot as large
// as all it may ever need, and is not read on before it has it. So no answer that has begun waits for another that has,
// and a waiting one loses nothing but time, up to its own deadline.

import { type AnswerReadAhead, createReadAhead } from "../../../http/client/read-ahead.ts";
import { MAX } from "../../../kernel/limits.ts";
import { createFairQueue, createFairShare, enter, type FairQueue } from "../../../kernel/share.ts";
import type { StopSignal } from "../../../kernel/wait.ts";

/** Answers up to this length are short. */
export const FREE_BYTES = 16 * 1024;
/** Most answers that are not short are no longer than this. */
const USUAL_BYTES = 256 * 1024;
/** What is captured, and the slack that the exchange of an id needs. */
const CAPTURED_BYTES = MAX.capturedBytes + 8 * 1024;

/** Slots of one size: an answer of more than `above` bytes needs one. */
interface SlotsOfSize {
  readonly above: number;
  readonly slots: FairQueue;
}

/** What one call holds. */
export class MemoryHold {
  readonly tenant: string;
  readonly agentId: string;
  /** Bytes that arrive while the answer waits for its slot. */
  readonly ahead: AnswerReadAhead;
  readonly #sizes: readonly SlotsOfSize[];
  readonly #signal: StopSignal;
  #held = 0;

  /** @param signal its reason ends a wait */
  constructor(
    tenant: string,
    agentId: string,
    sizes: readonly SlotsOfSize[],
    ahead: AnswerReadAhead,
    signal: StopSignal,
  ) {
    this.tenant = tenant;
    this.agentId = agentId;
    this.ahead = ahead;
    this.#sizes = sizes;
    this.#signal = signal;
  }

  /** To be awaited before `bytes` in all are kept; undefined when there is nothing to wait for. */
  grow(bytes: number): Promise<void> | undefined {
    const next = this.#sizes[this.#held];
    return next === undefined || bytes <= next.above ? undefined : this.#takeUpTo(bytes);
  }

  async #takeUpTo(bytes: number): Promise<void> {
    const slot = { tenant: this.tenant, agent: this.agentId, amount: 1 };
    for (const size of this.#sizes.slice(this.#held)) {
      if (bytes <= size.above) return;
      await enter(size.slots, slot, this.#signal);
      this.#held++;
      // From here on it is read regardless of its tenant's other answers, since they may wait for its slot.
      this.ahead.exempt();
    }
  }

  release(): void {
    const held = this.#sizes.slice(0, this.#held);
    this.#held = 0;
    for (const { slots } of held) slots.giveBack(this.tenant, this.agentId, 1);
  }
}

/**
 * The share of one of `workers`, half of it for each length of answers. An answer that needs both slots takes them in
 * this order, so no circular wait is possible.
 */
export function createResponseMemory(workers: number, total = MAX.captureBytes) {
  const slots = (bytes: number) => {
    // However many workers there are, a tenant alone must not have all slots of one.
    const size = Math.max(4, Math.floor(total / workers / 2 / bytes));
    return createFairQueue(createFairShare({ size }));
  };
  const sizes = [
    { above: FREE_BYTES, slots: slots(USUAL_BYTES) },
    { above: USUAL_BYTES, slots: slots(CAPTURED_BYTES) },
  ];
  const readAhead = createReadAhead(MAX.aheadBytes / workers);
  return {
    /** @param signal its reason ends a wait */
    hold: (tenant: string, agent: string, signal: StopSignal) =>
      new MemoryHold(tenant, agent, sizes, readAhead.of(tenant), signal),
  };
}

export type ResponseMemory = ReturnType<typeof createResponseMemory>;
