// What goes wrong between the parts while money moves: nodes that fail in every way, fees and gas that run out, a
// facilitator that is away or unwilling. Each call ends settled as soon as that is possible, and is paid and served
// once; whoever asks meanwhile hears that it is accepted, and never that it failed.

import { afterAll, afterEach, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import type { TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { openPayingTenant } from "../support/chain/paying.ts";
import { newPayer, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import { type RpcFault, type RpcRelay, startRpcRelay } from "../support/chain/rpc-relay.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { makePki } from "../support/http/pki.ts";
import {
  expectPending,
  expectServed,
  openPaidAgent,
  type PaidAgent,
  type PaidCall,
  type PaidUpstream,
  PRICE,
  passage,
  type Services,
  startServices,
  transactionTold,
} from "../support/stores/paid-calls.ts";
import { until } from "../support/until.ts";

/** More than every wait inside takes before it fails and says for what it waited. */
setDefaultTimeout(180_000);

const ESTIMATE = "eth_estimateGas";
const NEWEST = "eth_getBlockByNumber";
const RECEIPT = "eth_getTransactionReceipt";
const SEND = "eth_sendRawTransaction";
const GWEI = 10n ** 9n;

let services: Services;
let chain: TestChain;
let relay: RpcRelay;
let upstream: PaidUpstream;
let facilitator: Facilitator;
let gateway: Gateway;
let agent: PaidAgent;

beforeAll(async () => {
  services = await startServices();
  ({ chain, relay, upstream, facilitator, gateway } = services);
  agent = await services.open();
});
afterAll(() => services?.[Symbol.asyncDispose]());

const served = (call: PaidCall, invocation: string) => expectServed({ chain, upstream }, call, invocation);

async function health(): Promise<readonly [number, unknown]> {
  const response = await fetch(`${facilitator.openUrl}/healthz`);
  return [response.status, await response.json()];
}

const isReady = async () => (await health())[0] === 200;

/** By a payer with money, straight to the facilitator. */
async function directPayment(): Promise<SignedPayment> {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, PRICE);
  return signPayment(payer, { to: newPayer().address, value: PRICE });
}

/** The facilitator can't take it now, says when to come again, and keeps nothing of it. */
async function expectUnavailable({ settleRequest, authorization }: SignedPayment): Promise<void> {
  const answer = await facilitator.settle(settleRequest);
  const { status, retryAfter, body } = answer;
  expect([status, Number(retryAfter) > 0, Object.keys(body)]).toEqual([503, true, ["error"]]);
  expect([facilitator.payment(authorization.nonce), facilitator.refusal(authorization.nonce)]).toEqual([null, null]);
}

/** The facilitator has seen the newest block. It looks again and again while its last payments are not final. */
async function seen(): Promise<void> {
  await passage(relay, NEWEST);
  await passage(relay, NEWEST);
}

/** Accepted, and neither paid nor made before things are well again. */
async function expectPaidLater(call: PaidCall, recover: () => Promise<unknown>): Promise<void> {
  const invocation = expectPending(await call.send());
  expect(await call.look(invocation)).toMatchObject({
    status: "pending",
    settlement: { status: "pending" },
  });
  expect(upstream.of(call.nonce)).toEqual([]);
  await recover();
  await served(call, invocation);
}

describe("a paid call over a node", () => {
  afterEach(() => relay.heal());

  const UNDERPRICED = "replacement transaction underpriced";
  const ANSWERS: readonly (readonly [string, RpcFault])[] = [
    ["takes a transaction and then errors", { kind: "error", after: true }],
    ["takes a transaction and then breaks off", { kind: "break", after: true }],
    ["takes a transaction and then falls silent", { kind: "hang", after: true }],
    ["errors instead of taking a transaction", { kind: "error" }],
    ["says that it knows it already", { kind: "error", after: true, message: "already known" }],
    ["says nonce too low of one that it took", { kind: "error", after: true, message: "nonce too low" }],
    ["says replacement underpriced of one that it took", { kind: "error", after: true, message: UNDERPRICED }],
    ["says nonce too low, which is not so", { kind: "error", message: "nonce too low" }],
    ["refuses it beside one that it does not have", { kind: "error", message: UNDERPRICED }],
  ];

  test.each(ANSWERS)("is settled within the call when the node %s", async (_name, fault) => {
    const call = await agent.call();
    relay.on(SEND, fault, 1);
    const answer = await call.send();
    const { settlement } = await served(call, answer.body.invocation_id);
    expect(settlement).toMatchObject({ attempts: 1, tx_hash: transactionTold(answer) });
    const rows = facilitator.transactions().filter(({ nonce }) => nonce === call.nonce);
    expect(new Set(rows.map(({ wallet_nonce }) => wallet_nonce)).size).toBe(1);
  });

  const UNFIT: readonly (readonly [string, string, RpcFault])[] = [
    ["fails", "*", { kind: "error", code: -32_603, message: "internal error" }],
    ["hangs", ESTIMATE, { kind: "hang" }],
    ["answers with garbage", "*", { kind: "garbage", text: "{}" }],
  ];

  test.each(UNFIT)("is accepted when the node %s, and settled when it is well again", async (_name, method, fault) => {
    const call = await agent.call();
    relay.on(method, fault);
    const invocation = expectPending(await call.send());
    expect(facilitator.payment(call.nonce)).toBeNull();
    expect(upstream.of(call.nonce)).toEqual([]);
    relay.heal();
    await served(call, invocation);
  });

  const PASSING: readonly (readonly [string, string, RpcFault, number])[] = [
    ["answers with a page to a simulation", ESTIMATE, { kind: "page", status: 200 }, 1],
    ["errors for a while on receipts", RECEIPT, { kind: "error" }, 2],
    ["answers with the receipt of another", RECEIPT, { kind: "result", result: {} }, 2],
    ["limits the rate", "*", { kind: "page", status: 429 }, 3],
  ];

  test.each(PASSING)("is accepted and settled when the node %s", async (_name, method, fault, times) => {
    const call = await agent.call();
    relay.on(method, fault, times);
    const answer = await call.send();
    expect([answer.status, answer.text]).toEqual([202, expect.any(String)]);
    await served(call, answer.body.invocation_id);
  });

  test("is accepted and settled when the node lies behind by blocks", async () => {
    const call = await agent.call();
    await chain.mine(3);
    relay.behind(3);
    const answering = call.send();
    const mining = setInterval(() => void chain.mine(), 200);
    try {
      const answer = await answering;
      expect([answer.status, answer.text]).toEqual([202, expect.any(String)]);
      await served(call, answer.body.invocation_id);
    } finally {
      clearInterval(mining);
    }
  });

  test("is put off when the node is away, and settled when it is back", async () => {
    const [call, other] = [await agent.call(), await directPayment()];
    await relay.refuse();
    await until(async () => !(await isReady()));
    expect(await health()).toEqual([503, { status: "unavailable", reason: "rpc unreachable" }]);
    await expectUnavailable(other);
    await expectPaidLater(call, relay.restore);
  });

  test("is not refused when the node lies behind, where the payer has no money yet, and settled when it has caught up", async () => {
    const first = await agent.call();
    await served(first, (await first.send()).body.invocation_id);
    const call = await agent.call();
    await seen();
    relay.behind(3);
    const invocation = expectPending(await call.send());
    expect(facilitator.refusal(call.nonce)).toBeNull();
    relay.heal();
    await served(call, invocation);
  });
});

describe("a paid call and gas:", () => {
  afterEach(() => chain.resumeMining());

  test("is put off when gas runs out, and settled when the wallet is filled", async () => {
    const [wallet = "0x"] = facilitator.signers;
    const [call, other] = [await agent.call(), await directPayment()];
    await chain.fundEth(wallet, 0n);
    await until(async () => !(await isReady()));
    expect(await health()).toEqual([503, { status: "unavailable", reason: "gas wallet low" }]);
    await expectUnavailable(other);
    await expectPaidLater(call, () => chain.fundEth(wallet, 10n ** 18n));
  });

  test("is 503 and claims nothing when gas is too dear before the broadcast, and settled when it is cheaper", async () => {
    const first = await agent.call();
    await served(first, (await first.send()).body.invocation_id);
    const [call, other] = [await agent.call(), await directPayment()];
    const reserved = facilitator.reserved("gateway");
    await chain.setBaseFee(9n * GWEI);
    await chain.mine();
    await seen();
    const invocation = expectPending(await call.send());
    await expectUnavailable(other);
    expect([facilitator.payment(call.nonce), facilitator.reserved("gateway")]).toEqual([null, reserved]);
    await chain.mine(10);
    await served(call, invocation);
  });

  test("waits when gas is too dear after the broadcast, and pays more at the same nonce within the cap", async () => {
    await chain.setBaseFee(GWEI / 100n);
    const call = await agent.call();
    await seen();
    const before = facilitator.transactions().length;
    await chain.pauseMining();
    const sent = passage(relay, SEND);
    const answering = call.send();
    await sent;
    await until(async () => ((await chain.rpc("txpool_status")) as { pending: string }).pending === "0x1");
    await chain.setBaseFee(9n * GWEI);
    await chain.mine();
    expect(await chain.transfers({ nonce: call.nonce })).toEqual([]);
    // The fee falls by an eighth with each empty block, until the cap suffices.
    await chain.mine(7);
    await until(() => facilitator.transactions().length > before + 1);
    await chain.resumeMining();
    const answer = await answering;
    const { settlement } = await served(call, answer.body.invocation_id);
    const rows = facilitator.transactions().slice(before);
    expect(new Set(rows.map(({ wallet_nonce }) => wallet_nonce)).size).toBe(1);
    for (const { max_fee } of rows) expect(BigInt(String(max_fee))).toBeLessThanOrEqual(5n * GWEI);
    expect(rows.map(({ hash }) => hash)).toContain(settlement.tx_hash);
    await chain.mine(20);
  });
});

describe("a facilitator that starts", () => {
  test("says why it is not ready without a node that answers, and settles when one does", async () => {
    await facilitator.stop();
    await relay.refuse();
    await facilitator.restart();
    expect(await health()).toEqual([503, { status: "unavailable", reason: "rpc unreachable" }]);
    await expectUnavailable(await directPayment());
    const call = await agent.call();
    const invocation = expectPending(await call.send());
    await relay.restore();
    await served(call, invocation);
    expect(await health()).toEqual([200, { status: "ok" }]);
  });

  test("ends again with a node of another chain, and says what to mend", async () => {
    await facilitator.stop();
    relay.on("eth_chainId", { kind: "result", result: "0x1" });
    const { code, stderr } = await facilitator.run("--mode", "facilitator", "--port", "0");
    expect([code, stderr]).toEqual([2, expect.stringContaining("TOLLGATE_RPC_URLS")]);
    expect(stderr).not.toContain(new URL(relay.url).port);
    relay.heal();
    await facilitator.restart();
    await until(isReady);
  });
});

describe("a paid call by a facilitator", () => {
  const opened: PaidAgent[] = [];
  const open = async () => {
    const agent = await openPaidAgent({ chain, gateway, facilitator, upstream });
    opened.push(agent);
    return agent;
  };
  afterAll(() => {
    for (const { door } of opened) door.stop();
  });
  const port = () => Number(new URL(facilitator.url).port);

  /** Accepted while it is away and settled when it is back. */
  async function expectPatience({ door, call }: PaidAgent, comeBack: () => unknown): Promise<void> {
    const paid = await call();
    const invocation = expectPending(await paid.send());
    await until(async () => (await paid.look(invocation)).settlement.attempts > 1);
    expect(await paid.look(invocation)).toMatchObject({
      status: "pending",
      settlement: { status: "pending" },
    });
    expect([upstream.of(paid.nonce), facilitator.payment(paid.nonce)]).toEqual([[], null]);
    await comeBack();
    await served(paid, invocation);
    expect(door.connections()).toBeGreaterThan(0);
  }

  test.concurrent("uses the second node when the first is dead, which is waited for once", async () => {
    const dead = await startRpcRelay(chain.url);
    await using other = await startFacilitator(chain, { rpcUrls: [dead.url, relay.url] });
    const { door, call } = await openPaidAgent({ chain, gateway, facilitator: other, upstream });
    const settle = async () => {
      const paid = await call();
      const answer = await paid.send();
      await served(paid, answer.body.invocation_id);
    };
    /** How often the dead one was asked for something: whether it is there again is found out beside the calls. */
    const asked = () => [ESTIMATE, NEWEST, RECEIPT, SEND].reduce((sum, method) => sum + dead.count(method), 0);
    await settle();
    const whole = asked();
    dead.on("*", { kind: "hang" });
    await settle();
    const before = asked();
    expect(before).toBeGreaterThan(whole);
    for (let again = 0; again < 3; again++) await settle();
    expect(asked()).toBe(before);
    dead.heal();
    await dead.refuse();
    await settle();
    door.stop();
  });

  test.concurrent("is settled later when that refuses connections for a while", async () => {
    const agent = await open();
    agent.door.refuse();
    await expectPatience(agent, agent.door.restore);
  });

  test.concurrent("is settled later when that is behind a proxy which answers 502 for a while", async () => {
    const agent = await open();
    const read = (file: string) => readFileSync(join(dirname(facilitator.dataDir), "pki", file), "utf8");
    await using proxy = standIn({ cert: read("server.crt"), key: read("server.key") });
    agent.door.leadTo(proxy.port);
    await expectPatience(agent, () => {
      expect(proxy.requests()).toBeGreaterThan(1);
      agent.door.leadTo(port());
      // Open connections would lead to the proxy for as long as it keeps them.
      agent.door.cut();
    });
  });

  test.concurrent("is settled later when that shows a certificate of somebody else for a while", async () => {
    const agent = await open();
    const { server } = await makePki();
    await using stranger = standIn(server);
    agent.door.leadTo(stranger.port);
    await expectPatience(agent, () => {
      expect(stranger.requests()).toBe(0);
      agent.door.leadTo(port());
    });
  });

  test.concurrent("is accepted when that has a name which does not exist, and nobody is called", async () => {
    const { client } = facilitator;
    const tenant = await openPayingTenant(gateway, { url: "https://facilitator.invalid", client });
    const payTo = newPayer().address;
    const pricing = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to: payTo };
    const id = await tenant.agent({ upstream_url: upstream.url, pricing });
    const { headers, authorization } = await signPayment(newPayer(), { to: payTo, value: PRICE });
    const { nonce } = authorization;
    const invocation = expectPending(await tenant.send("POST", `/v1/proxy/${id}`, { nonce }, headers));
    await until(async () => (await tenant.poll(id, invocation, 0)).settlement.attempts > 1);
    expect(await tenant.poll(id, invocation, 0)).toMatchObject({
      status: "pending",
      settlement: { status: "pending" },
    });
    expect(upstream.of(nonce)).toEqual([]);
  });

  test.concurrent("stays open when that bars the account after an unknown attempt, until a definite answer after the end", async () => {
    await using gateway = await startGateway();
    const client = await facilitator.addAccount("barred");
    const { url } = facilitator;
    const agent = await openPaidAgent({ chain, gateway, facilitator: { url, client }, upstream });
    opened.push(agent);
    // It leaves an open connection.
    const first = await agent.call();
    await first.ended((await first.send()).body.invocation_id);
    const asked = agent.door.stall();
    const validBefore = Math.floor(Date.now() / 1000) + 8;
    const call = await agent.call({ validBefore });
    const answer = call.send();
    await asked;
    // The connection is lost with the payment on it, so nobody knows what has arrived.
    agent.door.cut();
    const invocation = expectPending(await answer);
    expect((await facilitator.run("account", "disable", "barred")).code).toBe(0);
    const refusals = () => facilitator.lines("account_refused").length;
    const before = refusals();
    agent.door.restore();
    await until(() => refusals() > before);
    const attempts = async () => (await call.look(invocation)).settlement.attempts;

    // From four seconds after its end on, nothing of ours can be under way on chain.
    const over = (validBefore + 4) * 1000;
    while (Date.now() <= over) {
      const seconds = Math.ceil((over - Date.now()) / 1000);
      const view = await agent.tenant.poll(agent.id, invocation, seconds);
      expect([view.status, view.settlement.status]).toEqual(["pending", "pending"]);
    }
    const tried = await attempts();
    await gateway.stop();
    await gateway.restart();
    await until(async () => (await attempts()) > tried);
    await until(() => refusals() > before + 1);
    expect(await call.look(invocation)).toMatchObject({
      status: "pending",
      settlement: { status: "pending" },
    });
    expect((await facilitator.run("account", "enable", "barred")).code).toBe(0);
    await gateway.stop();
    await gateway.restart();
    expect(await call.ended(invocation)).toMatchObject({
      status: "failed",
      error_class: null,
      settlement: { status: "settlement_failed", reason: "declined" },
    });
    expect((await call.send()).status).toBe(402);
    expect(await chain.transfers({ nonce: call.nonce })).toEqual([]);
    expect([upstream.of(call.nonce), facilitator.reserved("barred")]).toEqual([[], PRICE]);
  });
});

/** A TLS server in the facilitator's place that answers 502 to everything. */
function standIn(tls: { readonly cert: string; readonly key: string }) {
  let requests = 0;
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    tls,
    fetch() {
      requests++;
      return new Response("<html>bad gateway</html>", { status: 502 });
    },
  });
  return {
    port: Number(server.port),
    requests: () => requests,
    [Symbol.asyncDispose]: () => server.stop(true),
  };
}
