// What nodes do wrong, and what a crash leaves: every payment ends right, with one transfer at most.

import { describe, expect, test } from "bun:test";
import type { TestChain } from "../../../test/support/chain/chain.ts";
import type { RpcFault, RpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import { fundedSigner, newPayment, type TestWallet } from "../../../test/support/chain/wallet.ts";
import { useChain } from "../../../test/support/chain/wallet-tests.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { until } from "../../../test/support/until.ts";
import type { Chain } from "../../chain/chain.ts";

const GWEI = 10n ** 9n;
const SEND = "eth_sendRawTransaction";

let chain: TestChain;
let relay: RpcRelay;
const { start, startBehind, untilPending, expectCollected } = useChain((nodes) => {
  ({ chain, relay } = nodes);
});
/** Behind the relay, and it soon tells again what the node has said to know. */
const startInsistent = () => startBehind({ limits: { rebroadcastMs: 1000 } });

async function newPayments(count: number) {
  const payments = [];
  for (let made = 0; made < count; made++) payments.push(await newPayment(chain));
  return payments;
}

/** The nonces of the wallet's transactions that replace no other, in ascending order. */
async function firstNonces(wallet: TestWallet): Promise<number[]> {
  return (await wallet.rows()).filter((row) => row.replacement === 0).map((row) => row.wallet_nonce);
}

describe("a payment over one node", () => {
  test.each<[string, RpcFault]>([
    ["takes it and answers with an error", { kind: "error", after: true }],
    ["takes it and breaks off", { kind: "break", after: true }],
    ["takes it and hangs", { kind: "hang", after: true }],
    ["takes it and answers with garbage", { kind: "garbage", after: true, text: '{"jsonrpc":"2.0","id":1}' }],
    ["refuses it with an internal error", { kind: "error", code: -32_603, message: "internal error" }],
    ["breaks off", { kind: "break" }],
    ["is overloaded", { kind: "page", status: 429 }],
    ["says already known, without knowing it", { kind: "error", message: "already known" }],
    ["says nonce too low, which is not so", { kind: "error", message: "nonce too low" }],
    ["says replacement underpriced", { kind: "error", message: "replacement transaction underpriced" }],
    ["says insufficient funds", { kind: "error", message: "insufficient funds for gas * price + value" }],
  ])("is collected although the node, when it gets the transaction, %s", async (_, fault) => {
    const wallet = await startInsistent();
    const payment = await newPayment(chain);
    relay.on(SEND, fault, 1);
    await wallet.collect(payment);
    await expectCollected(wallet, payment);
    expect((await wallet.rows()).every((row) => row.wallet_nonce === 0)).toBe(true);
    const next = await newPayment(chain);
    await wallet.collect(next);
    await expectCollected(wallet, next);
  });
});

describe("a payment over several nodes", () => {
  test.each<[string, RpcFault]>([
    ["hangs", { kind: "hang" }],
    ["answers garbage", { kind: "garbage", text: "<html>" }],
    ["answers wrong types", { kind: "result", result: "0xzz" }],
    ["is overloaded", { kind: "page", status: 503 }],
    ["has internal errors", { kind: "error", code: -32_603, message: "internal error" }],
    ["breaks off", { kind: "break" }],
  ])("is collected over the second one when the first %s", async (_, fault) => {
    relay.on("*", fault);
    const wallet = await startBehind({}, [chain.url]);
    const payment = await newPayment(chain);
    await wallet.collect(payment);
    await expectCollected(wallet, payment);
  });

  test("is not taken for lost when the first node lies behind by blocks, and ends as it should", async () => {
    const wallet = await startBehind();
    const first = await newPayment(chain);
    await wallet.collect(first);
    await expectCollected(wallet, first);
    relay.behind(3);
    const payment = await newPayment(chain);
    await wallet.claim(payment);
    await wallet.send(payment);
    expect((await wallet.ended(payment, 1500))?.status).toBe("sent");
    expect(await chain.transfers({ nonce: payment.key.nonce })).toHaveLength(1);
    await chain.mine(4);
    await expectCollected(wallet, payment);
  });
});

test("while no node answers a payment is unavailable and nothing is stored, and the wallet is ready when one answers again", async () => {
  const wallet = await startBehind();
  const payment = await newPayment(chain);
  await wallet.claim(payment);
  await relay.refuse();
  expect(await wallet.wallet.readiness()).toEqual({ ready: false, reason: "rpc unreachable" });
  await expect(wallet.wallet.simulate(payment.authorization, payment.signature)).rejects.toMatchObject({
    kind: "unavailable",
  });
  await expect(wallet.send(payment)).rejects.toMatchObject({ kind: "unavailable" });
  expect(await wallet.rows()).toEqual([]);
  expect((await wallet.payment(payment))?.status).toBe("claimed");
  await relay.restore();
  await until(async () => (await wallet.wallet.readiness()).ready);
  await wallet.send(payment);
  await expectCollected(wallet, payment);
});

test("a payment is not ended by an outage after its broadcast", async () => {
  const wallet = await startBehind();
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  await relay.passed(SEND);
  await relay.refuse();
  await chain.mine();
  expect((await wallet.ended(payment, 600))?.status).toBe("sent");
  await relay.restore();
  await expectCollected(wallet, payment);
});

describe("a payment that is in a block", () => {
  test.each<[string, string, RpcFault]>([
    ["has no receipt", "eth_getTransactionReceipt", { kind: "result", result: null }],
    ["fails at receipts", "eth_getTransactionReceipt", { kind: "error", message: "internal error" }],
    ["fails at state", "eth_call", { kind: "error", code: -32_001, message: "Resource not found" }],
    ["fails at nonces", "eth_getTransactionCount", { kind: "page", status: 500 }],
    ["has neither receipt nor logs", "eth_getLogs", { kind: "result", result: [] }],
  ])("ends as it should although a node for a while %s", async (_, method, fault) => {
    const wallet = await startBehind();
    const payment = await newPayment(chain);
    await wallet.collect(await newPayment(chain));
    await wallet.claim(payment);
    relay.on(method, fault, 3);
    if (method === "eth_getLogs") relay.on("eth_getTransactionReceipt", { kind: "result", result: null }, 3);
    await wallet.send(payment);
    await expectCollected(wallet, payment);
    expect(await wallet.rows()).toHaveLength(2);
  });
});

test("a node that forgets its pool is told the transactions again", async () => {
  const wallet = await startInsistent();
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  await relay.passed(SEND);
  await chain.rpc("anvil_dropAllTransactions");
  await relay.passed(SEND, 2);
  await chain.mine();
  await expectCollected(wallet, payment);
});

describe("a gas wallet", () => {
  test("is not ready when it is nearly empty, and ready when it is filled up", async () => {
    const signer = await fundedSigner(chain, 10n ** 15n - 1n);
    const wallet = await start({ signers: [signer] });
    expect(await wallet.wallet.readiness()).toEqual({ ready: false, reason: "gas wallet low" });
    const payment = await newPayment(chain);
    await wallet.claim(payment);
    await expect(wallet.send(payment)).rejects.toThrow("gas wallet low");
    await chain.fundEth(signer.address, 10n ** 15n);
    await until(async () => (await wallet.wallet.readiness()).ready);
    await wallet.send(payment);
    await expectCollected(wallet, payment);
  });

  test("keeps what is stored when it runs dry under way, and goes on when it is filled", async () => {
    await chain.setBaseFee(GWEI);
    const signer = await fundedSigner(chain, 10n ** 15n);
    const wallet = await start({ signers: [signer] });
    const payments = await newPayments(12);
    await chain.pauseMining();
    await Promise.all(payments.map((payment) => wallet.collect(payment)));
    await Bun.sleep(300);
    await chain.fundEth(signer.address, 10n ** 18n);
    await chain.resumeMining(1);
    for (const payment of payments) await expectCollected(wallet, payment);
  });

  test("shares the work with others, and gets none when it is empty", async () => {
    const signers = [await fundedSigner(chain), await fundedSigner(chain), await fundedSigner(chain, 1n)];
    const wallet = await start({ signers });
    const payments = await newPayments(20);
    await chain.pauseMining();
    await Promise.all(payments.map((payment) => wallet.collect(payment)));
    const rows = await wallet.rows();
    const shares = signers.map(({ address }) => rows.filter((row) => row.wallet === address).length);
    expect(shares).toEqual([10, 10, 0]);
    await untilPending(20);
    await chain.mine();
    for (const payment of payments) await expectCollected(wallet, payment);
  });
});

describe("a process that follows another", () => {
  const silent = (real: Chain): Chain => ({ ...real, broadcast: async () => "unknown" });

  test("broadcasts the same bytes when the other ended after the store and before the broadcast", async () => {
    const signer = await fundedSigner(chain);
    const dying = await start({ signers: [signer], wrap: silent });
    const payment = await newPayment(chain);
    await dying.collect(payment);
    await dying.wallet.stop();
    const [row] = await dying.rows();
    const wallet = await start({ signers: [signer], store: dying.store });
    await expectCollected(wallet, payment);
    expect((await wallet.payment(payment))?.transaction_hash).toBe(row!.hash);
    const next = await newPayment(chain);
    await wallet.collect(next);
    await expectCollected(wallet, next);
  });

  test("gives no nonce twice that only the store knows when the other ended before any broadcast", async () => {
    const signer = await fundedSigner(chain);
    const dying = await start({ signers: [signer], wrap: silent });
    const [payment, next] = [await newPayment(chain), await newPayment(chain)];
    await dying.collect(payment);
    await dying.wallet.stop();
    const wallet = await start({ signers: [signer], store: dying.store, wrap: silent });
    await wallet.collect(next);
    expect((await wallet.rows()).map((row) => [row.wallet_nonce, row.replacement])).toEqual([
      [0, 0],
      [1, 0],
    ]);
  });

  test("learns from the chain of an open payment whose transactions are all closed", async () => {
    const dying = await start({ wrap: silent });
    const [landed, lost] = [await newPayment(chain), await newPayment(chain)];
    await dying.collect(landed);
    await dying.collect(lost);
    await dying.wallet.stop();
    const [row] = await dying.rows();
    await chain.rpc("eth_sendRawTransaction", [row!.raw]);
    const t = dying.store.read.tables.facilitatorTransactions;
    await dying.store.write((tx) => tx.db.update(t).set({ open: false }));
    const wallet = await start({ store: dying.store });
    await expectCollected(wallet, landed);
    await expectCollected(wallet, lost);
    expect((await wallet.payment(landed))?.transaction_hash).toBe(row!.hash);
  });

  test("finds a payment whose block was made while nobody looked", async () => {
    const signer = await fundedSigner(chain);
    const dying = await start({ signers: [signer] });
    const payment = await newPayment(chain);
    await chain.pauseMining();
    await dying.collect(payment);
    await untilPending(1);
    await dying.wallet.stop();
    await chain.mine();
    const wallet = await start({ signers: [signer], store: dying.store });
    await expectCollected(wallet, payment);
  });

  test("brings all payments home, with no gap, when the other ended between their broadcasts", async () => {
    const signer = await fundedSigner(chain);
    let told = 0;
    const forgetful = (real: Chain): Chain => ({
      ...real,
      broadcast: (raw, everywhere) => (told++ % 3 === 0 ? real.broadcast(raw, everywhere) : Promise.resolve("unknown")),
    });
    const dying = await start({ signers: [signer], wrap: forgetful });
    const payments = await newPayments(20);
    await Promise.all(payments.map((payment) => dying.collect(payment)));
    await dying.wallet.stop();
    await chain.resumeMining(1);
    const wallet = await start({ signers: [signer], store: dying.store });
    for (const payment of payments) await expectCollected(wallet, payment);
    expect(await firstNonces(wallet)).toEqual(payments.map((_, index) => index));
  });

  test("brings home what the other signed with a key that is configured no more", async () => {
    const dying = await start({ wrap: silent });
    const payment = await newPayment(chain);
    await dying.collect(payment);
    await dying.wallet.stop();
    const wallet = await start({ store: dying.store });
    await expectCollected(wallet, payment);
  });
});

test("payments that a process leaves behind are taken up by an idle one with the same database", async () => {
  const silent = (real: Chain): Chain => ({ ...real, broadcast: async () => "unknown" });
  const dying = await start({ wrap: silent });
  const idle = await start({ store: dying.store, signers: dying.signers });
  const payment = await newPayment(chain);
  await dying.collect(payment);
  await dying.wallet.stop();
  // What was read lately is not read again: as if ten seconds had passed.
  const real = performance.now;
  performance.now = () => real.call(performance) + 10_000;
  try {
    await idle.wallet.takeUp();
  } finally {
    performance.now = real;
  }
  await expectCollected(idle, payment);
});

test("two processes with one key and one Postgres collect everything, with each nonce used once", async () => {
  const place = await postgresPlace();
  const stores = [await place.open(), await place.open()];
  const signer = await fundedSigner(chain);
  const [one, other] = await Promise.all(stores.map((store) => start({ signers: [signer], store })));
  const payments = await newPayments(40);
  // One after the other, since the claims of an account wait for each other, and the store bounds each wait.
  for (const payment of payments) await one!.claim(payment);
  await chain.resumeMining(1);
  await Promise.all(payments.map((payment, index) => (index % 2 === 0 ? one : other)!.send(payment)));
  for (const payment of payments) await expectCollected(one!, payment);
  expect(await firstNonces(one!)).toEqual(payments.map((_, index) => index));
  await Promise.all([one!.wallet.stop(), other!.wallet.stop()]);
  await Promise.all(stores.map((store) => store.close()));
});

test("a payment that is not claimed any more is not sent, and takes no nonce from the others", async () => {
  const wallet = await start();
  const payments = await newPayments(3);
  const [first, gone, last] = payments;
  for (const payment of [first!, last!]) await wallet.claim(payment);
  const sent = await Promise.allSettled(payments.map((each) => wallet.send(each)));
  expect(sent.map(({ status }) => status)).toEqual(["fulfilled", "rejected", "fulfilled"]);
  await expectCollected(wallet, first!);
  await expectCollected(wallet, last!);
  expect(await wallet.payment(gone!)).toBeNull();
  expect((await wallet.rows()).map((row) => row.wallet_nonce)).toEqual([0, 1]);
});
