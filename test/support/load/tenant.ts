// A tenant with an agent for each kind of call, a payer with money, and the load that its callers make.
import type { TestChain } from "../chain/chain.ts";
import { openPayingTenant, type PayingTenant } from "../chain/paying.ts";
import { newPayer, type SignedPayment, signPayment } from "../chain/payments.ts";
import type { Gateway } from "../gateway/gateway.ts";
import type { Callers } from "./callers.ts";
import type { CountingUpstream } from "./upstream.ts";

const PRICE = 1_000n;
const PAYMENTS_MAX = 100_000n;

export interface LoadedTenant extends PayingTenant {
  readonly agents: Readonly<Record<"free" | "slow" | "streamed" | "paid", string>>;
  pay(): Promise<SignedPayment>;
}

interface Parts {
  readonly gateway: Gateway;
  readonly facilitator: Parameters<typeof openPayingTenant>[1];
  readonly upstream: CountingUpstream;
  readonly chain: Pick<TestChain, "fundUsdc">;
}

export async function openLoadedTenant({ gateway, facilitator, upstream, chain }: Parts): Promise<LoadedTenant> {
  const tenant = await openPayingTenant(gateway, facilitator);
  const pay_to = newPayer().address;
  const pricing = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to };
  const agents = {
    free: await tenant.agent({ upstream_url: upstream.url }),
    slow: await tenant.agent({ upstream_url: `${upstream.url}slow` }),
    streamed: await tenant.agent({ upstream_url: `${upstream.url}stream` }),
    paid: await tenant.agent({ upstream_url: upstream.url, pricing }),
  };
  const payer = newPayer();
  await chain.fundUsdc(payer.address, PAYMENTS_MAX * PRICE);
  return { ...tenant, agents, pay: () => signPayment(payer, { to: pay_to, value: PRICE }) };
}

const PAUSE_MS = 50;
const SLOW_PAUSE_MS = 100;

/** All kinds at once, until the callers are stopped. */
export function startLoad(callers: Callers, { agents, pay }: LoadedTenant): void {
  for (let i = 0; i < 2; i++) {
    callers.keepSending(() => ({ kind: "free", agent: agents.free }), PAUSE_MS);
    callers.keepSending(() => ({ kind: "keyed", agent: agents.free }), PAUSE_MS);
  }
  callers.keepSending(() => ({ kind: "keyed", agent: agents.slow }), SLOW_PAUSE_MS);
  callers.keepSending(() => ({ kind: "streamed", agent: agents.streamed }), PAUSE_MS);
  callers.keepSending(async () => ({ kind: "paid", agent: agents.paid, payment: await pay() }), PAUSE_MS);
}
