// Between the claim of a call, or the lease of a payment, and its first byte lies the time in which a secret is read.
// Who leaves or cancels in it has had nothing made: a paid call is still owed, and a payment that has not left stays.
import { expect, setDefaultTimeout, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { PAY_TO, PRICING, pay } from "../contract/priced.ts";
import { startFacilitatorStandIn } from "../support/chain/facilitator-stand-in.ts";
import { type Json, openPayingTenant } from "../support/chain/paying.ts";
import { type Database, eachDatabase, startGateway } from "../support/gateway/gateway.ts";
import { temporaryRoot } from "../support/gateway/process.ts";
import { TEST_CA } from "../support/http/certificates.ts";
import { startUpstream } from "../support/http/upstream.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const SOON_MS = 10_000;

/** A gateway whose vault holds back one secret until it is told to let go. */
async function openHouse(database: Database) {
  await using stack = new AsyncDisposableStack();
  const facilitator = startFacilitatorStandIn();
  stack.defer(() => facilitator.stop());
  const [asked, held] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  const vault = startUpstream(async ({ url }) => {
    if (new URL(url).pathname.endsWith("/slow")) {
      asked.resolve();
      await held.promise;
    }
    return Response.json({ data: { data: { value: "secret-of-the-vault" }, metadata: {} } });
  });
  stack.defer(() => vault.stop());
  const made: string[] = [];
  const upstream = startUpstream((request) => {
    made.push(new URL(request.url).pathname);
    return Response.json({ hello: "world" });
  });
  stack.defer(() => upstream.stop());
  const caFile = join(temporaryRoot(), "stand-in-ca.pem");
  writeFileSync(caFile, TEST_CA);
  const gateway = stack.use(
    await startGateway({
      database,
      env: {
        TOLLGATE_CA_FILE: caFile,
        TOLLGATE_SETTLE_WAIT_MS: "6000",
        TOLLGATE_VAULT_ADDR: vault.url,
        TOLLGATE_VAULT_TOKEN: "vault-token",
      },
    }),
  );
  const tenant = await openPayingTenant(gateway, { url: facilitator.url, client: { bundle: "of-nobody" } });
  const { body: slow } = await tenant.send("POST", "/v1/credentials", {
    name: "slow",
    auth_type: "bearer",
    source: "vault",
    vault_ref: "slow",
  });
  const newest = async (): Promise<Json> => (await tenant.send("GET", "/v1/invocations?limit=1")).body.data[0];
  const settlementOf = async (id: string): Promise<Json> => {
    const until = performance.now() + SOON_MS;
    for (;;) {
      const { settlement } = (await tenant.send("GET", `/v1/invocations/${id}`)).body;
      if (settlement.status !== "pending" || performance.now() > until) return settlement.status;
      await Bun.sleep(50);
    }
  };
  const owned = stack.move();
  return {
    gateway,
    tenant,
    facilitator,
    upstream,
    slow: slow.id as string,
    asked: asked.promise,
    letGo: held.resolve,
    made,
    newest,
    settlementOf,
    [Symbol.asyncDispose]: () => owned.disposeAsync(),
  };
}

eachDatabase((database) => {
  test("a call that is cancelled while its payment's credential is being read is never collected", async () => {
    await using house = await openHouse(database);
    const { tenant, facilitator, upstream, newest, settlementOf } = house;
    const { status } = await tenant.send("PATCH", "/v1/settlement/config", {
      facilitator_url: facilitator.url,
      facilitator_credential_ref: house.slow,
    });
    expect(status).toBe(200);
    const id = await tenant.agent({ upstream_url: upstream.url, pricing: PRICING });
    const { headers, authorization } = await pay();
    const sent = tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }, headers);
    await house.asked;
    // Nothing of the payment has left: the credential with which it would be sent is not even known.
    const { id: invocation } = await newest();
    const cancelled = await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`);
    expect([cancelled.status, cancelled.body.error_class]).toEqual([200, "cancelled"]);
    expect(facilitator.of(authorization.nonce).length).toBe(0);
    house.letGo();
    await sent;
    expect([await settlementOf(invocation), facilitator.of(authorization.nonce).length, house.made]).toEqual([
      "settlement_failed",
      0,
      [],
    ]);
  });

  test("a paid call whose caller leaves before it is made is made when its caller comes back", async () => {
    await using house = await openHouse(database);
    const { gateway, tenant, upstream, newest } = house;
    const id = await tenant.agent({
      upstream_url: `${upstream.url}paid`,
      pricing: { ...PRICING, pay_to: PAY_TO },
      credential_ref: house.slow,
    });
    const { headers } = await pay();
    const caller = new AbortController();
    const first = fetch(`${gateway.url}/v1/proxy/${id}/stream`, {
      method: "POST",
      headers: { ...tenant.headers, ...headers },
      body: JSON.stringify({ n: 1 }),
      signal: caller.signal,
    }).catch(() => null);
    await house.asked;
    expect((await newest()).settlement.status).toBe("settled");
    caller.abort();
    await first;
    // The gateway has noticed, in one way or the other.
    const until = performance.now() + 2_000;
    while ((await newest()).status === "running" && performance.now() < until) await Bun.sleep(20);
    house.letGo();
    const again = await tenant
      .send("POST", `/v1/proxy/${id}/stream`, { n: 1 }, headers)
      .then(({ status, text }) => [status, text]);
    expect({ again: again[0], told: again[1], made: house.made }).toEqual({
      again: 200,
      told: JSON.stringify({ hello: "world" }),
      made: ["/paid"],
    });
  });
});
