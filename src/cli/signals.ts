// What a service does about signals, and about errors that nobody else handles.
import type { OpenLog } from "./log.ts";

const FAILED = 1;
/** Ctrl-C reaches a program under npx twice, from the terminal and from npx; that is no second wish. */
const SECOND_SIGNAL_AFTER_MS = 1000;

/**
 * A promise that nobody waits for takes nothing down with it: what it was part of has failed, and only that. An
 * exception outside of any request leaves nobody knows what behind, so the process ends; what it had accepted is
 * durable.
 */
export function logStrayErrors(log: OpenLog): void {
  process.on("unhandledRejection", (error) => log.error("unhandled_rejection", { error }));
  process.on("uncaughtException", (error) => {
    log.error("uncaught_exception", { error });
    log.flush();
    process.exit(FAILED);
  });
}

/** Ends the process when it has stopped; at once at a second signal. */
export function drainOnSignal(stop: () => Promise<void>, log: OpenLog): void {
  let askedAt: number | null = null;
  const onSignal = async (signal: string) => {
    if (askedAt !== null) {
      if (performance.now() - askedAt > SECOND_SIGNAL_AFTER_MS) process.exit(FAILED);
      return;
    }
    askedAt = performance.now();
    log.info("draining", { signal });
    try {
      await stop();
      log.info("stopped");
      process.exit(0);
    } catch (error) {
      log.error("stop_failed", { error });
      process.exit(FAILED);
    }
  };
  process.on("SIGTERM", onSignal);
  process.on("SIGINT", onSignal);
}
