// What holds a wallet's nonce for good if nothing is done: fees that stand at the cap, pools that forget, nodes that
// take nothing, payments that end meanwhile. The wallet moves on each time, and nothing that failed is collected.

import { describe, expect, test } from "bun:test";
import { type Hex, toHex } from "viem";
import type { TestChain } from "../../../test/support/chain/chain.ts";
import type { RpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import { fundedSigner, newPayment, type TestWallet, type WalletOptions } from "../../../test/support/chain/wallet.ts";
import { type Payment, useChain } from "../../../test/support/chain/wallet-tests.ts";
import { until } from "../../../test/support/until.ts";
import type { Chain } from "../../chain/chain.ts";

const GWEI = 10n ** 9n;
const SEND = "eth_sendRawTransaction";
const UNDERPRICED = { kind: "error", message: "replacement transaction underpriced" } as const;

let chain: TestChain;
let relay: RpcRelay;
const { start, untilPending, transfersOf, expectCollected } = useChain(
  (nodes) => {
    ({ chain, relay } = nodes);
  },
  async (fresh) => {
    await fresh.setBaseFee(GWEI);
    await fresh.mine();
  },
);
/** Twice the base fee is over its cap, so its first fee is the cap. */
const startAtCap = (options: WalletOptions = {}) =>
  start({ ...options, limits: { maxFee: 1_500_000_000n, rebroadcastMs: 500 } });

/** Payments that end soon, sent with the first fees of a chain that makes no blocks. */
async function waiting(wallet: TestWallet, count: number): Promise<Payment[]> {
  const { timestamp } = await chain.client.getBlock();
  const words = { validBefore: timestamp + 60n };
  const payments = [];
  for (let made = 0; made < count; made++) payments.push(await newPayment(chain, words));
  await chain.pauseMining();
  for (const payment of payments) await wallet.collect(payment);
  await untilPending(count);
  return payments;
}

/** The base fee leaps over every cap, all pools forget, and the time of the payments ends. */
async function outlast(payments: readonly Payment[]): Promise<void> {
  await chain.setBaseFee(60n * GWEI);
  await chain.rpc("anvil_dropAllTransactions");
  await chain.rpc("evm_setNextBlockTimestamp", [Number(payments[0]?.authorization.validBefore)]);
  await chain.mine();
}

/** The base fee is far below the cap again, and blocks come by themselves, whatever waits: the wallet counts them. */
async function calm(): Promise<void> {
  await chain.setBaseFee(GWEI / 10n);
  await chain.mine();
  await chain.resumeMining(1);
}

async function expectNextIsCollected(wallet: TestWallet): Promise<void> {
  await until(async () => (await wallet.chain.newest()).baseFee < GWEI);
  await Bun.sleep(1000);
  const next = await newPayment(chain);
  await wallet.collect(next);
  expect(await wallet.ended(next)).toMatchObject({ status: "settled" });
}

async function expectExpired(wallet: TestWallet, payments: readonly Payment[]): Promise<void> {
  for (const payment of payments) {
    expect(await wallet.ended(payment)).toMatchObject({ status: "failed", reason: "expired" });
    expect(await transfersOf(payment)).toHaveLength(0);
  }
}

describe("obsolete transactions at the highest fee, in no pool,", () => {
  test.each([1, 5])("make way for the next ones, when there are %i of them", async (count) => {
    const wallet = await startAtCap();
    const payments = await waiting(wallet, count);
    await outlast(payments);
    await expectExpired(wallet, payments);
    await calm();
    await expectNextIsCollected(wallet);
    await expectExpired(wallet, payments);
    const rows = (await wallet.rows()).filter((row) => row.wallet_nonce < count);
    // One that does nothing for each, within the cap.
    expect(rows.map((row) => [row.wallet_nonce, row.payer === null])).toEqual(
      payments.flatMap((_, nonce) => [
        [nonce, false],
        [nonce, true],
      ]),
    );
    expect(new Set(rows.map((row) => row.max_fee))).toEqual(new Set(["1500000000"]));
  });

  test("make way when the process ends before or after they have failed", async () => {
    const first = await startAtCap();
    const payments = await waiting(first, 2);
    await first.wallet.stop();
    await outlast(payments);
    const common = { store: first.store, signers: first.signers };
    const mute = await startAtCap({
      ...common,
      wrap: (real) => ({ ...real, broadcast: async () => "unknown" }),
    });
    await expectExpired(mute, payments);
    await mute.wallet.stop();
    await calm();
    const wallet = await startAtCap(common);
    await expectNextIsCollected(wallet);
    await expectExpired(wallet, payments);
  });

  test("are told again to a node that takes nothing in their place, since they can only revert now", async () => {
    const wallet = await startAtCap({ urls: [relay.url] });
    const payments = await waiting(wallet, 1);
    const [old] = await wallet.rows();
    relay.on(SEND, {
      kind: "choose",
      choose: ([raw]) => (raw === old?.raw || relay.count(SEND) < 2 ? { kind: "pass" } : UNDERPRICED),
    });
    await outlast(payments);
    await expectExpired(wallet, payments);
    await calm();
    await until(async () => {
      return (await chain.client.getTransactionCount({ address: wallet.address })) === 1;
    });
    relay.heal();
    await expectNextIsCollected(wallet);
    await expectExpired(wallet, payments);
  });
});

test("a transaction at the highest fee whose payment has failed before its end is not told again, whichever node lacks it", async () => {
  const wallet = await startAtCap({ urls: [relay.url] });
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  await untilPending(1);
  const [old] = await wallet.rows();
  await chain.blacklist(payment.payer.address);
  await chain.mine();
  expect(await wallet.ended(payment)).toMatchObject({ status: "failed" });
  const told = relay.params(SEND).length;
  relay.on(SEND, UNDERPRICED);
  await chain.reorg(1);
  await chain.unblacklist(payment.payer.address);
  await chain.mine();
  await relay.called(SEND, told + 3);
  const since = relay.params(SEND).slice(told);
  expect(since.filter(([raw]) => raw === old?.raw)).toEqual([]);
  relay.heal();
  await untilPending(1);
  await chain.mine();
  await chain.resumeMining();
  await expectNextIsCollected(wallet);
  expect(await transfersOf(payment)).toHaveLength(0);
});

test("a transaction that its node knows but never mines, although it is next in line, is replaced as blocks come", async () => {
  const signer = await fundedSigner(chain);
  const countIs = (count: number) => chain.rpc("anvil_setNonce", [signer.address, toHex(count)]);
  // As if the transaction before it was mined while the node takes this one in: anvil then waits for that one forever.
  let isRaced = true;
  const racing = (real: Chain): Chain => ({
    ...real,
    async broadcast(raw, everywhere) {
      if (!isRaced) return real.broadcast(raw, everywhere);
      isRaced = false;
      await countIs(0);
      const reception = await real.broadcast(raw, everywhere);
      await countIs(1);
      return reception;
    },
  });
  await countIs(1);
  const wallet = await start({ signers: [signer], wrap: racing, urls: [relay.url], limits: { rebroadcastMs: 500 } });
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  await relay.passed(SEND, 3);
  expect(await chain.rpc("txpool_status")).toEqual({ pending: "0x0", queued: "0x1" });
  expect((await wallet.payment(payment))?.status).toBe("sent");
  await chain.resumeMining(1);
  await expectCollected(wallet, payment);
  const [first, ...replacements] = await wallet.rows();
  expect([first, ...replacements].every((row) => row?.wallet_nonce === 1)).toBe(true);
  const collected = (await wallet.payment(payment))?.transaction_hash;
  expect(replacements.map(({ hash }) => hash)).toContain(collected as Hex);
});

test("fees rise by blocks, and not because a node takes no price again and again", async () => {
  const wallet = await start({ urls: [relay.url], limits: { rebroadcastMs: 500 } });
  const payment = await newPayment(chain);
  await chain.pauseMining();
  relay.on(SEND, UNDERPRICED);
  await wallet.collect(payment);
  await relay.called(SEND, 3);
  expect(await wallet.rows()).toHaveLength(1);
  for (let block = 0; block < 7; block++) {
    await chain.mine();
    const looks = relay.count("eth_getTransactionCount");
    await relay.called("eth_getTransactionCount", looks + 1);
  }
  expect((await wallet.rows()).length).toBeWithin(2, 4);
  relay.heal();
  await untilPending(1);
  await chain.mine();
  expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
  expect(await transfersOf(payment)).toHaveLength(1);
});

test("nodes that forget everything are told everything again, also when that is more than is told at once", async () => {
  const wallet = await start({ limits: { rebroadcastMs: 500 } });
  const { payer } = await newPayment(chain);
  const payments: Payment[] = [];
  for (let made = 0; made < 60; made++) payments.push(await newPayment(chain, { payer, value: 0n }));
  await chain.pauseMining();
  await Promise.all(payments.map((payment) => wallet.collect(payment)));
  await untilPending(60);
  await chain.rpc("anvil_dropAllTransactions");
  await untilPending(60);
  await chain.mine();
  for (const payment of payments) expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
});

test("a node that suggests an absurd tip costs a little, not the cap", async () => {
  relay.on("eth_maxPriorityFeePerGas", { kind: "result", result: "0x2540be400" });
  await chain.setBaseFee(GWEI / 100n);
  await chain.mine();
  const wallet = await start({ urls: [relay.url], limits: { maxFee: 5n * 10n ** 9n } });
  await chain.setBaseFee(GWEI / 100n);
  const payment = await newPayment(chain);
  const before = await chain.client.getBalance({ address: wallet.address });
  await wallet.collect(payment);
  expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
  const cost = before - (await chain.client.getBalance({ address: wallet.address }));
  expect(cost).toBeLessThan((130_000n * 3n * GWEI) / 100n);
});

test("nonces that a deep reorganisation takes back are used again by the transactions that had them", async () => {
  const wallet = await start({ limits: { confirmations: 2 } });
  const first = await newPayment(chain);
  await chain.mine();
  await wallet.collect(first);
  expect(await wallet.ended(first)).toMatchObject({ status: "settled" });
  await chain.mine(3);
  await until(async () => (await wallet.rows()).every((row) => !row.open));
  await chain.reorg(4);
  expect(await transfersOf(first)).toHaveLength(0);
  const next = await newPayment(chain);
  await wallet.collect(next);
  await until(async () => {
    await chain.mine();
    await Bun.sleep(200);
    return (await wallet.payment(next))?.status === "settled";
  });
  expect(await transfersOf(first)).toHaveLength(1);
  expect((await wallet.rows()).filter((row) => row.payer === null)).toEqual([]);
});
