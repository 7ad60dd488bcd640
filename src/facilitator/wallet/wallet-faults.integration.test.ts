// What nodes do wrong, and what a crash leaves: every payment ends right, with one transfer at most.
import { afterAll, afterEach, beforeEach, describe, expect, test } from "bun:test";
import { startChain, type TestChain } from "../../../test/support/chain/chain.ts";
import { type RpcFault, type RpcRelay, startRpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import {
  fundedSigner,
  newPayment,
  removeWallets,
  startWallet,
  type TestWallet,
  until,
} from "../../../test/support/chain/wallet.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import type { Chain } from "../chain/chain.ts";

const GWEI = 10n ** 9n;
const SEND = "eth_sendRawTransaction";

let chain: TestChain;
let relay: RpcRelay;
let open: TestWallet[] = [];
const start = async (...args: Parameters<typeof startWallet>) => {
  const wallet = await startWallet(...args);
  open.push(wallet);
  return wallet;
};
/** A wallet whose first node is the relay. */
const startBehind = (...others: string[]) => start(chain, { urls: [relay.url, ...others], timeoutMs: 700 });
/** The same, and it soon tells again what the node has said to know. */
const startInsistent = () =>
  start(chain, { urls: [relay.url], timeoutMs: 700, limits: { rebroadcastMs: 1000 } });

beforeEach(async () => {
  chain = await startChain();
  relay = await startRpcRelay(chain.url);
});
afterEach(async () => {
  await Promise.all(open.map((each) => each.stop()));
  open = [];
  await relay.stop();
  await chain.stop();
});
afterAll(removeWallets);

/** How many transactions wait in the pool. */
const pending = async () => Number(((await chain.rpc("txpool_status")) as { pending: string }).pending);

async function newPayments(count: number) {
  const payments = [];
  for (let made = 0; made < count; made++) payments.push(await newPayment(chain));
  return payments;
}

async function expectCollected(wallet: TestWallet, payment: Awaited<ReturnType<typeof newPayment>>) {
  expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
  expect(await chain.transfers({ nonce: payment.key.nonce })).toHaveLength(1);
}

describe("one node that, when it gets a transaction,", () => {
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
  ])(
    "%s: collected all the same",
    async (_, fault) => {
      const wallet = await startInsistent();
      const payment = await newPayment(chain);
      relay.on(SEND, fault, 1);
      await wallet.collect(payment);
      await expectCollected(wallet, payment);
      expect((await wallet.rows()).every((row) => row.wallet_nonce === 0)).toBe(true);
      const next = await newPayment(chain);
      await wallet.collect(next);
      await expectCollected(wallet, next);
    },
    15_000,
  );
});

