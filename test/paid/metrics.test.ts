// The metrics of both services about money: one paid call as each of them counts it, refusals, unknown outcomes, and what
// the facilitator tells of its nodes and wallets.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { openPayingTenant, type PayingTenant } from "../support/chain/paying.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../support/chain/rpc-relay.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";
import { type Scrape, scrape, scrapeUntil } from "../support/metrics.ts";

const PRICE = 10_000n;
const ETHER = 1e18;
const env = { TOLLGATE_METRICS_PORT: "0" };

let chain: TestChain;
let relay: RpcRelay;
let facilitator: Facilitator;
let gateway: Gateway;
let tenant: PayingTenant;
let upstream: Upstream;

beforeAll(async () => {
  chain = await startChain();
  relay = await startRpcRelay(chain.url);
  const dead = await startRpcRelay(chain.url);
  await dead.stop();
  upstream = startUpstream(() => new Response("paid for"));
  [facilitator, gateway] = await Promise.all([
    startFacilitator(chain, {
      rpcUrls: [dead.url, relay.url],
      env: { ...env, TOLLGATE_MAX_PER_TRANSACTION: "50000" },
    }),
    startGateway({ env: { ...env, TOLLGATE_SETTLE_WAIT_MS: "1500" } }),
  ]);
  tenant = await openPayingTenant(gateway, facilitator);
});

afterAll(async () => {
  await gateway?.[Symbol.asyncDispose]();
  await facilitator?.[Symbol.asyncDispose]();
  await upstream?.stop();
  await relay?.stop();
  await chain?.stop();
});

const settled = (found: Scrape, outcome: string) => found.value("tollgate_settlements_total", { outcome });
const paid = (found: Scrape, outcome: string) => found.value("tollgate_payments_total", { outcome });

test("a facilitator tells of its wallets and nodes from the start, and of requests", async () => {
  const found = await scrape(facilitator);
  const [address = ""] = facilitator.signers;
  expect(found.value("tollgate_wallet_balance_wei", { address: address.toLowerCase() })).toBe(10 * ETHER);
  expect(found.value("tollgate_rpc_errors_total", { endpoint: "0" })).toBeGreaterThan(0);
  expect(found.value("tollgate_rpc_errors_total", { endpoint: "1" })).toBe(0);
  expect([settled(found, "settled"), found.value("tollgate_settlement_duration_seconds_count")]).toEqual([0, 0]);
  expect(found.text).not.toContain(new URL(relay.url).port);
  await fetch(`${facilitator.openUrl}/supported`);
  const after = await scrape(facilitator);
  expect(after.value("tollgate_http_requests_total", { route: "/supported", status: "200" })).toBe(1);
});

test("a paid call is counted once by each service, whatever is sent again, and an unknown outcome is counted besides", async () => {
  const [payer, payee] = [newPayer(), newPayer().address];
  await chain.fundUsdc(payer.address, PRICE * 10n);
  const pricing = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to: payee };
  const agent = await tenant.agent({ upstream_url: upstream.url, pricing });
  const call = (headers: Record<string, string> = {}) => tenant.send("POST", `/v1/proxy/${agent}`, {}, headers);
  const sign = (value: bigint) => signPayment(payer, { to: payee, value });
  const first = await sign(PRICE);

  expect((await call()).status).toBe(402);
  expect((await call((await sign(PRICE + 1n)).headers)).status).toBe(402);
  expect((await call(first.headers)).status).toBe(202);
  expect((await call(first.headers)).status).toBe(202);
  expect((await facilitator.settle(first.settleRequest)).status).toBe(200);
  const ownSide = await scrapeUntil(gateway, (found) => settled(found, "settled") === 1);
  expect(["required", "refused", "accepted", "crowded"].map((outcome) => paid(ownSide, outcome))).toEqual([1, 1, 1, 0]);
  expect(ownSide.value("tollgate_accepted_total")).toBe(1);
  expect(ownSide.value("tollgate_settlement_duration_seconds_count")).toBe(1);
  const otherSide = await scrape(facilitator);
  expect(settled(otherSide, "settled")).toBe(1);
  expect(otherSide.value("tollgate_settlement_duration_seconds_count")).toBe(1);
  expect(otherSide.value("tollgate_http_requests_total", { route: "/settle", status: "200" })).toBe(2);

  await chain.pauseMining();
  const second = await sign(PRICE);
  expect((await call(second.headers)).status).toBe(202);
  const unsure = await scrapeUntil(gateway, (found) => settled(found, "unknown") >= 1);
  expect([settled(unsure, "settled"), paid(unsure, "accepted")]).toEqual([1, 2]);
  expect(unsure.value("tollgate_queue_depth")).toBe(0);
  await chain.resumeMining();
  await chain.rpc("evm_mine", []);
  const sure = await scrapeUntil(gateway, (found) => settled(found, "settled") === 2);
  expect(sure.value("tollgate_accepted_total")).toBe(2);
  await scrapeUntil(gateway, (found) => found.value("tollgate_invocations_ended_total", { status: "succeeded" }) === 2);
  for (const secret of [tenant.name, payer.address, payer.address.toLowerCase(), payee]) {
    expect((await scrape(gateway)).text + (await scrape(facilitator)).text).not.toContain(secret);
  }
});

test("what the facilitator refuses is counted by its reason's kind, and declines at the gateway", async () => {
  const [poor, payee] = [newPayer(), newPayer().address];
  const pricing = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to: payee };
  const agent = await tenant.agent({ upstream_url: upstream.url, pricing });
  const unfunded = await signPayment(poor, { to: payee, value: PRICE });
  const before = [await scrape(gateway), await scrape(facilitator)] as const;
  expect((await tenant.send("POST", `/v1/proxy/${agent}`, {}, unfunded.headers)).status).toBe(402);
  expect(
    (await facilitator.settle((await signPayment(poor, { to: payee, value: 60_000n })).settleRequest)).status,
  ).toBe(429);
  const after = [await scrape(gateway), await scrape(facilitator)] as const;
  const more = (side: 0 | 1, outcome: string) => settled(after[side], outcome) - settled(before[side], outcome);
  expect([more(0, "declined"), more(1, "refused"), more(1, "over_limit"), more(1, "failed")]).toEqual([1, 1, 1, 0]);
  // It was refused to its caller, so it was not accepted. Its record has ended.
  expect(after[0].value("tollgate_accepted_total")).toBe(before[0].value("tollgate_accepted_total"));
  const ended = { mode: "transactional", status: "failed", error_class: "none" };
  expect(after[0].value("tollgate_invocations_ended_total", ended)).toBe(1);
});

test("without a node no balance is told, errors are, and a scrape answers all the same", async () => {
  await relay.refuse();
  const away = await scrapeUntil(facilitator, (found) => Number.isNaN(found.value("tollgate_wallet_balance_wei")));
  expect(away.types.get("tollgate_wallet_balance_wei")).toBe("gauge");
  expect(away.value("tollgate_rpc_errors_total", { endpoint: "1" })).toBeGreaterThan(0);
  await relay.restore();
  await scrapeUntil(facilitator, (found) => found.value("tollgate_wallet_balance_wei") > 9 * ETHER);
});
