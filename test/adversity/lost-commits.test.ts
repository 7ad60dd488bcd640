// What a failover to an asynchronous standby loses, as the manual says it (replicas, Failover): calls that were accepted a
// moment before are gone. A payment is never taken twice for that.

import { expect, setDefaultTimeout, test } from "bun:test";
import { startChain } from "../support/chain/chain.ts";
import { startFacilitator } from "../support/chain/facilitator.ts";
import { openPayingTenant } from "../support/chain/paying.ts";
import { startGateway } from "../support/gateway/gateway.ts";
import { newMasterKey } from "../support/keys.ts";
import { openLoadedTenant } from "../support/load/tenant.ts";
import { startCountingUpstream } from "../support/load/upstream.ts";
import { invocationOf } from "../support/stores/owed-calls.ts";
import { startPostgres } from "../support/stores/postgres.ts";
import { startPostgresPair } from "../support/stores/postgres-pair.ts";
import { until } from "../support/until.ts";

/** Everything starts side by side, also on a busy machine. */
setDefaultTimeout(180_000);

/** A paid call that is accepted, paid and made, and of which the new primary knows nothing. */
async function afterTheLoss(isFacilitatorsLost: boolean) {
  await using stack = new AsyncDisposableStack();
  const pair = stack.use(await startPostgresPair(false));
  const chain = await startChain();
  stack.defer(() => chain.stop());
  const upstream = startCountingUpstream();
  stack.defer(() => upstream.stop());
  const elsewhere = isFacilitatorsLost ? pair : await startPostgres();
  const facilitator = stack.use(
    await startFacilitator(chain, { env: { DATABASE_URL: await elsewhere.freshDatabase() } }),
  );
  const env = {
    DATABASE_URL: await pair.freshDatabase(),
    TOLLGATE_MASTER_KEY: newMasterKey(),
  };
  const gateway = stack.use(await startGateway({ env }));
  const tenant = await openLoadedTenant({ gateway, facilitator, upstream, chain });
  await pair.caughtUp();
  await pair.holdCommits("lost", 0);
  const payment = await tenant.pay();
  const { nonce } = payment.authorization;
  const send = () => tenant.send("POST", `/v1/proxy/${tenant.agents.paid}`, { n: 1 }, payment.headers);
  const accepted = await send();
  expect(accepted.status).toBe(202);
  expect((await tenant.poll(tenant.agents.paid, invocationOf(accepted))).status).toBe("succeeded");
  await pair.failOver();
  const untilBack = async () => {
    for (;;) {
      const answer = await send().catch(() => null);
      if (answer !== null && answer.status !== 503) return answer;
      await Bun.sleep(50);
    }
  };
  const again = await untilBack();
  const owned = stack.move();
  return {
    again,
    tenant,
    chain,
    upstream,
    nonce,
    before: await tenant.send("GET", `/v1/invocations/${invocationOf(accepted)}`),
    [Symbol.asyncDispose]: () => owned.disposeAsync(),
  };
}

test.concurrent("a call that was accepted a moment before is gone, and its payment buys it once more without being taken again", async () => {
  await using after = await afterTheLoss(false);
  const { again, before, chain, nonce, tenant, upstream } = after;
  expect([before.status, again.status]).toEqual([404, 202]);
  expect((await tenant.poll(tenant.agents.paid, invocationOf(again))).status).toBe("succeeded");
  expect(upstream.of(1)).toHaveLength(2);
  expect(await chain.transfers({ nonce })).toHaveLength(1);
});

test.concurrent("where the facilitator has lost the same moment, the payment is refused and not taken again, and later ones are taken", async () => {
  await using after = await afterTheLoss(true);
  const { again, before, chain, nonce, tenant, upstream } = after;
  expect([before.status, again.status]).toEqual([404, 402]);
  expect(upstream.of(1)).toHaveLength(1);
  expect(await chain.transfers({ nonce })).toHaveLength(1);
  const later = await tenant.pay();
  const next = await tenant.send("POST", `/v1/proxy/${tenant.agents.paid}`, { n: 2 }, later.headers);
  expect(next.status).toBe(202);
  expect((await tenant.poll(tenant.agents.paid, invocationOf(next))).settlement?.status ?? "settled").toBe("settled");
  expect(await chain.transfers({ nonce: later.authorization.nonce })).toHaveLength(1);
});

test.concurrent("a call whose end is lost, and not its claim, is made a second time", async () => {
  await using pair = await startPostgresPair(false);
  const upstream = startCountingUpstream();
  const env = {
    DATABASE_URL: await pair.freshDatabase(),
    TOLLGATE_MASTER_KEY: newMasterKey(),
  };
  await using gateway = await startGateway({ env });
  const tenant = await openPayingTenant(gateway, { url: "https://127.0.0.1:1", client: { bundle: "of-nobody" } });
  const slow = await tenant.agent({ upstream_url: `${upstream.url}slow` });
  const invocation = invocationOf(await tenant.send("POST", `/v1/proxy/${slow}`, { n: 1 }));
  await until(() => upstream.of(1).length === 1);
  await pair.caughtUp();
  await pair.holdCommits("lost", 0);
  expect((await tenant.poll(slow, invocation)).status).toBe("succeeded");
  await pair.failOver();
  await until(() => upstream.of(1).length === 2);
  expect(upstream.of(1)).toEqual([invocation, invocation]);
  const look = async () => (await tenant.send("GET", `/v1/invocations/${invocation}`)).body.status;
  await until(async () => (await look()) === "succeeded");
  await upstream.stop();
});
