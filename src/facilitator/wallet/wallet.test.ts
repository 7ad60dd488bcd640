import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { startChain, type TestChain } from "../../../test/support/chain/chain.ts";
import { newPayer } from "../../../test/support/chain/payments.ts";
import { startRpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import {
  fundedSigner,
  newPayment,
  removeWallets,
  startWallet,
  type TestWallet,
} from "../../../test/support/chain/wallet.ts";
import { Fault } from "../../core/fault.ts";
import type { Store } from "../../storage/store.ts";
import type { Unsigned } from "./signer.ts";

let chain: TestChain;
const open: TestWallet[] = [];
const start = async (...args: Parameters<typeof startWallet>) => {
  const wallet = await startWallet(...args);
  open.push(wallet);
  return wallet;
};

beforeAll(async () => {
  chain = await startChain();
});
afterAll(async () => {
  await Promise.all(open.map((each) => each.stop()));
  removeWallets();
  await chain.stop();
});

test("a payment is collected once, and its record names the transaction", async () => {
  const wallet = await start(chain);
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  const ended = await wallet.ended(payment);
  expect(ended).toMatchObject({ status: "settled", reason: null });
  const transfers = await chain.transfers({ nonce: payment.key.nonce });
  expect(transfers).toHaveLength(1);
  expect(transfers[0]).toMatchObject({
    transaction_hash: ended!.transaction_hash!,
    block_number: ended!.block_number!,
    block_hash: ended!.block_hash!,
  });
});

describe("a store whose answer is lost", () => {
  /** Commits, and then says that it could not; so many times. Only Postgres can do that. */
  const forgetful = (store: Store, times: number): Store => {
    let left = times;
    return {
      ...store,
      isShared: true,
      async write(work) {
        const value = await store.write(work);
        if (left-- > 0) throw new Fault("unavailable", "the connection is gone");
        return value;
      },
    };
  };

  test("is asked until the answer is known: each payment has one transaction, and none is refused", async () => {
    const { store } = await start(chain);
    const payments = [await newPayment(chain), await newPayment(chain)];
    const wallet = await start(chain, { store: forgetful(store, 0) });
    for (const payment of payments) await wallet.claim(payment);
    const unsure = await start(chain, { store: forgetful(store, 1), signers: wallet.signers });
    await Promise.all(payments.map((payment) => unsure.send(payment)));
    for (const payment of payments) {
      expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
      expect(await chain.transfers({ nonce: payment.key.nonce })).toHaveLength(1);
    }
    expect((await wallet.rows()).map((row) => row.wallet_nonce)).toEqual([0, 1]);
  });

  test("refuses a payment that it did not take, and gives the nonce to the next", async () => {
    const { store } = await start(chain);
    let isFull = true;
    const full: Store = {
      ...store,
      write: (work) => (isFull ? Promise.reject(new Fault("unavailable", "disk full")) : store.write(work)),
    };
    const wallet = await start(chain, { store: full });
    const payment = await newPayment(chain);
    await expect(wallet.send(payment)).rejects.toThrow("disk full");
    isFull = false;
    await wallet.collect(payment);
    expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
    expect((await wallet.rows()).map((row) => row.wallet_nonce)).toEqual([0]);
  });
});

test("a signer that fails refuses what it can't sign, and leaves no gap in the nonces", async () => {
  const signer = await fundedSigner(chain);
  let signed = 0;
  const failing = {
    ...signer,
    sign: (unsigned: Unsigned) => {
      return ++signed === 3 ? Promise.reject(new Error("locked")) : signer.sign(unsigned);
    },
  };
  const wallet = await start(chain, { signers: [failing] });
  const payments: Awaited<ReturnType<typeof newPayment>>[] = [];
  for (let made = 0; made < 5; made++) payments.push(await newPayment(chain));
  for (const payment of payments) await wallet.claim(payment);
  const sent = await Promise.allSettled(payments.map((each) => wallet.send(each)));
  const taken = payments.filter((_, index) => sent[index]?.status === "fulfilled");
  expect(taken.length).toBeGreaterThan(1);
  for (const payment of taken) expect((await wallet.ended(payment))?.status).toBe("settled");
  expect((await wallet.rows()).map((row) => row.wallet_nonce)).toEqual(taken.map((_, index) => index));
});

test("stopping waits for no node that hangs, and loses nothing", async () => {
  const relay = await startRpcRelay(chain.url);
  const wallet = await start(chain, { urls: [relay.url], timeoutMs: 1000 });
  const payments: Awaited<ReturnType<typeof newPayment>>[] = [];
  for (let made = 0; made < 40; made++) payments.push(await newPayment(chain));
  relay.on("eth_sendRawTransaction", { kind: "hang" });
  await Promise.all(payments.map((payment) => wallet.collect(payment)));
  const started = performance.now();
  await wallet.wallet.stop();
  // One after the other they would take forty.
  expect(performance.now() - started).toBeLessThan(15_000);
  await relay.stop();
  await chain.resumeMining(1);
  const next = await start(chain, { store: wallet.store, signers: wallet.signers });
  for (const payment of payments) expect((await next.ended(payment, 30_000))?.status).toBe("settled");
  await chain.resumeMining();
});

describe("three hundred payments at once", () => {
  test("are collected by one key within three blocks of the first", async () => {
    await using slow = Object.assign(await startChain(), {
      async [Symbol.asyncDispose]() {
        await slow.stop();
      },
    });
    const wallet = await start(slow);
    await slow.pauseMining();
    const payer = newPayer();
    await slow.fundUsdc(payer.address, 1_000_000n);
    await slow.mine();
    const payTo = newPayer().address;
    const payments = await Promise.all(Array.from({ length: 300 }, () => newPayment(slow, { payer, to: payTo })));
    await Promise.all([...payments.map((payment) => wallet.collect(payment)), slow.mineBySent(wallet.address, 300, 3)]);
    const ended = await Promise.all(payments.map((payment) => wallet.ended(payment)));
    expect(ended.filter((each) => each?.status === "settled")).toHaveLength(300);
    const blocks = ended.map((each) => each!.block_number!);
    expect(new Set(blocks).size).toBeLessThanOrEqual(3);
    expect(await slow.transfers({ to: payTo })).toHaveLength(300);
    expect((await wallet.rows()).map((row) => row.wallet_nonce)).toEqual(payments.map((_, index) => index));
  });
});

test.each([
  ["nobody has sent", () => "3215"],
  ["cost nothing", () => "3a15"],
  ["a certain wallet of ours has sent", ({ signers }: TestWallet) => `73${signers[0]!.address.slice(2)}3214`],
])(
  "a payer whose code takes signatures only from transactions that %s burns no gas of the others",
  async (_, condition) => {
    const signers = [await fundedSigner(chain), await fundedSigner(chain)];
    const wallet = await start(chain, { signers });
    const from = await chain.contractWalletIf(condition(wallet));
    const payments = [];
    for (let made = 0; made < 4; made++) payments.push(await newPayment(chain, { from }));
    const collected = await Promise.allSettled(payments.map((payment) => wallet.collect(payment)));
    const sent = collected.filter(({ status }) => status === "fulfilled").length;
    for (const [index, payment] of payments.entries()) {
      if (collected[index]?.status === "rejected") expect(await wallet.payment(payment)).toBeNull();
      else expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
    }
    expect(sent).toBe(_ === "a certain wallet of ours has sent" ? 2 : 0);
  },
);
