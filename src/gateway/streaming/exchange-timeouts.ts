// The timeouts of one exchange with an upstream: who is waited for, for how long, and why it was stopped, whoever
// stopped it. Silence counts only for whom is being waited for: a slow reader is no silent upstream.

/** Why an exchange was stopped by us. `crowded`: others need the memory of a body that the upstream does not take. */
export type ExchangeStop = "timeout" | "cancelled" | "shutdown" | "crowded";

export interface ExchangeTimeoutLimits {
  /** The wait for the head of the answer, in milliseconds. */
  readonly headMs: number;
  /** Each silence of the upstream after it; null for no limit. */
  readonly silenceMs: number | null;
  /** How long the caller may take nothing of what is there for it. */
  readonly callerMs: number;
}

export interface ExchangeTimeouts {
  /** Its reason is a Stop. */
  readonly signal: AbortSignal;
  stop(why: ExchangeStop): void;
  /** The clock starts anew. */
  waitFor(whom: "head" | "upstream" | "caller"): void;
  /** Nobody is waited for any more. */
  end(): void;
}

/** @param gone aborted when the caller has gone */
export function startExchangeTimeouts(
  { headMs, silenceMs, callerMs }: ExchangeTimeoutLimits,
  gone: AbortSignal,
): ExchangeTimeouts {
  const controller = new AbortController();
  const limits = { head: headMs, upstream: silenceMs, caller: callerMs };
  let limit: number | null = null;
  let since = 0;
  let dueAt = Number.POSITIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let isOver: ExchangeStop = "timeout";

  const stop = (why: ExchangeStop) => {
    clearTimeout(timer);
    if (!controller.signal.aborted) controller.abort(why);
  };
  const onGone = () => stop("cancelled");

  /** Timers are not made anew for each piece: one that comes too early looks how long it is still to be. */
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

  gone.addEventListener("abort", onGone, { once: true });
  if (gone.aborted) onGone();
  return {
    signal: controller.signal,
    stop,
    waitFor(whom) {
      limit = limits[whom];
      since = performance.now();
      isOver = whom === "caller" ? "cancelled" : "timeout";
      if (limit !== null && since + limit < dueAt && !controller.signal.aborted) arm(since + limit);
    },
    end() {
      clearTimeout(timer);
      limit = null;
      gone.removeEventListener("abort", onGone);
    },
  };
}
