// What a crash of either service may cost while money moves: nothing. Each is killed at exact moments, which relays
// before the node and before the facilitator hold for the test, and both at moments of chance; in the end every
// authorization has been collected once, and every call was served at most once and never unpaid.

import { afterAll, afterEach, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { SQL } from "bun";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { type RpcRelay, startRpcRelay } from "../support/chain/rpc-relay.ts";
import { eachDatabase, type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { seeded } from "../support/seeded.ts";
import {
  expectPending,
  expectServed,
  expectTotals,
  holding,
  openPaidAgent,
  type PaidAgent,
  type PaidCall,
  type PaidUpstream,
  PRICE,
  passage,
  startPaidUpstream,
  startServices,
} from "../support/stores/paid-calls.ts";
import { startPostgres } from "../support/stores/postgres.ts";
import { until } from "../support/until.ts";

/** More than every wait inside takes before it fails and says for what it waited. */
setDefaultTimeout(180_000);
const ACCEPTED_MS_MAX = 60_000;

const ESTIMATE = "eth_estimateGas";
const SEND = "eth_sendRawTransaction";
const RECEIPT = "eth_getTransactionReceipt";

let chain: TestChain;
let relay: RpcRelay;
let upstream: PaidUpstream;

beforeAll(async () => {
  chain = await startChain();
  relay = await startRpcRelay(chain.url);
  upstream = startPaidUpstream(chain);
});

afterEach(async () => {
  relay.heal();
  await chain.resumeMining();
});

afterAll(async () => {
  await upstream?.stop();
  await relay?.stop();
  await chain?.stop();
});

const heldAt = (method: string, at = relay) => holding(at, method);
const passing = (method: string, at = relay) => passage(at, method);

interface Moment {
  /** Arranges that the moment comes for the next payment, and resolves when it is there. */
  reach(call: PaidCall, agent: PaidAgent): Promise<unknown>;
  /** What is kept of the payment when the process is gone. */
  readonly kept: "claimed" | "sent" | "settled" | null;
  /** What happens while nobody is there. */
  readonly meanwhile?: () => Promise<unknown>;
  /** What happens after the restart. */
  readonly afterwards?: () => Promise<unknown>;
}

const AFTER_BROADCAST: Pick<Moment, "reach" | "kept"> = {
  kept: "sent",
  async reach() {
    await chain.pauseMining();
    await passing(SEND);
  },
};

const MOMENTS: Readonly<Record<string, Moment>> = {
  "before the claim": { kept: null, reach: () => heldAt(ESTIMATE) },
  "after the store, before the broadcast": { kept: "sent", reach: () => heldAt(SEND) },
  "after the broadcast": { ...AFTER_BROADCAST, afterwards: () => chain.resumeMining() },
  "after the broadcast, and the nodes forget it": {
    ...AFTER_BROADCAST,
    async meanwhile() {
      await chain.rpc("anvil_dropAllTransactions");
      await chain.resumeMining();
    },
  },
  "after the broadcast, and it is included meanwhile": {
    ...AFTER_BROADCAST,
    meanwhile: () => chain.resumeMining(),
  },
  "after the inclusion, before the receipt": { kept: "sent", reach: () => heldAt(RECEIPT) },
  "after the record, before its answer is out": {
    kept: "settled",
    async reach({ payment }, { door }) {
      await chain.pauseMining();
      await passing(ESTIMATE);
      door.stall();
      await chain.resumeMining();
      await until(async () => (await chain.transfers({ nonce: payment.authorization.nonce })).length === 1);
    },
  },
};

describe("a payment", () => {
  let facilitator: Facilitator;
  let gateway: Gateway;
  let agent: PaidAgent;
  let served = 0;

  beforeAll(async () => {
    [facilitator, gateway] = await Promise.all([startFacilitator(chain, { rpcUrls: [relay.url] }), startGateway()]);
    agent = await openPaidAgent({ chain, gateway, facilitator, upstream });
  });
  afterAll(async () => {
    agent?.door.stop();
    await gateway?.[Symbol.asyncDispose]();
    await facilitator?.[Symbol.asyncDispose]();
  });

  async function killedAt({ reach, kept, meanwhile, afterwards }: Moment): Promise<void> {
    const call = await agent.call();
    const moment = reach(call, agent);
    const answering = call.send();
    await moment;
    if (kept !== null) await until(() => facilitator.payment(call.nonce)?.["status"] === kept);
    await facilitator.kill9();
    agent.door.restore();
    const invocation = expectPending(await answering);
    const stored = facilitator.transactions().filter(({ nonce }) => nonce === call.nonce);
    expect(facilitator.payment(call.nonce)?.["status"] ?? null).toBe(kept);
    expect(stored).toHaveLength(kept === "sent" || kept === "settled" ? 1 : 0);
    expect(upstream.of(call.nonce)).toEqual([]);
    relay.heal();
    await meanwhile?.();
    await facilitator.restart();
    await afterwards?.();

    const view = await expectServed({ chain, upstream }, call, invocation);
    served++;
    const { settlement } = view;
    expect(settlement.attempts).toBeGreaterThan(1);
    // What was signed before the crash is what landed, and nothing else was ever signed.
    if (stored.length > 0) expect(settlement.tx_hash).toBe(stored[0]?.["hash"]);
    expect(facilitator.payment(call.nonce)).toMatchObject({
      status: "settled",
      transaction_hash: settlement.tx_hash,
    });
    const nonces = facilitator.transactions().map(({ wallet_nonce }) => wallet_nonce);
    expect(nonces).toEqual(nonces.map((_, index) => index));
    expect(facilitator.reserved("gateway")).toBe(BigInt(served) * PRICE);
    await expectTotals(agent, {
      "": served,
      "status=succeeded": served,
      "settlement=settled": served,
      "settlement=pending": 0,
    });
  }

  test.each(Object.entries(MOMENTS))("is settled once though the facilitator is killed %s", (_name, moment) =>
    killedAt(moment),
  );

  test("is settled once though the facilitator is killed after the claim, before the store", async () => {
    // Only a new process asks for the wallet's nonce.
    await facilitator.kill9();
    await facilitator.restart();
    await killedAt({
      kept: "claimed",
      async reach({ nonce }) {
        relay.on("eth_getTransactionCount", { kind: "hang" });
        await until(() => facilitator.payment(nonce) !== null);
      },
    });
  });
});

test("a payment is settled once though the facilitator on Postgres is killed after the store, and again after the inclusion", async () => {
  const url = await (await startPostgres()).freshDatabase();
  const env = { DATABASE_URL: url };
  await using facilitator = await startFacilitator(chain, { rpcUrls: [relay.url], env });
  await using gateway = await startGateway();
  const agent = await openPaidAgent({ chain, gateway, facilitator, upstream });
  const call = await agent.call();
  const [answer] = await Promise.all([call.send(), heldAt(SEND).then(facilitator.kill9)]);
  const invocation = expectPending(answer);
  relay.heal();
  const included = heldAt(RECEIPT);
  await facilitator.restart();
  await included;
  await facilitator.kill9();
  relay.heal();
  await facilitator.restart();
  const { settlement } = await expectServed({ chain, upstream }, call, invocation);
  await using database = new SQL(url, { max: 1 });
  expect([...(await database`select status, transaction_hash, day from facilitator_payments`)]).toEqual([
    { status: "settled", transaction_hash: settlement.tx_hash, day: expect.any(String) },
  ]);
  expect([...(await database`select hash from facilitator_transactions`)]).toEqual([{ hash: settlement.tx_hash }]);
  expect([...(await database`select reserved from facilitator_days`)]).toEqual([{ reserved: `${PRICE}` }]);
  agent.door.stop();
});

/**
 * A call whose caller loses the gateway before there is an answer; on a machine so busy that the gateway has waited long
 * enough by then, its caller knows that it is accepted.
 */
async function lost(call: PaidCall): Promise<void> {
  const answer = await call.send().catch(() => null);
  if (answer !== null) expectPending(answer);
}

eachDatabase((database) => {
  const KILLED = database.name === "sqlite" ? ["the gateway", "both services"] : ["the gateway"];
  test.concurrent.each(KILLED)(
    "calls are paid and made once though a kill hits %s before, during and after settlements, and with calls at the upstream",
    async (killed) => {
      // On Postgres what a dead process had leased is free after this time and five seconds.
      const env = { TOLLGATE_SETTLE_WAIT_MS: "4000", TOLLGATE_AGENT_CONCURRENCY: "1" };
      await using services = await startServices({ database, gatewayEnv: env, signers: 2 });
      const { chain, relay, upstream, gateway, facilitator } = services;
      const [before, during, after, busy] = [
        await services.open(),
        await services.open(),
        await services.open(),
        await services.open(),
      ];

      const running = await busy.call();
      upstream.hold(running.nonce);
      const accepted = await running.send();
      await upstream.visited(running.nonce);
      const waiting = await busy.call();
      const queued = await waiting.send();
      expect([accepted.status, queued.status]).toEqual([202, 202]);
      // Within the call, unless the machine is busy.
      const queuedView = () => waiting.look(queued.body.invocation_id);
      await until(async () => (await queuedView()).settlement.status === "settled");
      expect(await queuedView()).toMatchObject({ status: "pending" });

      const [early, midway, late] = [await before.call(), await during.call(), await after.call()];
      await chain.pauseMining();
      const sent = passing(SEND, relay);
      const losses = [lost(late)];
      await sent;
      void after.door.stall();
      await chain.resumeMining();
      await until(() => facilitator.payment(late.nonce)?.["status"] === "settled");
      await chain.pauseMining();
      const broadcast = passing(SEND, relay);
      losses.push(lost(midway));
      await broadcast;
      void before.door.stall();
      losses.push(lost(early));
      await before.door.connected(1);

      await Promise.all([gateway.kill9(), ...(killed === "both services" ? [facilitator.kill9()] : [])]);
      await Promise.all(losses);
      expect(facilitator.payment(early.nonce)).toBeNull();
      expect(facilitator.payment(midway.nonce)?.["status"]).toBe("sent");
      for (const { nonce } of [early, midway, late, waiting]) expect(upstream.of(nonce)).toEqual([]);
      await chain.resumeMining();
      for (const { door } of [before, after]) door.restore();
      if (killed === "both services") await facilitator.restart();
      await gateway.restart();

      for (const call of [early, midway, late]) {
        const again = await call.send();
        expect(again.status).toBe(202);
        await expectServed({ chain, upstream }, call, again.body.invocation_id);
      }
      await expectServed({ chain, upstream }, waiting, queued.body.invocation_id);
      await expectLost(services, running, accepted.body.invocation_id);
      expect(facilitator.reserved("gateway")).toBe(5n * PRICE);
      for (const agent of [before, during, after]) {
        await expectTotals(agent, { "": 1, "status=succeeded": 1, "settlement=settled": 1 });
      }
      await expectTotals(busy, {
        "": 2,
        "status=succeeded": 1,
        "status=failed": 1,
        "settlement=settled": 1,
        "settlement=settled_upstream_failed": 1,
      });
    },
  );
});

/** It was at the upstream when the gateway died: paid once, sent once, and its end is known. */
async function expectLost(
  { chain, upstream }: { readonly chain: TestChain; readonly upstream: PaidUpstream },
  call: PaidCall,
  invocation: string,
): Promise<void> {
  expect(await call.ended(invocation)).toMatchObject({
    status: "failed",
    error_class: "internal",
    settlement: { status: "settled_upstream_failed", settled_amount: `${PRICE}` },
  });
  expect(await chain.transfers({ nonce: call.nonce })).toHaveLength(1);
  expect(upstream.of(call.nonce).length).toBeLessThanOrEqual(1);
  const again = await call.send();
  expect([again.status, again.body.invocation_id]).toEqual([202, invocation]);
  expect(upstream.of(call.nonce).length).toBeLessThanOrEqual(1);
}

/** Another one in each run; a run is repeated with the seed that its test's name shows. */
const SEED = Number(process.env["CRASH_SEED"] ?? crypto.getRandomValues(new Uint16Array(1))[0]);

test.concurrent(`gateway and facilitator are killed three times at moments of chance under 40 payments, and each is accounted for (seed ${SEED})`, async () => {
  const PAYMENTS = 40;
  const random = seeded(SEED);
  await using services = await startServices({ signers: 2 });
  const { relay, upstream, gateway, facilitator } = services;
  const agent = await services.open();
  const calls: PaidCall[] = [];
  for (let made = 0; made < PAYMENTS; made++) calls.push(await agent.call());

  /** As a client does that wants its call made: the same payment again, until somebody says that it is accepted. */
  const insist = async (call: PaidCall): Promise<string> => {
    const deadline = performance.now() + ACCEPTED_MS_MAX;
    for (;;) {
      const answer = await call.send().catch((error: Error) => error);
      if (!(answer instanceof Error)) {
        if (answer.status === 202) return answer.body.invocation_id;
        expect([answer.status, answer.text]).toEqual([503, expect.any(String)]);
      }
      if (performance.now() > deadline) throw new Error(`not accepted: ${Bun.inspect(answer)}`);
      await Bun.sleep(50);
    }
  };
  let over = false;
  const callers = Promise.all(calls.map(insist));
  void callers.finally(() => {
    over = true;
  });

  /** So many calls of nodes from now on, or a while in which none come. */
  const moment = async (): Promise<void> => {
    const method = [ESTIMATE, SEND, RECEIPT][random(3) - 1] ?? SEND;
    const nth = relay.count(method) + random(12);
    await Promise.race([relay.called(method, nth), until(() => over)]);
  };
  for (let round = 0; round < 3; round++) {
    await moment();
    if (round === 2) {
      await Promise.all([facilitator.kill9(), gateway.kill9()]);
      await Promise.all([facilitator.restart(), gateway.restart()]);
      continue;
    }
    await facilitator.kill9();
    await facilitator.restart();
    await moment();
    await gateway.kill9();
    await gateway.restart();
  }

  const invocations = await callers;
  expect(new Set(invocations).size).toBe(PAYMENTS);
  let lostCalls = 0;
  for (const [index, call] of calls.entries()) {
    const invocation = invocations[index] ?? "";
    const view = await call.ended(invocation);
    if (view.status === "succeeded") await expectServed(services, call, invocation);
    else {
      await expectLost(services, call, invocation);
      lostCalls++;
    }
    for (const visit of upstream.of(call.nonce)) expect(visit).toEqual({ invocation, paid: 1 });
  }
  expect(upstream.count()).toBeLessThanOrEqual(PAYMENTS);
  expect(facilitator.reserved("gateway")).toBe(BigInt(PAYMENTS) * PRICE);
  const nonces = calls.map(({ nonce }) => facilitator.payment(nonce)?.["status"]);
  expect(nonces).toEqual(calls.map(() => "settled"));
  await expectTotals(agent, {
    "": PAYMENTS,
    "status=failed": lostCalls,
    "settlement=settled": PAYMENTS - lostCalls,
    "settlement=settled_upstream_failed": lostCalls,
    "settlement=pending": 0,
  });
});
