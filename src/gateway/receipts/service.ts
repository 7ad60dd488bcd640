// Trust receipts for the API. The end of a call owes a receipt (invocations/commands/end.ts). A request for an owed receipt has
// it made at once.

import type { Caller } from "../../core/caller.ts";
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import { idFloor, isId } from "../../core/id.ts";
import { DAY_MS } from "../../core/time.ts";
import { within } from "../../storage/failures.ts";
import type { Store } from "../../storage/store.ts";
import { createReceiptEmitter, type EmitterOptions } from "./emitter.ts";
import { findReceipt, isDue, RECEIPTS, receiptPage, removeReceiptsBefore } from "./store.ts";

/** How long a request waits for owed receipts. */
const SETTLE_MS_MAX = 5_000;
const RETRY_AFTER_SECONDS = 1;
const STOP_MS_MAX = 5_000;

export function createReceipts(options: EmitterOptions) {
  const { store } = options;
  const emitter = createReceiptEmitter(options);
  // A receipt that can't be made in time stays owed.
  const settle = (tenant: string) => within(SETTLE_MS_MAX, emitter.settle(tenant)).catch(() => {});

  return {
    start: emitter.start,
    /** @throws Fault `not_found`; `unavailable` when the receipt is owed but not made yet */
    async find({ tenant }: Caller, id: string): Promise<string> {
      const owed = isId("inv", id) && (await isDue(store.read, tenant, id));
      if (owed) await settle(tenant);
      const jws = isId("inv", id) ? await findReceipt(store.read, tenant, id) : null;
      if (jws !== null) return jws;
      if (!owed) throw new Fault("not_found", "no receipt of such an invocation");
      const detail = { retryAfterSeconds: RETRY_AFTER_SECONDS };
      throw new Fault("unavailable", "the receipt has not been made yet", detail);
    },
    /** Oldest first. */
    async page({ tenant }: Caller, page: { readonly limit: number; readonly offset: number }) {
      await settle(tenant);
      return receiptPage(store.read, tenant, page);
    },
    /** To be called when no invocations end any more, before the store is closed. */
    async stop() {
      await within(STOP_MS_MAX, emitter.stop(STOP_MS_MAX)).catch(() => {});
    },
  };
}

export type Receipts = ReturnType<typeof createReceipts>;

/** Removes the receipts made more than `days` ago; 0 keeps all. Gives how many they were. */
export async function removeOldReceipts(store: Store, clock: Clock, days: number): Promise<number> {
  if (days === 0) return 0;
  const before = await store.periods.drop(RECEIPTS, clock.now() - days * DAY_MS);
  return removeReceiptsBefore(store, idFloor("rcpt", before));
}
