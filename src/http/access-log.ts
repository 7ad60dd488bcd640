// One line of the log for each request that is answered to a known caller. What strangers can make it say is bounded:
// only so many of their requests have a line, and the others of a second are summed up in one.
import type { Log, LogFields } from "../core/log.ts";

const PATH_CHARACTERS_MAX = 256;
const STRANGERS_LINES_MAX = 20;
const SUMMED_UP_MS = 1_000;

/** A path as it is shown: longer ones are none of ours. */
export function shownPath(path: string): string {
  return path.length <= PATH_CHARACTERS_MAX ? path : `${path.slice(0, PATH_CHARACTERS_MAX)}…`;
}

export interface AccessLog {
  /** Of a request to an open path. */
  open(fields: LogFields): void;
  known(fields: LogFields): void;
  /** Of whom nobody knows who it is. */
  stranger(fields: LogFields): void;
  /** Whether another line may be caused by whoever nobody knows; counts it. */
  mayTell(): boolean;
}

export function createAccessLog(log: Log): AccessLog {
  /** In the second that is running, since its first. */
  let strangers = 0;

  function sumUp(): void {
    const more = strangers - STRANGERS_LINES_MAX;
    strangers = 0;
    if (more > 0) log.info("unauthenticated_requests", { count: more });
  }

  function mayTell(): boolean {
    if (strangers++ === 0) setTimeout(sumUp, SUMMED_UP_MS).unref();
    return strangers <= STRANGERS_LINES_MAX;
  }

  return {
    mayTell,
    open: (fields) => log.debug("request", fields),
    known: (fields) => log.info("request", fields),
    stranger(fields) {
      if (mayTell()) log.info("request", fields);
    },
  };
}
