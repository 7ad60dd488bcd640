// What other facilitators answer, told by a stand-in for them, and what the chain says of the payment: the real token.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { decodeJwt } from "jose";
import { writeCaFile } from "../contract/priced.ts";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { collected, notCollected, startFacilitatorStandIn } from "../support/chain/facilitator-stand-in.ts";
import { openPayingTenant, type PayingTenant } from "../support/chain/paying.ts";
import { newPayer, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { steppedClock } from "../support/gateway/stepped-clock.ts";
import { startUpstream } from "../support/http/upstream.ts";
import { until } from "../support/until.ts";

const VALUE = 1_000n;
const PAYEE = newPayer().address;
const caFile = writeCaFile();
const stack = new AsyncDisposableStack();
const facilitator = startFacilitatorStandIn();
const upstream = startUpstream(() => new Response("made"));
let chain: TestChain;
let looking: PayingTenant;
let blind: PayingTenant;
let agents: Map<PayingTenant, string>;

beforeAll(async () => {
  chain = await startChain();
  const open = async (env: Record<string, string>): Promise<PayingTenant> => {
    const gateway: Gateway = stack.use(await startGateway({ env: { TOLLGATE_CA_FILE: caFile, ...env } }));
    return openPayingTenant(gateway, { url: facilitator.url, client: { bundle: "a word" } });
  };
  [looking, blind] = await Promise.all([open({ TOLLGATE_RPC_URLS: chain.url }), open({})]);
  const pricing = { amount: `${VALUE}`, asset: "USDC", network: "base", pay_to: PAYEE };
  const fields = { upstream_url: upstream.url, pricing, emit_receipts: true };
  agents = new Map();
  for (const tenant of [looking, blind]) agents.set(tenant, await tenant.agent(fields));
});
afterAll(async () => {
  await stack.disposeAsync();
  await Promise.all([facilitator.stop(), upstream.stop(), chain?.stop()]);
});

async function funded(validBefore?: number): Promise<SignedPayment & { payer: ReturnType<typeof newPayer> }> {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE);
  const window = validBefore === undefined ? {} : { validBefore };
  return { ...(await signPayment(payer, { to: PAYEE, value: VALUE, ...window })), payer };
}

const call = (tenant: PayingTenant, payment: SignedPayment) =>
  tenant.send("POST", `/v1/proxy/${agents.get(tenant)}`, { n: 1 }, payment.headers);

/** The settlement and the call when the payment's outcome is known. */
async function closed(tenant: PayingTenant, id: string) {
  for (;;) {
    const { body } = await tenant.send("GET", `/v1/invocations/${id}`);
    if (body.settlement.status !== "pending" && body.status !== "pending" && body.status !== "running") return body;
    await Bun.sleep(100);
  }
}

test.concurrent.each([
  ["200 without a hash", 200, null],
  ["500 with a hash", 500, `0x${"ab".repeat(32)}`],
  ["402 with an empty hash", 402, ""],
])(
  "a payment that a facilitator calls pending, by %s, and that the chain shows, buys its call",
  async (_, status, transaction) => {
    const payment = await funded();
    const { nonce } = payment.authorization;
    facilitator.answer(nonce, async () => {
      await chain.collectAsStranger(payment);
      return Response.json({ success: false, errorReason: "settlement_pending", transaction }, { status });
    });
    const answer = await call(looking, payment);
    expect(answer.status).toBe(202);
    const [transfer] = await chain.transfers({ nonce });
    expect(await closed(looking, answer.body.invocation_id)).toMatchObject({
      status: "succeeded",
      settlement: { status: "settled", tx_hash: transfer?.transaction_hash },
    });
  },
);

