// A flood of payments over the binary's HTTP: a worker judges their signatures, each as it is, and nobody else waits.
import { expect, test } from "bun:test";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { startGateway } from "../support/gateway/gateway.ts";
import { startUpstream } from "../support/http/upstream.ts";

const PAYMENTS = 120;
const AMOUNT = 10_000n;

test("many payments at once are judged by a worker, each as it is", async () => {
  const upstream = startUpstream(() => Response.json({}));
  try {
    await using gateway = await startGateway({ env: { TOLLGATE_LOG_LEVEL: "debug" } });
    const to = newPayer().address;
    const agentOf = async (tenant: string) => {
      const token = await gateway.token({ tenant, user: "u" });
      const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
      const pricing = { amount: `${AMOUNT}`, asset: "USDC", network: "base", pay_to: to };
      const body = JSON.stringify({ name: "a", upstream_url: upstream.url, pricing });
      const made = await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers, body });
      const { id } = (await made.json()) as { id: string };
      return async (payment: string) => {
        const init = { method: "POST", headers: { ...headers, "x-payment": payment }, body: "{}" };
        const { status } = await fetch(`${gateway.url}/v1/proxy/${id}`, init);
        return status;
      };
    };
    const [loud, quiet] = [await agentOf("loud"), await agentOf("quiet")];
    const [payer, other] = [newPayer(), newPayer()];
    const sign = (from?: typeof payer.address) =>
      signPayment(payer, { to, value: AMOUNT, ...(from === undefined ? {} : { from }) }).then(({ header }) => header);
    const all = await Promise.all(
      Array.from({ length: PAYMENTS }, (_, at) => sign(at % 2 === 0 ? undefined : other.address)),
    );
    const single = await sign();
    const flood = Promise.all(all.map(loud));
    expect(await quiet(single)).toBe(202);
    expect(await flood).toEqual(all.map((_, at) => (at % 2 === 0 ? 202 : 402)));
    expect(gateway.log()).toContain('"compute_thread_started"');
    expect(gateway.log()).not.toContain('"compute_thread_died"');
    await gateway.stop();
  } finally {
    await upstream.stop();
  }
});
