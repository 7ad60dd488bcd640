// The time of day by the chain, which the token goes by: a payment is over, or not yet valid, when the chain's time says
// so, and not because a clock of ours is wrong.

import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import type { Clock } from "../core/time.ts";
import type { Chain } from "./chain.ts";
import type { NewestBlock } from "./newest-block.ts";

/** Within this difference our clock may be as right as the chain's time is known here. */
const NEAR_MS = 3000;

/** The time now lies between these, in milliseconds. */
export interface TimeSpan {
  readonly earliest: number;
  readonly latest: number;
}

/** A block's time in unix seconds, and when it was seen (performance.now): time has gone on since. */
interface TimeReading {
  readonly timestamp: number;
  readonly at: number;
}

export interface ChainTimeOptions {
  readonly chain: Pick<Chain, "sighting" | "nextTimestamp" | "isSure">;
  readonly clock: Clock;
  readonly log: Log;
}

/** It throws Fault `unavailable` when no node answers, and when those that do may stand still. */
export function createChainTime({ chain, clock, log }: ChainTimeOptions): () => Promise<TimeSpan> {
  let next: Promise<TimeReading | null> = Promise.resolve(null);
  let askedAt = Number.NEGATIVE_INFINITY;
  let isFar = false;

  async function readNext(): Promise<TimeReading | null> {
    const timestamp = await chain.nextTimestamp();
    return timestamp === null ? null : { timestamp, at: performance.now() };
  }

  /**
   * Where blocks are rare, the newest one is old, so the time that the next one would have is asked for. It is asked once
   * for all who need it, because it makes work for a node.
   */
  function askNext(): Promise<TimeReading | null> {
    if (performance.now() - askedAt >= 1000) {
      askedAt = performance.now();
      next = readNext();
    }
    return next;
  }

  function tell(differenceMs: number): void {
    const wasFar = isFar;
    // Worth telling the operator.
    isFar = Math.abs(differenceMs) > 60_000;
    const seconds = Math.round(differenceMs / 1000);
    if (isFar && !wasFar) log.warn("clock_differs_from_chain", { seconds_ahead: seconds });
    if (!isFar && wasFar) log.info("clock_agrees_with_chain");
  }

  async function timeAt({ block, at }: NewestBlock): Promise<number> {
    let time = timeOf({ timestamp: block.timestamp, at });
    if (Math.abs(clock.now() - time) > NEAR_MS) {
      const reading = await askNext();
      if (reading !== null) time = Math.max(time, timeOf(reading));
    }
    return time;
  }

  return async () => {
    // How old the newest known block may be. Its time is carried on by our own clock, so it need not be asked often.
    let time = await timeAt(await chain.sighting(10_000));
    if (!chain.isSure(time)) time = await timeAt(await chain.sighting(0));
    if (!chain.isSure(time)) throw new Fault("unavailable", "no fresh block", { retryAfterSeconds: 2 });
    const difference = clock.now() - time;
    tell(difference);
    const own = Math.abs(difference) <= NEAR_MS ? clock.now() : time;
    // A block may be seen this long after its time: by then the next one comes.
    return { earliest: Math.min(time, own), latest: Math.max(time + 2000, own) };
  };
}

function timeOf({ timestamp, at }: TimeReading): number {
  return timestamp * 1000 + (performance.now() - at);
}
