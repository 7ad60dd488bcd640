// A payer who signs more than it has: whatever comes at once, its transfers never revert each other, so they burn no
// gas, and what it has is collected.

import { afterAll, beforeAll, expect, test } from "bun:test";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { openPayingTenant } from "../support/chain/paying.ts";
import { newPayer, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { type PaidUpstream, startPaidUpstream } from "../support/stores/paid-calls.ts";
import { until } from "../support/until.ts";

const VALUE = 10_000n;
const AT_ONCE = 30;

let chain: TestChain;
let facilitator: Facilitator;
let upstream: PaidUpstream;
let gateway: Gateway;

beforeAll(async () => {
  chain = await startChain({ blockTimeSeconds: 1 });
  facilitator = await startFacilitator(chain, { signers: 2 });
  upstream = startPaidUpstream(chain);
  gateway = await startGateway();
});

afterAll(async () => {
  await gateway?.[Symbol.asyncDispose]();
  await upstream?.stop();
  await facilitator?.[Symbol.asyncDispose]();
  await chain?.stop();
});

/** Of the payments' transactions, by the receipt's status. */
async function outcomesOf(payments: readonly SignedPayment[]): Promise<string[]> {
  const nonces = new Set<unknown>(payments.map(({ authorization }) => authorization.nonce));
  const rows = facilitator.transactions().filter((row) => nonces.has(row["nonce"]));
  return Promise.all(
    rows.map(async ({ hash }) => {
      const receipt = await chain.client.getTransactionReceipt({ hash: hash as never }).catch(() => null);
      return receipt?.status ?? "pending";
    }),
  );
}

async function signed(payer = newPayer()): Promise<SignedPayment[]> {
  await chain.fundUsdc(payer.address, VALUE);
  const to = newPayer().address;
  return Promise.all(Array.from({ length: AT_ONCE }, () => signPayment(payer, { to, value: VALUE })));
}

test("thirty authorizations over one balance at once: one is sent and settled, none reverts", async () => {
  const payments = await signed();
  const answers = await Promise.all(payments.map(({ settleRequest }) => facilitator.settle(settleRequest)));
  const kinds = answers.map(({ status, body }) => (status === 200 ? `${body.success}` : `${status}`)).sort();
  // Whoever comes when the first has landed is told that nothing is left.
  expect(kinds.filter((kind) => kind === "true")).toEqual(["true"]);
  expect(new Set(kinds.filter((kind) => kind !== "true")).difference(new Set(["503", "false"]))).toEqual(new Set());
  expect(answers.filter(({ status }) => status === 503).map(({ retryAfter }) => retryAfter)).not.toContain(null);
  expect(await outcomesOf(payments)).toEqual(["success"]);
  // All are known by now to be what they are: nothing is left to take, and nothing is held.
  for (const { settleRequest } of payments) {
    const { status, body } = await facilitator.settle(settleRequest);
    expect([status, body.transaction === ""]).toEqual([200, !body.success]);
  }
  expect(facilitator.reserved("gateway")).toBe(VALUE);
});

test("with money for two of thirty, two are settled when they are asked for again and again", async () => {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE);
  const payments = await signed(payer);
  const endings = await Promise.all(
    payments.map(async ({ settleRequest }) => {
      for (;;) {
        const { status, body } = await facilitator.settle(settleRequest);
        if (status === 200) return body.success;
        await Bun.sleep(100);
      }
    }),
  );
  expect(endings.filter((success) => success)).toHaveLength(2);
  expect(await outcomesOf(payments)).toEqual(["success", "success"]);
});

test("an ordinary caller of a gateway burns no gas by paying thirty calls from one balance", async () => {
  const tenant = await openPayingTenant(gateway, facilitator);
  const payments = await signed();
  const pay_to = payments[0]?.authorization.to;
  const pricing = { amount: `${VALUE}`, asset: "USDC", network: "base", pay_to };
  const id = await tenant.agent({ upstream_url: upstream.url, pricing });
  const nonces = payments.map(({ authorization }) => authorization.nonce);
  const statuses = await Promise.all(
    payments.map(async ({ headers }, n) => {
      return (await tenant.send("POST", `/v1/proxy/${id}`, { nonce: nonces[n] }, headers)).status;
    }),
  );
  expect(new Set(statuses).difference(new Set([202, 402]))).toEqual(new Set());
  await until(() => nonces.some((nonce) => upstream.of(nonce).length > 0));
  expect(await outcomesOf(payments)).toEqual(["success"]);
  expect(nonces.flatMap((nonce) => upstream.of(nonce))).toHaveLength(1);
});
