// Paid calls from end to end: the gateway takes each with its payment, the facilitator collects it over mutual TLS on
// a chain with blocks of two seconds, and only then the upstream is called.
import { startChain } from "../support/chain/chain.ts";
import { startFacilitator } from "../support/chain/facilitator.ts";
import { openPayingTenant } from "../support/chain/paying.ts";
import { startGateway } from "../support/gateway/gateway.ts";
import { startUpstream } from "../support/http/upstream.ts";
import { coreSecondsIn } from "./cores.ts";
import { type Report, say } from "./report.ts";
import { ANY_GAS, BLOCK_SECONDS, homeOf, PRICE, payments, strands } from "./settlements.ts";
import { latency } from "./table.ts";

const CALLS = 600;
/** What one process can have at work with Bun's fetch is 256. */
const PARALLEL = 250;
const BODY = JSON.stringify({ question: "what is the answer?" });
const ENDED_MS_MAX = 30_000;

export async function paidCalls(_seconds: number, report: Report): Promise<void> {
  say(`paid calls: gateway, facilitator and anvil, blocks of ${BLOCK_SECONDS} s, ${PARALLEL} calls at a time`);
  const chain = await startChain({ blockTimeSeconds: BLOCK_SECONDS });
  let visits = 0;
  const upstream = startUpstream(() => {
    visits++;
    return Response.json({ answer: 42 });
  });
  try {
    await using gateway = await startGateway();
    await using facilitator = await startFacilitator(chain, { env: ANY_GAS });
    const tenant = await openPayingTenant(gateway, facilitator);
    const all = await payments(chain, CALLS);
    const [first] = all;
    if (first === undefined) throw new Error("there are no payments");
    const { to: pay_to } = first.authorization;
    const pricing = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to };
    const url = tenant.callUrl(await tenant.agent({ upstream_url: upstream.url, pricing }));
    const homes = [homeOf(gateway), homeOf(facilitator)];
    const before = homes.map(coreSecondsIn);
    const statuses: Record<number, number> = {};
    const waits: number[] = [];
    let told = 0;

    const startedAt = performance.now();
    await strands(all, Array.from({ length: PARALLEL }), async ({ headers }) => {
      const init = { method: "POST", headers: { ...tenant.headers, ...headers }, body: BODY };
      const from = performance.now();
      const response = await fetch(url, init);
      await response.arrayBuffer();
      waits.push(performance.now() - from);
      statuses[response.status] = (statuses[response.status] ?? 0) + 1;
      if (response.headers.has("x-payment-response")) told++;
    });
    const seconds = (performance.now() - startedAt) / 1000;
    const used = homes.map((home, index) => ((coreSecondsIn(home) - (before[index] ?? 0)) * 1e6) / CALLS);
    const [cpu_us = 0, other_us = 0] = used;
    const counts = Object.entries(statuses).map(([status, count]) => `${status}: ${count}`);
    const succeeded = async () => (await tenant.send("GET", "/v1/invocations?limit=1&status=succeeded")).body.total;
    const endAt = performance.now() + ENDED_MS_MAX;
    while ((await succeeded()) < CALLS && performance.now() < endAt) await Bun.sleep(100);
    const { length: transfers } = await chain.transfers({ to: pay_to });
    report.add(
      "paid and accepted",
      { rate: told / seconds, ...latency(waits), cpu_us },
      {
        note: `${told} of ${CALLS} told of their settlement at once (${counts}); ${transfers} transfers, ${visits} upstream calls, ${await succeeded()} succeeded; the facilitator used ${Math.round(other_us)} µs for each`,
      },
    );
  } finally {
    await upstream.stop();
    await chain.stop();
  }
}
