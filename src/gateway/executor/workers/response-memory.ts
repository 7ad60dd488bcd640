// Limits the memory for captured answers of a worker. Short answers are free. A longer one first takes a slot as large
// as all it may ever need, and is not read on before it has it. So no answer that has begun waits for another that has,
// and a waiting one loses nothing but time, up to its own deadline. An encoded answer takes the memory of its decoders
// before any slot, with nothing else held, so no circular wait is possible.

import { createDecoderShare, type DecodedFor, type DecoderShare } from "../../../http/client/body.ts";
import { type AnswerReadAhead, ReadAhead } from "../../../http/client/exchange.ts";
import { MAX } from "../../../kernel/limits.ts";
import { createFairQueue, createFairShare, enter, type FairQueue } from "../../../kernel/share.ts";
import { type StopSignal, untilFirst } from "../../../kernel/wait.ts";

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
export class MemoryHold implements DecodedFor {
  readonly tenant: string;
  readonly agent: string;
  /** Bytes that arrive while the answer waits for its slot. */
  readonly ahead: AnswerReadAhead;
  readonly #memory: ResponseMemory;
  readonly #signal: StopSignal;
  #held = 0;

  constructor(memory: ResponseMemory, tenant: string, agent: string, signal: StopSignal) {
    this.tenant = tenant;
    this.agent = agent;
    this.ahead = memory.readAhead.of(tenant);
    this.#memory = memory;
    this.#signal = signal;
  }

  /** To be awaited before `bytes` in all are kept; undefined when there is nothing to wait for. */
  grow(bytes: number): Promise<void> | undefined {
    const next = this.#memory.sizes[this.#held];
    return next === undefined || bytes <= next.above ? undefined : this.#takeUpTo(bytes);
  }

  async #takeUpTo(bytes: number): Promise<void> {
    const slot = { tenant: this.tenant, agent: this.agent, amount: 1 };
    for (const size of this.#memory.sizes.slice(this.#held)) {
      if (bytes <= size.above) return;
      await enter(size.slots, slot, this.#signal);
      this.#held++;
      // From here on it is read regardless of its tenant's other answers, since they may wait for its slot.
      this.ahead.exempt();
    }
  }

  async decoderMemory(bytes: number, closing: StopSignal, giveWay: () => void): Promise<() => void> {
    const giveBack = await untilFirst([closing, this.#signal], (signal) =>
      this.#memory.decoders.take(this, bytes, signal, giveWay),
    );
    this.ahead.exempt();
    return giveBack;
  }

  release(): void {
    const held = this.#memory.sizes.slice(0, this.#held);
    this.#held = 0;
    for (const { slots } of held) slots.giveBack(this.tenant, this.agent, 1);
  }
}

/** The memory of one of several workers. */
export class ResponseMemory {
  /** Half of what there is for each length. An answer that needs both takes them in this order, so none waits in a circle. */
  readonly sizes: readonly SlotsOfSize[];
  readonly readAhead: ReadAhead;
  readonly decoders: DecoderShare;

  constructor(workers: number, total = MAX.captureBytes) {
    const slots = (bytes: number) => {
      // However many workers there are, a tenant alone must not have all slots of one.
      const size = Math.max(4, Math.floor(total / workers / 2 / bytes));
      return createFairQueue(createFairShare({ size }));
    };
    this.sizes = [
      { above: FREE_BYTES, slots: slots(USUAL_BYTES) },
      { above: USUAL_BYTES, slots: slots(CAPTURED_BYTES) },
    ];
    this.readAhead = new ReadAhead(MAX.aheadBytes / workers);
    this.decoders = createDecoderShare(Math.max(MAX.decoderBytes / workers, MAX.workerDecoderBytes));
  }

  /** @param signal its reason ends a wait */
  hold(tenant: string, agent: string, signal: StopSignal): MemoryHold {
    return new MemoryHold(this, tenant, agent, signal);
  }
}