test.concurrent("a payment that is called pending and is not on the chain stays open, with and without nodes", async () => {
  for (const tenant of [looking, blind]) {
    const payment = await funded();
    const { nonce } = payment.authorization;
    facilitator.answer(nonce, () => notCollected({ errorReason: "settlement_pending", transaction: null }));
    const answer = await call(tenant, payment);
    expect(answer.status).toBe(202);
    await facilitator.arrival(nonce, 2);
    const { body } = await tenant.send("GET", `/v1/invocations/${answer.body.invocation_id}`);
    expect(body).toMatchObject({ status: "pending", settlement: { status: "pending" } });
    facilitator.answer(nonce, collected);
    expect((await closed(tenant, answer.body.invocation_id)).settlement.status).toBe("settled");
  }
});

test.concurrent("after an attempt in doubt a nonce that is used is looked up: by our payment it settles, by a cancellation it fails", async () => {
  for (const [use, status] of [
    [(payment: Awaited<ReturnType<typeof funded>>) => chain.collectAsStranger(payment), "settled"],
    [({ payer, authorization }) => chain.cancelAuthorization(payer, authorization.nonce), "settlement_failed"],
  ] as [(payment: Awaited<ReturnType<typeof funded>>) => Promise<unknown>, string][]) {
    const payment = await funded();
    const { nonce } = payment.authorization;
    facilitator.answer(nonce, () => new Response("away", { status: 502 }));
    const answer = await call(looking, payment);
    await use(payment);
    facilitator.answer(nonce, () => notCollected({ errorReason: "invalid_exact_evm_payload_nonce_already_used" }));
    expect((await closed(looking, answer.body.invocation_id)).settlement.status).toBe(status);
  }
});

test.concurrent("a payment that is put off by 429 with Retry-After is asked again, and one without it is declined", async () => {
  const later = await funded();
  facilitator.answer(
    later.authorization.nonce,
    () => new Response("{}", { status: 429, headers: { "retry-after": "1" } }),
  );
  const answer = await call(blind, later);
  expect(answer.status).toBe(202);
  facilitator.answer(later.authorization.nonce, collected);
  expect((await closed(blind, answer.body.invocation_id)).settlement.status).toBe("settled");

  const never = await funded();
  facilitator.answer(never.authorization.nonce, () => new Response("{}", { status: 429 }));
  const declined = await call(blind, never);
  expect([declined.status, declined.headers.get("cache-control")]).toEqual([402, "no-store"]);
  const header = declined.headers.get("x-payment-response") ?? "";
  expect(JSON.parse(atob(header))).toEqual({
    success: false,
    transaction: "",
    network: "base",
    payer: never.authorization.from.toLowerCase(),
  });
});

test.concurrent("a payment that was only put off until its time was over is looked up where the gateway has nodes, and expires where it has none", async () => {
  const putOff = async (tenant: PayingTenant, settlement: object) => {
    const payment = await funded(Math.floor(Date.now() / 1000) + 9);
    const { nonce } = payment.authorization;
    facilitator.answer(nonce, () => new Response("{}", { status: 429, headers: { "retry-after": "1" } }));
    const answer = await call(tenant, payment);
    expect(answer.status).toBe(202);
    await chain.collectAsStranger(payment);
    expect((await closed(tenant, answer.body.invocation_id)).settlement).toMatchObject(settlement);
  };
  await Promise.all([
    putOff(looking, { status: "settled" }),
    putOff(blind, { status: "settlement_failed", reason: "expired" }),
  ]);
});

/** What the signed receipt of the call says of its settlement. */
async function receiptOf(tenant: PayingTenant, id: string) {
  for (;;) {
    const { status, body } = await tenant.send("GET", `/v1/invocations/${id}/receipt`);
    if (status === 200) return decodeJwt<{ settlement: { tx_hash: string } }>(body.receipt).settlement;
    await Bun.sleep(100);
  }
}

