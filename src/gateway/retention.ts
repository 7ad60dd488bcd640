// What is removed by its age, all of it: looked for every hour, while the clock is steady.
import type { Log } from "../core/log.ts";
import { whileSteady } from "../storage/steady.ts";
import type { Store } from "../storage/store.ts";
import { removeOldNotes } from "./invocations/refusals.ts";
import { cleanUp, type Retention } from "./invocations/retention.ts";
import { removeOldDecisions } from "./policy/decisions.ts";
import { removeOldReceipts } from "./receipts/service.ts";

export type { Retention };

const EVERY_MS = 3_600_000;

/** Gives what stops it. */
export function startRetention(store: Store, retention: Retention, log: Log): () => void {
  const { clock } = store;
  const { history_days } = retention;
  return whileSteady({ clock, log, everyMs: EVERY_MS }, () =>
    Promise.all([
      cleanUp(store, clock, retention, log),
      removeOldDecisions(store, clock, history_days),
      removeOldReceipts(store, clock, history_days),
      removeOldNotes(store, clock),
    ]),
  );
}
