// The memory of all decoders of the process, in all threads, shared out by tenant first. An answer of a few hundred bytes
// can make its decoder hold 16 MiB for as long as it stays open. So nobody decodes before the memory is granted, and a
// tenant that holds more than its part gives way when others wait: see concurrency/commons.ts.

import { Commons } from "../concurrency/commons.ts";
import type { StopSignal } from "../concurrency/stop.ts";

export interface DecoderShare {
  /**
   * Resolves when so many bytes may be held, with a function that gives them back, to be called once.
   *
   * @param signal its reason ends the wait
   * @param giveWay called once when others need them: they are to be given back soon
   */
  take(tenant: string, agent: string, bytes: number, signal: StopSignal, giveWay: () => void): Promise<() => void>;
}

const DECODER_BYTES_MAX = 192 * 1024 * 1024;

export function createDecoderShare(size = DECODER_BYTES_MAX): DecoderShare {
  const commons = new Commons({ size });
  return {
    async take(tenant, agent, bytes, signal, giveWay) {
      signal.throwIfAborted();
      const stake = commons.stake(tenant, agent);
      stake.giveWay = giveWay;
      await stake.take(bytes, signal);
      return () => stake.giveBack();
    },
  };
}