test("a payment that a reorganisation moves to another transaction has that one in its record and its receipt", async () => {
  for (const [tenant, seconds] of [
    [looking, "2"],
    [blind, "2"],
    // Final long after the receipt has been asked for.
    [looking, "60"],
    [blind, "60"],
  ] as const) {
    const payment = await funded();
    const { nonce } = payment.authorization;
    const hashes = [await chain.collectAsStranger(payment)];
    facilitator.answer(nonce, (asked) => {
      const answer = collected(asked, { transaction: hashes.at(-1) });
      answer.headers.set("settlement-final-after", seconds);
      return answer;
    });
    const answer = await call(tenant, payment);
    const { invocation_id: id } = answer.body;
    expect((await closed(tenant, id)).settlement.tx_hash).toBe(hashes[0]);
    await chain.reorg(1);
    // Otherwise the stranger's transaction would be the one that it was.
    await chain.collectAsStranger(await funded());
    hashes.push(await chain.collectAsStranger(payment));
    expect(hashes[1]).not.toBe(hashes[0]);
    const shown = async () => (await tenant.send("GET", `/v1/invocations/${id}`)).body.settlement;
    await until(async () => seconds !== "2" || (await shown()).tx_hash !== hashes[0]);
    expect((await receiptOf(tenant, id)).tx_hash).toBe(hashes[1] ?? "");
    expect(await shown()).toMatchObject({ status: "settled", tx_hash: hashes[1] });
    const url = new URL("/v1/receipts?limit=100", tenant.callUrl(""));
    const lines = (await (await fetch(url, { headers: tenant.headers })).text()).split("\n");
    expect(lines.filter((line) => line !== "" && decodeJwt(line)["invocation_id"] === id)).toHaveLength(1);
    expect(facilitator.of(nonce)).toHaveLength(tenant === blind ? 2 : 1);
  }
});

// The last one here, since the chain's time is moved.
test("after an attempt in doubt an unused nonce is a decline by a block that is later than a minute past its time by our own clock too, and by none before", async () => {
  const clock = steppedClock();
  const env = { TOLLGATE_CA_FILE: caFile, TOLLGATE_RPC_URLS: chain.url };
  await using gateway = await startGateway({ env, program: clock.program });
  const tenant = await openPayingTenant(gateway, { url: facilitator.url, client: { bundle: "a word" } });
  const pricing = { amount: `${VALUE}`, asset: "USDC", network: "base", pay_to: PAYEE };
  const agent = await tenant.agent({ upstream_url: upstream.url, pricing });
  const end = Math.floor(Date.now() / 1000) + 600;
  const inDoubt = async (validBefore: number) => {
    const payment = await funded(validBefore);
    const { nonce } = payment.authorization;
    facilitator.answer(nonce, () => new Response("away", { status: 502 }));
    const { body } = await tenant.send("POST", `/v1/proxy/${agent}`, { n: 1 }, payment.headers);
    facilitator.answer(nonce, () => notCollected({ errorReason: "invalid_exact_evm_payload_nonce_already_used" }));
    return { id: body.invocation_id };
  };
  const [earlier, later] = [await inDoubt(end - 1), await inDoubt(end)];
  const blockAt = async (second: number) => {
    await chain.rpc("evm_setNextBlockTimestamp", [second]);
    await chain.mine();
  };
  /** After so many attempts whose outcome is recorded. */
  const expectOpen = async ({ id }: typeof later, attempts: number) => {
    for (;;) {
      const { body } = await tenant.send("GET", `/v1/invocations/${id}`);
      expect(body).toMatchObject({ status: "pending", settlement: { status: "pending" } });
      if (body.settlement.attempts >= attempts) return body.settlement.attempts;
      await Bun.sleep(50);
    }
  };
  const declined = { status: "failed", settlement: { status: "settlement_failed" } };
  await blockAt(end + 60);
  await expectOpen(earlier, 1 + (await expectOpen(earlier, 1)));
  const before = await expectOpen(later, 1);
  await gateway.stop();
  // A step counts for nothing while the gateway runs.
  clock.set((end + 61) * 1000 - Date.now());
  await gateway.restart();
  expect(await closed(tenant, earlier.id)).toMatchObject(declined);
  await expectOpen(later, before + 1);
  await blockAt(end + 61);
  expect(await closed(tenant, later.id)).toMatchObject(declined);
});
