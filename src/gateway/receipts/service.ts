// Trust receipts as the rest of the gateway and the API know them: an end owes one, and whoever asks for what is
// owed gets it made at once.

import type { Caller } from "../../core/caller.ts";
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import { idFloor, isId } from "../../core/id.ts";
import { within } from "../../storage/deadline.ts";
import type { Store, Tx } from "../../storage/store.ts";
import { type Emitter, type EmitterOptions, receiptEmitter } from "./emitter.ts";
import { addDue, findReceipt, isDue, receiptPage, removeReceiptsBefore } from "./rows.ts";

/** How long whoever asks waits for what is owed. */
const SETTLE_MS_MAX = 5_000;
const RETRY_AFTER_SECONDS = 1;
const STOP_MS_MAX = 5_000;
const DAY_MS = 86_400_000;

/** In the write that makes the end of an invocation and its settlement final, which happens once. */
export function oweReceipt(
  tx: Tx,
  { tenant, id }: { readonly tenant: string; readonly id: string },
): Promise<void> {
  return addDue(tx, tenant, id);
}

export interface Receipts extends Pick<Emitter, "start"> {
  /** @throws Fault `not_found`; `unavailable` when it is certain to come */
  find(caller: Caller, invocationId: string): Promise<string>;
  /** Oldest first. */
  page(caller: Caller, page: { readonly limit: number; readonly offset: number }): Promise<string[]>;
  /** To be called when no invocations end any more, before the store is closed. */
  stop(): Promise<void>;
}

export function receiptService(options: EmitterOptions): Receipts {
  const { store } = options;
  const emitter = receiptEmitter(options);
  // What can't be made within its time shows as owed.
  const settle = (tenant: string) => within(SETTLE_MS_MAX, emitter.settle(tenant)).catch(() => {});

  return {
    start: emitter.start,
    async find({ tenant }, id) {
      const owed = isId("inv", id) && (await isDue(store.read, tenant, id));
      if (owed) await settle(tenant);
      const jws = isId("inv", id) ? await findReceipt(store.read, tenant, id) : null;
      if (jws !== null) return jws;
      if (!owed) throw new Fault("not_found", "no receipt of such an invocation");
      const detail = { retryAfterSeconds: RETRY_AFTER_SECONDS };
      throw new Fault("unavailable", "the receipt has not been made yet", detail);
    },
    async page({ tenant }, page) {
      await settle(tenant);
      return receiptPage(store.read, tenant, page);
    },
    async stop() {
      await within(STOP_MS_MAX, emitter.stop(STOP_MS_MAX)).catch(() => {});
    },
  };
}

/** Removes the receipts made more than `days` ago; 0 keeps all. Gives how many they were. */
export async function removeOldReceipts(store: Store, clock: Clock, days: number): Promise<number> {
  if (days === 0) return 0;
  return removeReceiptsBefore(store, idFloor("rcpt", clock.now() - days * DAY_MS));
}
