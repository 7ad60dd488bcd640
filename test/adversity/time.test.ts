// A gateway that was away for long, or whose clock is set while it runs, or is wrong when it starts: nothing that runs
// is ended, nothing that is due is put off, nothing that is owed is given up, and nothing that is kept is removed.
// What must not happen is watched for, so the tests wait side by side.
import { expect, setDefaultTimeout, test } from "bun:test";
import { eachDatabase } from "../support/gateway/gateway.ts";
import { steppedClock } from "../support/gateway/stepped-clock.ts";
import { age } from "../support/stores/database-faults.ts";
import { invocationOf, startOwing } from "../support/stores/owed-calls.ts";
import { until } from "../support/until.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
/** Longer than the pause between two looks at paid calls that nobody has come back for. */
const WATCHED_MS = 6_500;
/** For what is removed at a start to be removed. */
const REMOVED_MS = 1_500;

eachDatabase((database) => {
  test.concurrent("a gateway that was away for 25 hours asks on, and keeps what was paid for", async () => {
    await using owing = await startOwing({ database });
    const { gateway, facilitator, tenant, openUnknown } = owing;
    const calls = await Promise.all([openUnknown(), openUnknown("/stream"), openUnknown("/stream")]);
    const [polled, streamed, kept] = calls;
    expect(await kept.settled()).toBe("settled");
    await gateway.kill9();
    for (const { nonce } of calls) {
      await age(owing, "open_invocations", 25 * HOUR_MS, `payment_nonce = '${nonce}'`);
      await age(owing, "payments", 25 * HOUR_MS, `nonce = '${nonce}'`);
    }
    // The facilitator is starting as well: its first answer tells nothing.
    const asked = [polled, streamed].map(({ nonce }) => {
      facilitator.answer(nonce, () => new Response("starting", { status: 503 }));
      return facilitator.arrival(nonce, facilitator.of(nonce).length + 1);
    });
    await gateway.restart();
    const watched = Bun.sleep(WATCHED_MS);
    await Promise.all(asked);
    const settled = await Promise.all([polled.settled(), streamed.settled()]);
    const view = await tenant.poll(polled.id, polled.invocation);
    const answer = await streamed.send();
    await watched;
    expect({
      settled,
      polled: view.status,
      streamed: answer.status,
      kept: (await kept.send()).status,
      made: calls.map(({ made }) => made()),
    }).toEqual({
      settled: ["settled", "settled"],
      polled: "succeeded",
      streamed: 200,
      kept: 200,
      made: [1, 1, 1],
    });
  });

  test.concurrent("a gateway that was killed before it knew the outcome of a payment does not take it for one that never left", async () => {
    await using owing = await startOwing({ database });
    const { gateway, facilitator, tenant } = owing;
    const { id } = await owing.openHeld();
    await gateway.kill9();
    // From now on no attempt leaves the gateway.
    await facilitator.stop();
    await gateway.restart();
    const { data } = (await tenant.send("GET", "/v1/invocations")).body;
    const invocation: string = data[0].id;
    const settlement = async () => (await owing.detail(invocation)).settlement;
    await until(async () => (await settlement()).attempts >= 2);
    const path = `/v1/proxy/${id}/invocations/${invocation}/cancel`;
    expect((await tenant.send("POST", path)).status).toBe(200);
    expect((await settlement()).status).toBe("pending");
  });

  test.concurrent("a gateway whose clock is set back by an hour asks for an open payment as soon as before", async () => {
    const clock = steppedClock();
    await using owing = await startOwing({ database, program: clock.program });
    const { nonce } = await owing.openUnknown();
    clock.set(-HOUR_MS);
    expect(await owing.isAskedOn(nonce, 2)).toBe(true);
  });

  test.concurrent("a gateway whose clock is set ahead by 25 hours, and back, gives nothing up", async () => {
    const clock = steppedClock();
    const held = Promise.withResolvers<void>();
    await using owing = await startOwing({ database, program: clock.program, held: held.promise });
    const { tenant, openUnknown, isAskedOn } = owing;
    const [open, kept] = await Promise.all([openUnknown(), openUnknown("/stream")]);
    expect(await kept.settled()).toBe("settled");
    const free = await tenant.agent({ upstream_url: `${owing.upstream.url}held` });
    const running = invocationOf(await tenant.send("POST", `/v1/proxy/${free}`, { n: 1 }));
    const streamed = tenant.send("POST", `/v1/proxy/${free}/stream`, { n: 1 });
    await until(async () => (await tenant.send("GET", "/v1/invocations?status=running")).body.total >= 2);
    clock.set(25 * HOUR_MS);
    await Promise.all([isAskedOn(open.nonce, 1), Bun.sleep(WATCHED_MS)]);
    // Tokens are good again, too.
    clock.set(0);
    held.resolve();
    const [settled, answer] = await Promise.all([open.settled(), kept.send()]);
    expect({
      settled,
      open: (await tenant.poll(open.id, open.invocation)).status,
      kept: answer.status,
      streamed: (await streamed).status,
      polled: (await tenant.poll(free, running)).status,
    }).toEqual({ settled: "settled", open: "succeeded", kept: 200, streamed: 200, polled: "succeeded" });
  });

  test.concurrent("a gateway that is started 40 days ahead removes nothing before its clock is right", async () => {
    const clock = steppedClock();
    const env = { TOLLGATE_HISTORY_RETENTION_DAYS: "35" };
    await using owing = await startOwing({ database, env, program: clock.program });
    const { gateway, tenant, upstream } = owing;
    const id = await tenant.agent({ upstream_url: upstream.url });
    const invocation = invocationOf(await tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }));
    expect((await tenant.poll(id, invocation)).response_body_b64).toBeString();
    await gateway.stop();
    clock.set(40 * DAY_MS);
    await gateway.restart();
    await Bun.sleep(REMOVED_MS);
    clock.set(0);
    const { status, body } = await tenant.send("GET", `/v1/proxy/${id}/invocations/${invocation}`);
    expect([status, body.response_body_b64]).toEqual([200, expect.any(String)]);
  });
});
