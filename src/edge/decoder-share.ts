// The memory of all decoders of the process, whichever thread they work in, shared out by tenant first. An answer of a
// few hundred bytes can make its decoder hold 16 MiB for as long as it stays open, so nobody decodes before this is had.
import { createFairQueue, enter } from "../core/fair-queue.ts";
import { createFairShare } from "../core/fair-share.ts";

export interface DecoderShare {
  /**
   * Resolves when so many bytes may be held, with what gives them back, once.
   *
   * @param signal its reason ends the wait
   */
  take(tenant: string, agent: string, bytes: number, signal: AbortSignal): Promise<() => void>;
}

const DECODER_BYTES_MAX = 192 * 1024 * 1024;

export function createDecoderShare(size = DECODER_BYTES_MAX): DecoderShare {
  const queue = createFairQueue(createFairShare({ size, least: 0 }));
  return {
    async take(tenant, agent, amount, signal) {
      signal.throwIfAborted();
      await enter(queue, { tenant, agent, amount }, signal);
      let isHeld = true;
      return () => {
        if (isHeld) queue.giveBack(tenant, agent, amount);
        isHeld = false;
      };
    },
  };
}
