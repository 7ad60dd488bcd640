// The spans of requests by the payments that they collect. What the wallets do for a payment they do elsewhere, for several
// at once perhaps; by this it is a part of the payment's trace, for as long as a request waits for it.
import { inSpan, type Span, type Tracer } from "../../core/tracing.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { paymentName } from "./payments.ts";

/** Parts of a settlement that have a span each. */
type Step = "sign and store" | "wait for inclusion";

export type PaymentSpans = ReturnType<typeof createPaymentSpans>;

/** @param tracer null where traces are off */
export function createPaymentSpans(tracer: Tracer | null) {
  const spans = new Map<string, Span>();
  return {
    step: <T>(name: Step, work: () => Promise<T>): Promise<T> => inSpan(tracer, { kind: "internal", name }, work),
    /** Does a request's work for a payment. */
    async during<T>(key: PaymentKey, work: () => Promise<T>): Promise<T> {
      const span = tracer?.current() ?? null;
      if (span === null) return work();
      const name = paymentName(key);
      spans.set(name, span);
      try {
        return await work();
      } finally {
        if (spans.get(name) === span) spans.delete(name);
      }
    },
    /** Does what the wallets do for these payments, as a part of the first one that a request waits for. */
    within<T>(keys: Iterable<PaymentKey>, work: () => T): T {
      if (tracer === null || spans.size === 0) return work();
      for (const key of keys) {
        const span = spans.get(paymentName(key));
        if (span !== undefined) return tracer.during(span, work);
      }
      return work();
    },
  };
}
