// One line of the log for each request of a known caller. Strangers can't flood it: a few of their requests in a second
// have a line each, and the others are summed up in one.
import type { Log, LogFields } from "../core/log.ts";

const PATH_CHARACTERS_MAX = 256;
const STRANGERS_LINES_MAX = 20;
const SUMMED_UP_MS = 1_000;

/** A path as the log shows it. Longer ones are none of our routes. */
export function shownPath(path: string): string {
  return path.length <= PATH_CHARACTERS_MAX ? path : `${path.slice(0, PATH_CHARACTERS_MAX)}…`;
}

export function createAccessLog(log: Log) {
  /** Requests of strangers in the current second, which begins with the first of them. */
  let strangers = 0;

  function sumUp(): void {
    const more = strangers - STRANGERS_LINES_MAX;
    strangers = 0;
    if (more > 0) log.info("unauthenticated_requests", { count: more });
  }

  /** Whether another line may be caused by whoever nobody knows; counts it. */
  function mayTell(): boolean {
    if (strangers++ === 0) setTimeout(sumUp, SUMMED_UP_MS).unref();
    return strangers <= STRANGERS_LINES_MAX;
  }

  return {
    mayTell,
    /** Of a request to an open path. */
    open: (fields: LogFields): void => log.debug("request", fields),
    known: (fields: LogFields): void => log.info("request", fields),
    /** A request of an unknown caller. */
    stranger(fields: LogFields): void {
      if (mayTell()) log.info("request", fields);
    },
  };
}
