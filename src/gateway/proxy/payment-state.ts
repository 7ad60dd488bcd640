// The last of the checks: what a call costs, and where it stands with its payment.
import { type Price, priceOf } from "../agents/service.ts";
import type { Charge, PricedCall } from "../payment/service.ts";
import type { CheckOptions, JudgedCall, ProxyCall } from "./checks.ts";
import { bringsPayment } from "./request-headers.ts";

/** The state of the payment of a call that may be made. */
export type PaymentState =
  /** It has been made before, as this invocation. */
  | { readonly kind: "earlier"; readonly id: string }
  | { readonly kind: "free" }
  | { readonly kind: "charge"; readonly charge: Charge; readonly asked: PricedCall };

function pricedCall(
  { caller, headers, note }: ProxyCall,
  { agent, body, form }: JudgedCall,
  suffix: string,
): PricedCall {
  const { tenant, user } = caller;
  const path = `/v1/proxy/${agent.id}${suffix}`;
  const price = sumOf(form.calls.map(({ tool }) => priceOf(agent, tool)));
  return { tenant, caller: user, agent_id: agent.id, path, price, headers, body, note };
}

const FREE: PaymentState = { kind: "free" };

/**
 * Returns at once for a call that costs nothing and brings no payment.
 *
 * @throws Fault `payment_required`, `unavailable`, as rejection
 */
export function paymentStateOf(
  options: CheckOptions,
  call: ProxyCall,
  asking: JudgedCall,
  suffix: string,
): Bun.MaybePromise<PaymentState> {
  const isFree = asking.agent.pricing === null && !bringsPayment(call.headers);
  return isFree ? FREE : checkedPayment(options, call, asking, suffix);
}

async function checkedPayment(
  options: CheckOptions,
  call: ProxyCall,
  asking: JudgedCall,
  suffix: string,
): Promise<PaymentState> {
  const asked = pricedCall(call, asking, suffix);
  const checked = await options.payments.check(asked);
  switch (checked.kind) {
    case "known": {
      const { invocation_id: id } = checked;
      if (!(await options.refusals.isRefused({ tenant: asked.tenant, id }))) return { kind: "earlier", id };
      return checkedPayment(options, call, asking, suffix);
    }
    case "charge":
      return { kind: "charge", charge: checked.charge, asked };
    default:
      return checked;
  }
}

/** The sum of the prices. All calls are of one agent, so there is one payee. */
function sumOf(prices: readonly (Price | null)[]): Price | null {
  return prices.reduce((sum, price) => {
    if (sum === null || price === null) return sum ?? price;
    return { ...price, amount: price.amount + sum.amount };
  }, null);
}
