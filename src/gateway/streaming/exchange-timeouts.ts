// The timeouts of one exchange with an upstream, and the reason why it was stopped. Only the side that is waited for
// can run out of time: while the caller reads slowly, the upstream does not count as silent.

import type { CallStop } from "../upstream/failure.ts";

export interface ExchangeTimeoutLimits {
  /** The wait for the head of the answer, in milliseconds. */
  readonly headMs: number;
  /** Each silence of the upstream after it; null for no limit. */
  readonly silenceMs: number | null;
  /** How long the caller may leave available bytes unread. */
  readonly callerMs: number;
}

/** @param callerSignal aborted when the caller has gone */
export function startExchangeTimeouts(
  { headMs, silenceMs, callerMs }: ExchangeTimeoutLimits,
  callerSignal: AbortSignal,
) {
  const controller = new AbortController();
  const limits = { head: headMs, upstream: silenceMs, caller: callerMs };
  let limit: number | null = null;
  let since = 0;
  let dueAt = Number.POSITIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let isOver: CallStop = "timeout";

  const stop = (why: CallStop) => {
    clearTimeout(timer);
    if (!controller.signal.aborted) controller.abort(why);
  };
  const onGone = () => stop("cancelled");

  /** No new timer for each piece: a timer that fires too early is armed again for the rest of the time. */
  function arm(at: number): void {
    clearTimeout(timer);
    dueAt = at;
    timer = setTimeout(look, Math.max(0, at - performance.now()));
  }

  function look(): void {
    dueAt = Number.POSITIVE_INFINITY;
    if (limit === null) return;
    if (performance.now() - since >= limit) stop(isOver);
    else arm(since + limit);
  }

  callerSignal.addEventListener("abort", onGone, { once: true });
  if (callerSignal.aborted) onGone();
  return {
    /** Its reason is a CallStop. */
    signal: controller.signal,
    stop,
    /** Restarts the time. */
    waitFor(whom: "head" | "upstream" | "caller") {
      limit = limits[whom];
      since = performance.now();
      isOver = whom === "caller" ? "cancelled" : "timeout";
      if (limit !== null && since + limit < dueAt && !controller.signal.aborted) arm(since + limit);
    },
    /** Stops all waiting. */
    end() {
      clearTimeout(timer);
      limit = null;
      callerSignal.removeEventListener("abort", onGone);
    },
  };
}

export type ExchangeTimeouts = ReturnType<typeof startExchangeTimeouts>;
