// Every age rule of the gateway in one table. Clean-up looks for old rows every hour, while the clock is steady.
import type { Log } from "../core/log.ts";
import { whileSteady } from "../storage/steady.ts";
import type { Store } from "../storage/store.ts";
import { removeOldNotes } from "./invocations/refusals.ts";
import { cleanUp, type Retention } from "./invocations/retention.ts";
import { removeOldDecisions } from "./policy/decisions.ts";
import { removeOldReceipts } from "./receipts/service.ts";

const EVERY_MS = 3_600_000;
/** A commit that waits for a standby which is away can be as late as the standby is back. */
const REFUSAL_NOTE_DAYS = 7;

/** Gives what stops it. */
export function startRetention(store: Store, retention: Retention, log: Log): () => void {
  const { clock } = store;
  const { history_days } = retention;
  return whileSteady({ clock, log, everyMs: EVERY_MS }, () =>
    Promise.all([
      // Captured bodies after body_days, whole records after history_days, idempotency keys when they expire.
      cleanUp(store, clock, retention, log),
      removeOldDecisions(store, clock, history_days),
      removeOldReceipts(store, clock, history_days),
      removeOldNotes(store, clock, REFUSAL_NOTE_DAYS),
    ]),
  );
}
