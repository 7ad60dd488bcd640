// Limits the memory for captured answers of a worker. Short answers are free. A longer one first takes a slot as large as all
// it may ever need, and is not read on before it has it. So no answer that has begun waits for another that has, and a
// waiting one loses nothing but time, up to its own deadline. An encoded answer takes the memory of its decoders before its
// slot, with nothing else held, so no circular wait is possible.

import { createDecoderShare, type DecodedFor, type DecoderShare } from "../../../http/client/body.ts";
import { type AnswerReadAhead, ReadAhead } from "../../../http/client/exchange.ts";
import { MAX } from "../../../kernel/limits.ts";
import { createFairQueue, createFairShare, enter, type FairQueue } from "../../../kernel/share.ts";
import { type StopSignal, untilFirst } from "../../../kernel/wait.ts";

/** Answers up to this length are short. */
export const FREE_BYTES = 16 * 1024;
/** What is captured, and the slack that the exchange of an id needs. */
const SLOT_BYTES = MAX.capturedBytes + 8 * 1024;

/** What one call holds. */
export class MemoryHold implements DecodedFor {
  readonly tenant: string;
  readonly agent: string;
  /** Bytes that arrive while the answer waits for its slot. */
  readonly ahead: AnswerReadAhead;
  readonly #memory: ResponseMemory;
  readonly #signal: StopSignal;
  #hasSlot = false;

  constructor(memory: ResponseMemory, tenant: string, agent: string, signal: StopSignal) {
    this.tenant = tenant;
    this.agent = agent;
    this.ahead = memory.readAhead.of(tenant);
    this.#memory = memory;
    this.#signal = signal;
  }

  /** To be awaited before `bytes` in all are kept; undefined when there is nothing to wait for. */
  grow(bytes: number): Promise<void> | undefined {
    return this.#hasSlot || bytes <= FREE_BYTES ? undefined : this.#takeSlot();
  }

  async #takeSlot(): Promise<void> {
    await enter(this.#memory.slots, { tenant: this.tenant, agent: this.agent, amount: 1 }, this.#signal);
    this.#hasSlot = true;
    // From here on it is read regardless of its tenant's other answers, since they may wait for its slot.
    this.ahead.exempt();
  }

  async decoderMemory(bytes: number, closing: StopSignal, giveWay: () => void): Promise<() => void> {
    const giveBack = await untilFirst([closing, this.#signal], (signal) =>
      this.#memory.decoders.take(this, bytes, signal, giveWay),
    );
    this.ahead.exempt();
    return giveBack;
  }

  release(): void {
    if (this.#hasSlot) this.#memory.slots.giveBack(this.tenant, this.agent, 1);
    this.#hasSlot = false;
  }
}

/** The memory of one of several workers. */
export class ResponseMemory {
  readonly slots: FairQueue;
  readonly readAhead: ReadAhead;
  readonly decoders: DecoderShare;

  constructor(workers: number, total = MAX.captureBytes) {
    // However many workers there are, a tenant alone must not have all slots of one.
    const size = Math.max(8, Math.floor(total / workers / SLOT_BYTES));
    this.slots = createFairQueue(createFairShare({ size }));
    this.readAhead = new ReadAhead(MAX.aheadBytes / workers);
    this.decoders = createDecoderShare(Math.max(MAX.decoderBytes / workers, MAX.workerDecoderBytes));
  }

  /** @param signal its reason ends a wait */
  hold(tenant: string, agent: string, signal: StopSignal): MemoryHold {
    return new MemoryHold(this, tenant, agent, signal);
  }
}
