// Payments that were collected by a transaction of ours before a restore, and that the database has forgotten: each is told
// and counted once, wherever it is found and however often it is presented.
import { boundedCache } from "../../concurrency/bounded-cache.ts";
import type { Log } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { paymentName } from "../payments/payments.ts";

/** Half of them are remembered for certain. A process that starts again counts from zero anyway. */
const REMEMBERED_MAX = 20_000;

export type FoundPayments = ReturnType<typeof createFoundPayments>;

export function createFoundPayments(log: Log, meters: Pick<Meters, "settlement">) {
  const told = boundedCache<string, true>(REMEMBERED_MAX);
  return ({ payer, nonce }: Pick<PaymentKey, "payer" | "nonce">, transaction: Hex): void => {
    const name = paymentName({ payer, nonce });
    if (told.get(name) !== undefined) return;
    told.set(name, true);
    meters.settlement("settled");
    log.warn("forgotten_payment_found", { payer, nonce, transaction });
  };
}
