// Payments that share a transaction (TOLLGATE_BATCH), by the compiled facilitator: killed at exact moments, timed out and
// replayed, each authorization is collected once, and each caller learns the truth about its own.

import { afterAll, afterEach, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import type { Hex } from "viem";
import multicall3 from "../../src/cli/demo/multicall3.json" with { type: "json" };
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../support/chain/rpc-relay.ts";
import { holding, passage } from "../support/stores/paid-calls.ts";
import { until } from "../support/until.ts";

/** More than every wait inside takes before it fails and says for what it waited. */
setDefaultTimeout(120_000);
const COUNT = 8;
const PRICE = 1000n;
const AGAIN_MS = 100;

let chain: TestChain;
let relay: RpcRelay;
let facilitator: Facilitator;
beforeAll(async () => {
  chain = await startChain();
  relay = await startRpcRelay(chain.url);
  facilitator = await startFacilitator(chain, { rpcUrls: [relay.url], env: { TOLLGATE_BATCH: "20" } });
});
afterEach(async () => {
  relay.heal();
  await chain.resumeMining();
});
afterAll(async () => {
  await facilitator?.[Symbol.asyncDispose]();
  await relay?.stop();
  await chain?.stop();
});

async function newPayments(): Promise<SignedPayment[]> {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, PRICE * BigInt(COUNT));
  const sign = () => signPayment(payer, { to: newPayer().address, value: PRICE });
  return Promise.all(Array.from({ length: COUNT }, sign));
}

/** As a gateway does it: what is not known yet is asked again, with the same payment. */
async function settled({ settleRequest }: SignedPayment): Promise<void> {
  await until(async () => {
    const { status, body } = await facilitator.settle(settleRequest);
    expect(status === 200 && body.transaction === "").toBe(false);
    if (status === 200 && body.success === true) return true;
    await Bun.sleep(AGAIN_MS);
    return false;
  });
}

const transactionsOf = async (payments: readonly SignedPayment[]): Promise<Set<Hex>> => {
  const hashes = new Set<Hex>();
  for (const { authorization } of payments) {
    const transfers = await chain.transfers({ nonce: authorization.nonce });
    expect(transfers).toHaveLength(1);
    hashes.add(transfers[0]!.transaction_hash);
  }
  return hashes;
};

const isAll = (payments: readonly SignedPayment[], status: string) =>
  payments.every(({ authorization }) => facilitator.payment(authorization.nonce)?.["status"] === status);

const MOMENTS: Readonly<Record<string, (payments: readonly SignedPayment[]) => Promise<unknown>>> = {
  "before the claims": () => holding(relay, "eth_estimateGas"),
  "after the store, before the broadcast": () => holding(relay, "eth_sendRawTransaction"),
  async "after the broadcast"() {
    await chain.pauseMining();
    await passage(relay, "eth_sendRawTransaction");
  },
  "after the inclusion, before the receipt": () => holding(relay, "eth_getTransactionReceipt"),
  async "while the outcomes are recorded"(payments) {
    await until(() =>
      payments.some(({ authorization }) => facilitator.payment(authorization.nonce)?.["status"] === "settled"),
    );
  },
};

for (const [moment, reach] of Object.entries(MOMENTS)) {
  test(`killed ${moment}, every payment is collected once, and told so`, async () => {
    const payments = await newPayments();
    const reached = reach(payments);
    const answers = payments.map(({ settleRequest }) => facilitator.settle(settleRequest).catch(() => null));
    await reached;
    if (moment.includes("broadcast") || moment.includes("receipt")) await until(() => isAll(payments, "sent"));
    await facilitator.kill9();
    await Promise.all(answers);
    relay.heal();
    await facilitator.restart();
    await chain.resumeMining();
    await chain.mine();
    await Promise.all(payments.map(settled));
    const hashes = await transactionsOf(payments);
    // On a slow machine not all of them wait at the same time.
    if (moment !== "before the claims") expect(hashes.size).toBeLessThan(COUNT);
  });
}

test("after an inclusion timeout each caller gets the hash that may still land, and later its success", async () => {
  await facilitator.stop();
  await facilitator.restart({ TOLLGATE_BATCH: "20", TOLLGATE_INCLUSION_TIMEOUT_MS: "2500" });
  const payments = await newPayments();
  await chain.pauseMining();
  const answers = await Promise.all(payments.map(({ settleRequest }) => facilitator.settle(settleRequest)));
  const named = new Set(answers.map(({ body }) => body.transaction));
  expect(answers.map(({ status, body }) => [status, body.success])).toEqual(payments.map(() => [200, false]));
  for (const hash of named) expect(hash).toMatch(/^0x[0-9a-f]{64}$/);
  expect(named.size).toBeLessThan(COUNT);
  await chain.resumeMining();
  await chain.mine();
  await Promise.all(payments.map(settled));
  expect(await transactionsOf(payments)).toEqual(named);
});

test("it does not start on a chain without Multicall3, and says which variable asks for it", async () => {
  await facilitator.stop();
  await chain.rpc("anvil_setCode", [multicall3.address, "0x"]);
  const { code, stderr } = await facilitator.run("--mode", "facilitator");
  expect(code).toBe(2);
  expect(stderr).toContain("TOLLGATE_BATCH");
  expect(stderr).toContain(multicall3.address);
  await chain.rpc("anvil_setCode", [multicall3.address, multicall3.code]);
});
