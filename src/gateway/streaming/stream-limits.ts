// Concurrency limits of the streaming path. Each agent has as many places for calls as on the transactional path,
// counted apart, so that neither path holds up the other. Messages that are not calls (a notification, the answer to a
// question of a running call, an event stream) have places of their own: a call that waits for them can't keep them
// out.

import { Fault } from "../../core/fault.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairQueue, createFairShare, enter, type FairShareOptions } from "../../kernel/share.ts";
import type { StreamPermit } from "./service.ts";

const RETRY_AFTER_SECONDS = 5;

export interface StreamLimitsOptions {
  /** Calls of one agent at once; a function where that changes. */
  readonly agentConcurrency: number | (() => number);
  /** Aborted when nobody is let in any more. */
  readonly stopping: AbortSignal;
  /** Tests shorten it. */
  readonly waitMs?: number;
}

export function createStreamLimits({ agentConcurrency, stopping, waitMs = MAX.streamWaitMs }: StreamLimitsOptions) {
  const waits = { waitMs, stopping };
  const calls = createPlaces({ size: MAX.runningStreams, agentMax: agentConcurrency }, waits);
  const others = createPlaces({ size: MAX.mcpConnections, agentMax: MAX.agentMcpConnections }, waits);
  const beside = createFairShare({ size: MAX.resumedStreams });
  return {
    /**
     * Waits up to `waitMs` for a place.
     *
     * @throws Fault `unavailable` when there is none, or the caller has gone
     */
    take: (tenant: string, agentId: string, isCall: boolean, signal: AbortSignal) =>
      (isCall ? calls : others).take(tenant, agentId, signal),
    /** Each agent may run more calls than before. */
    raised: (): Promise<void> => calls.raised(),
    /**
     * A place for a call that was accepted before. If all places are taken it gets one outside the limit, so it neither
     * waits nor takes the place of another call.
     *
     * @throws Fault `unavailable` when the tenant has very many of them
     */
    forResumed(tenant: string, agentId: string): StreamPermit {
      const ordinary = calls.takeNow(tenant, agentId);
      if (ordinary !== null) return ordinary;
      if (beside.take(tenant) !== null) throw full();
      return once(() => beside.giveBack(tenant));
    },
  };
}

export type StreamLimits = ReturnType<typeof createStreamLimits>;

interface Waits {
  readonly waitMs: number;
  readonly stopping: AbortSignal;
}

function createPlaces(size: Pick<FairShareOptions, "size" | "agentMax">, { waitMs, stopping }: Waits) {
  const queue = createFairQueue(createFairShare(size));
  const waiting = createFairShare({ size: MAX.streamsWaiting, agentMax: MAX.agentStreamsWaiting });

  const placeOf = (tenant: string, agent: string) => once(() => queue.giveBack(tenant, agent, 1));

  async function wait(tenant: string, agent: string, callerSignal: AbortSignal): Promise<void> {
    const end = new AbortController();
    const giveUp = () => end.abort(full());
    const timer = setTimeout(giveUp, waitMs);
    for (const signal of [callerSignal, stopping]) signal.addEventListener("abort", giveUp, { once: true });
    try {
      await enter(queue, { tenant, agent, amount: 1 }, end.signal);
    } finally {
      clearTimeout(timer);
      for (const signal of [callerSignal, stopping]) signal.removeEventListener("abort", giveUp);
    }
  }

  return {
    async take(tenant: string, agent: string, callerSignal: AbortSignal): Promise<StreamPermit> {
      if (callerSignal.aborted || stopping.aborted) throw full();
      if (!queue.takeNow(tenant, agent, 1)) {
        if (waiting.take(tenant, agent) !== null) throw full();
        try {
          await wait(tenant, agent, callerSignal);
        } finally {
          waiting.giveBack(tenant, agent);
        }
      }
      return placeOf(tenant, agent);
    },
    raised: () => queue.serveEach(),
    takeNow: (tenant: string, agent: string): StreamPermit | null =>
      queue.takeNow(tenant, agent, 1) ? placeOf(tenant, agent) : null,
  };
}

/** A second release does nothing. */
function once(release: () => void): StreamPermit {
  let isHeld = true;
  return {
    release() {
      if (isHeld) release();
      isHeld = false;
    },
  };
}

function full(): Fault {
  const detail = { retryAfterSeconds: RETRY_AFTER_SECONDS };
  return new Fault("unavailable", "too many calls of this agent are running", detail);
}
