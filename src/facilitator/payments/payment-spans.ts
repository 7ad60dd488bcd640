// The trace span of each request, by the payment that it collects. The wallets work outside the request, often for several
// payments at once; this map makes that work a part of the payment's trace while a request waits for the payment.
import { inSpan, type Span, type Tracer } from "../../core/tracing.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { paymentName } from "./payments.ts";

export type PaymentSpans = ReturnType<typeof createPaymentSpans>;

/** @param tracer null where traces are off */
export function createPaymentSpans(tracer: Tracer | null) {
  const spans = new Map<string, Span>();
  return {
    /** Runs a step of a settlement in its own span. */
    step: <T>(name: "sign and store" | "wait for inclusion", work: () => Promise<T>): Promise<T> =>
      inSpan(tracer, { kind: "internal", name }, work),
    /** Runs a request's work for a payment, and keeps its span for `within` meanwhile. */
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
    /** Runs the wallets' work for these payments, inside the span of the first payment that a request waits for. */
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
