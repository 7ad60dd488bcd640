// The listeners for ends of calls. A listener's failure changes nothing: the end is stored, and its write is answered.
import type { CallEnd, CallEndListener } from "../core/call-end.ts";
import type { Log } from "../core/log.ts";

export function createCallEnds(log: Log) {
  const listeners: CallEndListener[] = [];

  function tellOf(end: CallEnd): void {
    for (const listener of listeners) {
      try {
        listener(end);
      } catch (error) {
        const { tenant, invocation_id } = end;
        log.error("call_end_listener_failed", { tenant, invocation_id, error });
      }
    }
  }

  return {
    listen: (listener: CallEndListener): void => void listeners.push(listener),
    tell: (ends: readonly CallEnd[]): void => ends.forEach(tellOf),
  };
}
