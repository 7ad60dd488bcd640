// Places of the streaming path: each agent has as many for its calls as on the transactional path, and they are its
// own, so that neither path holds up the other. What is no call (a notification, the answer to a question that a
// running call asks, an event stream) has places apart, or a call that waits for an answer would keep it out.
import { createFairQueue, enter } from "../../concurrency/fair-queue.ts";
import { createFairShare, type FairShareOptions } from "../../concurrency/fair-share.ts";
import { Fault } from "../../core/fault.ts";
import type { StreamPermit } from "./service.ts";

const CALLS_MAX = 4096;
const CONNECTIONS_MAX = 8192;
const AGENT_CONNECTIONS_MAX = 1024;
/** Calls that were accepted before and find no place. */
const OWED_MAX = 2048;
/** A caller holds its connection while it waits, so it does not wait for long. */
const WAIT_MS = 10_000;
const WAITING_MAX = 4096;
const AGENT_WAITING_MAX = 256;
const RETRY_AFTER_SECONDS = 5;

export interface StreamLimits {
  /**
   * Waits a little for a place.
   *
   * @throws Fault `unavailable` when there is none, or the caller has gone
   */
  take(tenant: string, agentId: string, isCall: boolean, signal: AbortSignal): Promise<StreamPermit>;
  /**
   * A place for a call that was accepted before: beside the others when those are taken, so that it waits for nobody
   * and takes nobody's.
   *
   * @throws Fault `unavailable` when the tenant has very many of them
   */
  owed(tenant: string, agentId: string): StreamPermit;
}

export interface StreamLimitsOptions {
  /** Calls of one agent at once. */
  readonly agentConcurrency: number;
  /** Aborted when nobody is let in any more. */
  readonly stopping: AbortSignal;
  /** Tests shorten it. */
  readonly waitMs?: number;
}

export function createStreamLimits({
  agentConcurrency,
  stopping,
  waitMs = WAIT_MS,
}: StreamLimitsOptions): StreamLimits {
  const waits = { waitMs, stopping };
  const calls = createPlaces({ size: CALLS_MAX, agentMax: agentConcurrency }, waits);
  const others = createPlaces({ size: CONNECTIONS_MAX, agentMax: AGENT_CONNECTIONS_MAX }, waits);
  const beside = createFairShare({ size: OWED_MAX });
  return {
    take: (tenant, agentId, isCall, signal) => (isCall ? calls : others).take(tenant, agentId, signal),
    owed(tenant, agentId) {
      const ordinary = calls.takeNow(tenant, agentId);
      if (ordinary !== null) return ordinary;
      if (beside.take(tenant) !== null) throw full();
      return once(() => beside.giveBack(tenant));
    },
  };
}

interface Waits {
  readonly waitMs: number;
  readonly stopping: AbortSignal;
}

function createPlaces(limits: FairShareOptions, { waitMs, stopping }: Waits) {
  const queue = createFairQueue(createFairShare(limits));
  const waiting = createFairShare({ size: WAITING_MAX, agentMax: AGENT_WAITING_MAX });

  const placeOf = (tenant: string, agent: string) => once(() => queue.giveBack(tenant, agent, 1));

  async function wait(tenant: string, agent: string, gone: AbortSignal): Promise<void> {
    const end = new AbortController();
    const giveUp = () => end.abort(full());
    const timer = setTimeout(giveUp, waitMs);
    for (const signal of [gone, stopping]) signal.addEventListener("abort", giveUp, { once: true });
    try {
      await enter(queue, { tenant, agent, amount: 1 }, end.signal);
    } finally {
      clearTimeout(timer);
      for (const signal of [gone, stopping]) signal.removeEventListener("abort", giveUp);
    }
  }

  return {
    async take(tenant: string, agent: string, gone: AbortSignal): Promise<StreamPermit> {
      if (gone.aborted || stopping.aborted) throw full();
      if (!queue.takeNow(tenant, agent, 1)) {
        if (waiting.take(tenant, agent) !== null) throw full();
        try {
          await wait(tenant, agent, gone);
        } finally {
          waiting.giveBack(tenant, agent);
        }
      }
      return placeOf(tenant, agent);
    },
    takeNow: (tenant: string, agent: string): StreamPermit | null =>
      queue.takeNow(tenant, agent, 1) ? placeOf(tenant, agent) : null,
  };
}

/** A second release is nothing. */
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
