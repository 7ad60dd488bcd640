// Waits that end after a time, by the monotonic clock of timers, or by a signal. The work goes on after that, and its
// outcome is ignored.
import type { StopSignal } from "./stop.ts";

/** The outcome of `work`, unless `ms` pass first: then rejects with what `late` gives. */
export async function withDeadline<T>(ms: number, work: Promise<T>, late: () => unknown): Promise<T> {
  const { promise, reject } = Promise.withResolvers<never>();
  // The runtime would warn on standard error of a negative time, which is one that has passed.
  const timer = setTimeout(() => reject(late()), Math.max(ms, 0));
  try {
    return await Promise.race([work, promise]);
  } finally {
    clearTimeout(timer);
  }
}

/** Whether `work` ends within `ms`. Rejects if it does so first. */
export async function endsWithin(ms: number, work: Promise<unknown>): Promise<boolean> {
  const { promise, resolve } = Promise.withResolvers<false>();
  const timer = setTimeout(resolve, Math.max(ms, 0), false);
  try {
    return await Promise.race([work.then(() => true), promise]);
  } finally {
    clearTimeout(timer);
  }
}

/** The outcome of `work`; rejects with the signal's reason as soon as that is aborted. */
export async function unlessAborted<T>(signal: StopSignal, work: Promise<T>): Promise<T> {
  const { promise, reject } = Promise.withResolvers<never>();
  const onAbort = () => reject(signal.reason);
  signal.addEventListener("abort", onAbort, { once: true });
  if (signal.aborted) onAbort();
  try {
    return await Promise.race([work, promise]);
  } finally {
    signal.removeEventListener("abort", onAbort);
  }
}