describe("a first node that", () => {
  test.each<[string, RpcFault]>([
    ["hangs", { kind: "hang" }],
    ["answers garbage", { kind: "garbage", text: "<html>" }],
    ["answers wrong types", { kind: "result", result: "0xzz" }],
    ["is overloaded", { kind: "page", status: 503 }],
    ["has internal errors", { kind: "error", code: -32_603, message: "internal error" }],
    ["breaks off", { kind: "break" }],
  ])(
    "%s: the second takes over",
    async (_, fault) => {
      relay.on("*", fault);
      const wallet = await startBehind(chain.url);
      const payment = await newPayment(chain);
      await wallet.collect(payment);
      await expectCollected(wallet, payment);
    },
    15_000,
  );

  test("lies behind by blocks: nothing is taken for lost, and the end is the right one", async () => {
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

test("no node answers: unavailable, not ready, nothing stored; and it is ready when one answers again", async () => {
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

test("an outage after the broadcast ends nothing", async () => {
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

describe("after the block, a node that for a while", () => {
  test.each<[string, string, RpcFault]>([
    ["has no receipt", "eth_getTransactionReceipt", { kind: "result", result: null }],
    ["fails at receipts", "eth_getTransactionReceipt", { kind: "error", message: "internal error" }],
    ["fails at state", "eth_call", { kind: "error", code: -32_001, message: "Resource not found" }],
    ["fails at nonces", "eth_getTransactionCount", { kind: "page", status: 500 }],
    ["has neither receipt nor logs", "eth_getLogs", { kind: "result", result: [] }],
  ])(
    "%s: nothing is concluded from that",
    async (_, method, fault) => {
      const wallet = await startBehind();
      const payment = await newPayment(chain);
      await wallet.collect(await newPayment(chain));
      await wallet.claim(payment);
      relay.on(method, fault, 3);
      if (method === "eth_getLogs")
        relay.on("eth_getTransactionReceipt", { kind: "result", result: null }, 3);
      await wallet.send(payment);
      await expectCollected(wallet, payment);
      expect(await wallet.rows()).toHaveLength(2);
    },
    15_000,
  );
});

test("a node that forgets its pool is told again", async () => {
  const wallet = await startInsistent();
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  await relay.passed(SEND);
  await chain.rpc("anvil_dropAllTransactions");
  await relay.passed(SEND, 2);
  await chain.mine();
  await expectCollected(wallet, payment);
}, 15_000);

describe("the gas wallets:", () => {
  test("one that is nearly empty is not ready; filled up, it is", async () => {
    const signer = await fundedSigner(chain, 10n ** 15n - 1n);
    const wallet = await start(chain, { signers: [signer] });
    expect(await wallet.wallet.readiness()).toEqual({ ready: false, reason: "gas wallet low" });
    const payment = await newPayment(chain);
    await wallet.claim(payment);
    await expect(wallet.send(payment)).rejects.toThrow("gas wallet low");
    await chain.fundEth(signer.address, 10n ** 15n);
    await until(async () => (await wallet.wallet.readiness()).ready);
    await wallet.send(payment);
    await expectCollected(wallet, payment);
  });

  test("one that runs dry under way keeps what is stored, and goes on when it is filled", async () => {
    await chain.setBaseFee(GWEI);
    const signer = await fundedSigner(chain, 10n ** 15n);
    const wallet = await start(chain, { signers: [signer] });
    const payments = await newPayments(12);
    await chain.pauseMining();
    await Promise.all(payments.map((payment) => wallet.collect(payment)));
    await Bun.sleep(300);
    await chain.fundEth(signer.address, 10n ** 18n);
    await chain.resumeMining();
    await chain.mine();
    for (const payment of payments) await expectCollected(wallet, payment);
  }, 20_000);

  test("several share the work, and an empty one gets none", async () => {
    const signers = [await fundedSigner(chain), await fundedSigner(chain), await fundedSigner(chain, 1n)];
    const wallet = await start(chain, { signers });
    const payments = await newPayments(20);
    await chain.pauseMining();
    await Promise.all(payments.map((payment) => wallet.collect(payment)));
    const rows = await wallet.rows();
    const shares = signers.map(({ address }) => rows.filter((row) => row.wallet === address).length);
    expect(shares).toEqual([10, 10, 0]);
    await until(async () => (await pending()) === 20);
    await chain.mine();
    for (const payment of payments) await expectCollected(wallet, payment);
  });
});

describe("a process that ends", () => {
  const silent = (real: Chain): Chain => ({ ...real, broadcast: async () => "unknown" });

  test("after the store and before the broadcast: the next one broadcasts the same bytes", async () => {
    const signer = await fundedSigner(chain);
    const dying = await start(chain, { signers: [signer], wrap: silent });
    const payment = await newPayment(chain);
    await dying.collect(payment);
    await dying.wallet.stop();
    const [row] = await dying.rows();
    const wallet = await start(chain, { signers: [signer], store: dying.store });
    await expectCollected(wallet, payment);
    expect((await wallet.payment(payment))?.transaction_hash).toBe(row!.hash);
    const next = await newPayment(chain);
    await wallet.collect(next);
    await expectCollected(wallet, next);
  });

  test("before any broadcast: the next one gives no nonce twice that only the store knows", async () => {
    const signer = await fundedSigner(chain);
    const dying = await start(chain, { signers: [signer], wrap: silent });
    const [payment, next] = [await newPayment(chain), await newPayment(chain)];
    await dying.collect(payment);
    await dying.wallet.stop();
    const wallet = await start(chain, { signers: [signer], store: dying.store, wrap: silent });
    await wallet.collect(next);
    expect((await wallet.rows()).map((row) => [row.wallet_nonce, row.replacement])).toEqual([
      [0, 0],
      [1, 0],
    ]);
  });

  test("and whose transactions are all closed, with a payment still open: the chain tells", async () => {
    const dying = await start(chain, { wrap: silent });
    const [landed, lost] = [await newPayment(chain), await newPayment(chain)];
    await dying.collect(landed);
    await dying.collect(lost);
    await dying.wallet.stop();
    const [row] = await dying.rows();
    await chain.rpc("eth_sendRawTransaction", [row!.raw]);
    const t = dying.store.read.tables.facilitatorTransactions;
    await dying.store.write((tx) => tx.db.update(t).set({ open: false }));
    const wallet = await start(chain, { store: dying.store });
    await expectCollected(wallet, landed);
    await expectCollected(wallet, lost);
    expect((await wallet.payment(landed))?.transaction_hash).toBe(row!.hash);
  });

  test("after the broadcast, with the block made while nobody looked: the next one finds it", async () => {
    const signer = await fundedSigner(chain);
    const dying = await start(chain, { signers: [signer] });
    const payment = await newPayment(chain);
    await chain.pauseMining();
    await dying.collect(payment);
    await until(async () => (await pending()) === 1);
    await dying.wallet.stop();
    await chain.mine();
    const wallet = await start(chain, { signers: [signer], store: dying.store });
    await expectCollected(wallet, payment);
  });

  test("between broadcasts of many: the next one brings all of them home, with no gap", async () => {
    const signer = await fundedSigner(chain);
    let told = 0;
    const forgetful = (real: Chain): Chain => ({
      ...real,
      broadcast: (raw, everywhere) =>
        told++ % 3 === 0 ? real.broadcast(raw, everywhere) : Promise.resolve("unknown"),
    });
    const dying = await start(chain, { signers: [signer], wrap: forgetful });
    const payments = await newPayments(20);
    await Promise.all(payments.map((payment) => dying.collect(payment)));
    await dying.wallet.stop();
    const wallet = await start(chain, { signers: [signer], store: dying.store });
    for (const payment of payments) await expectCollected(wallet, payment);
    expect((await wallet.rows()).map((row) => row.wallet_nonce)).toEqual(payments.map((_, index) => index));
  });

  test("with a key that is configured no more: what it signed is still brought home", async () => {
    const dying = await start(chain, { wrap: silent });
    const payment = await newPayment(chain);
    await dying.collect(payment);
    await dying.wallet.stop();
    const wallet = await start(chain, { store: dying.store });
    await expectCollected(wallet, payment);
  });
});

test("what a process leaves behind is taken up by an idle one with the same database", async () => {
  const silent = (real: Chain): Chain => ({ ...real, broadcast: async () => "unknown" });
  const dying = await start(chain, { wrap: silent });
  const idle = await start(chain, { store: dying.store, signers: dying.signers });
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

test("two processes with one key and one Postgres: everything is collected, each nonce once", async () => {
  const place = await postgresPlace();
  const stores = [await place.open(), await place.open()];
  const signer = await fundedSigner(chain);
  const [one, other] = await Promise.all(stores.map((store) => start(chain, { signers: [signer], store })));
  const payments = await newPayments(40);
  await Promise.all(payments.map((payment, index) => (index % 2 === 0 ? one : other)!.collect(payment)));
  for (const payment of payments) await expectCollected(one!, payment);
  const rows = (await one!.rows()).filter((row) => row.payer !== null && row.replacement === 0);
  expect(new Set(rows.map((row) => row.nonce)).size).toBe(40);
  await Promise.all([one!.wallet.stop(), other!.wallet.stop()]);
  await Promise.all(stores.map((store) => store.close()));
}, 30_000);

test("a payment that is not claimed any more is not sent, and takes no nonce from the others", async () => {
  const wallet = await start(chain);
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
