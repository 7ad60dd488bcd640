// A machine's clock is wrong for a while, and is then put right: a key goes on to stand for its call, and a payment
// that may still land, or has not left, is not given up before its time.
import { expect, setDefaultTimeout, test } from "bun:test";
import { collected, notCollected } from "../support/chain/facilitator-stand-in.ts";
import { eachDatabase } from "../support/gateway/gateway.ts";
import { steppedClock } from "../support/gateway/stepped-clock.ts";
import { startRelay } from "../support/http/relay.ts";
import { invocationOf, startOwing } from "../support/stores/owed-calls.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const HOUR_MS = 3_600_000;

eachDatabase((database) => {
  test.concurrent("an idempotency key that was sent while the clock was 25 hours behind makes no second call when it is right", async () => {
    const clock = steppedClock();
    await using owing = await startOwing({ database, program: clock.program });
    const { tenant, upstream } = owing;
    const id = await tenant.agent({ upstream_url: upstream.url });
    const send = () => tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }, { "idempotency-key": "order-17" });
    // A token of the local issuer is good then, too.
    clock.set(-25 * HOUR_MS);
    const first = await send();
    expect(first.status).toBe(202);
    clock.set(0);
    const second = await send();
    expect([second.status, invocationOf(second)]).toEqual([202, invocationOf(first)]);
    expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
  });

  test.concurrent("a payment that may still land is not declined while the clock is an hour ahead", async () => {
    const clock = steppedClock();
    await using owing = await startOwing({ database, program: clock.program });
    const { facilitator, openUnknown, isAskedOn, detail } = owing;
    const call = await openUnknown();
    clock.set(HOUR_MS);
    // It does not know of the transaction that another try of it has just sent.
    facilitator.answer(call.nonce, () => notCollected());
    await isAskedOn(call.nonce, 2);
    clock.set(0);
    const { settlement, status } = await detail(call.invocation);
    expect([status, settlement.status]).toEqual(["pending", "pending"]);
    facilitator.answer(call.nonce, collected);
    expect(await call.settled()).toBe("settled");
  });

  test.concurrent("a payment that has not left is not over because the clock is an hour ahead for a while", async () => {
    const clock = steppedClock();
    await using owing = await startOwing({ database, program: clock.program });
    const { facilitator, tenant, openUnknown, detail } = owing;
    const relay = startRelay(Number(new URL(facilitator.url).port));
    relay.refuse();
    try {
      const { body } = await tenant.send("GET", "/v1/settlement/config");
      await tenant.send("PATCH", "/v1/settlement/config", {
        facilitator_url: `https://127.0.0.1:${relay.port}`,
        facilitator_credential_ref: body.facilitator_credential_ref,
      });
      const call = await openUnknown();
      const attempts = async () => (await detail(call.invocation)).settlement.attempts;
      const before = await attempts();
      clock.set(HOUR_MS);
      // Tokens have not run out by then: the local issuer's last for twelve hours.
      const until = performance.now() + 8_000;
      while ((await attempts()) === before && performance.now() < until) await Bun.sleep(50);
      clock.set(0);
      relay.restore();
      expect(await call.settled()).toBe("settled");
    } finally {
      relay.stop();
    }
  });
});
