// Payments that share a transaction (TOLLGATE_BATCH): each ends by its own events, whatever happens to its neighbours, to
// the transaction, to the block, to what nodes say of it, or to the process.

import { expect, test } from "bun:test";
import { eq } from "drizzle-orm";
import type { TestChain } from "../../../test/support/chain/chain.ts";
import { newPayer } from "../../../test/support/chain/payments.ts";
import type { RpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import { newPayment, type TestWallet, type WalletOptions } from "../../../test/support/chain/wallet.ts";
import { type Payment, useChain } from "../../../test/support/chain/wallet-tests.ts";
import { until } from "../../../test/support/until.ts";
import { MULTICALL3 } from "../../chain/token.ts";
import multicall3 from "../../cli/demo/multicall3.json" with { type: "json" };
import type { Hex } from "../../x402/types.ts";
import { requireMulticall3 } from "./wallet.ts";

const GWEI = 10n ** 9n;
const BATCH = { limits: { batch: 50 } };

let chain: TestChain;
let relay: RpcRelay;
const { start, startBehind, untilPending, transfersOf, expectCollected } = useChain(
  (nodes) => {
    ({ chain, relay } = nodes);
  },
  (fresh) => fresh.setBaseFee(GWEI),
);

async function newPayments(count: number): Promise<Payment[]> {
  const payments: Payment[] = [];
  for (let made = 0; made < count; made++) payments.push(await newPayment(chain));
  return payments;
}

/** Somebody else collects it in the next block, ahead of all others. */
function collectElsewhere({ authorization, signature }: Payment): Promise<Hex> {
  const { value, validAfter, validBefore, ...rest } = authorization;
  const numbers = { value: `${value}`, validAfter: `${validAfter}`, validBefore: `${validBefore}` };
  return chain.collectAsStranger({ authorization: { ...rest, ...numbers }, signature });
}

/** Has them simulated and claimed, and sends them at once. */
async function collectAll(wallet: TestWallet, payments: readonly Payment[]): Promise<void> {
  const ready = payments.map(async (payment) => {
    const simulation = await wallet.wallet.simulate(payment.authorization, payment.signature);
    if (!simulation.ok) throw new Error(simulation.reason);
    await wallet.claim(payment);
    return { payment, gas: simulation.gas };
  });
  const all = await Promise.all(ready);
  await Promise.all(all.map(({ payment, gas }) => wallet.wallet.send(payment, gas)));
}

/** Payments that share one transaction, which waits in the pool of a chain that makes no blocks. */
async function sharedUnmined(count: number, wallet: TestWallet) {
  const payments = await newPayments(count);
  await chain.pauseMining();
  await collectAll(wallet, payments);
  await untilPending(1);
  const [row, ...others] = await wallet.rows();
  expect(others).toEqual([]);
  return { payments, row: row! };
}

async function mineUntilEnded(wallet: TestWallet, payments: readonly Payment[]): Promise<void> {
  await until(async () => {
    await chain.mine();
    const rows = await Promise.all(payments.map((payment) => wallet.payment(payment)));
    return rows.every((row) => row?.status === "settled" || row?.status === "failed");
  });
}

async function partsOf({ store }: TestWallet) {
  const t = store.read.tables.facilitatorTransactionPayments;
  return store.read.db.select().from(t);
}

async function gasOf(hash: string) {
  const { gasUsed, effectiveGasPrice } = await chain.client.getTransactionReceipt({ hash: hash as `0x${string}` });
  return { used: gasUsed, wei: gasUsed * effectiveGasPrice };
}

async function burnedToday({ store }: TestWallet): Promise<bigint> {
  const t = store.read.tables.facilitatorDays;
  const days = await store.read.db.select().from(t);
  return days.reduce((sum, { gas_burned }) => sum + BigInt(gas_burned), 0n);
}

test("fifty payments that wait together share one transaction, for less than 55,000 gas each", async () => {
  const wallet = await start(BATCH);
  const payments = await newPayments(50);
  await chain.pauseMining();
  const payees = new Set(payments.map(({ authorization }) => authorization.to));
  expect(payees.size).toBe(50);
  for (const to of payees) await chain.fundUsdc(to, 1n);
  await chain.mine();
  await collectAll(wallet, payments);
  await untilPending(1);
  await chain.resumeMining();
  await chain.mine();
  for (const payment of payments) await expectCollected(wallet, payment);
  const rows = await wallet.rows();
  expect(rows).toHaveLength(1);
  expect(BigInt(rows[0]!.gas)).toBeLessThanOrEqual(16_000_000n);
  expect(Number((await gasOf(rows[0]!.hash)).used) / payments.length).toBeLessThan(55_000);
});

test("one that somebody else collected first fails alone, and its account bears its own share of the gas", async () => {
  const wallet = await start(BATCH);
  const { payments, row } = await sharedUnmined(5, wallet);
  const [, , stolen, ...rest] = payments;
  const foreign = await collectElsewhere(stolen!);
  await mineUntilEnded(wallet, payments);
  expect(await wallet.payment(stolen!)).toMatchObject({
    status: "failed",
    reason: "the authorization was used elsewhere",
    foreign_transaction: foreign,
  });
  for (const payment of [payments[0]!, payments[1]!, ...rest]) await expectCollected(wallet, payment);
  const { wei } = await gasOf(row.hash);
  const burned = (await partsOf(wallet)).filter(({ gas_burned }) => gas_burned !== null);
  expect(burned.map(({ nonce }) => nonce)).toEqual([stolen!.key.nonce]);
  expect(await burnedToday(wallet)).toBe(BigInt(burned[0]!.gas_burned!));
  // Never less than its share: the shares add up to what was spent, or to a few wei more.
  const all = (await partsOf(wallet)).reduce((sum, { gas }) => sum + BigInt(gas), 0n);
  expect((await burnedToday(wallet)) * all).toBeGreaterThanOrEqual(wei * BigInt(burned[0]!.gas));
  expect(await burnedToday(wallet)).toBeGreaterThan(wei / 7n);
  expect(await burnedToday(wallet)).toBeLessThan(wei / 3n);
});

test("one whose payer can't pay any more fails with its exact reason, and its neighbours are collected", async () => {
  const wallet = await start(BATCH);
  const { payments } = await sharedUnmined(3, wallet);
  const [first, barred, last] = payments;
  await chain.blacklist(barred!.payer.address);
  await mineUntilEnded(wallet, payments);
  expect(await wallet.payment(barred!)).toMatchObject({ status: "failed", foreign_transaction: null });
  expect((await wallet.payment(barred!))!.reason).toContain("blacklisted");
  await expectCollected(wallet, first!);
  await expectCollected(wallet, last!);
});

test("several authorizations of one payer to one payee share a transaction, and each has its own transfer", async () => {
  const wallet = await start(BATCH);
  const payer = newPayer();
  const to = newPayer().address;
  await chain.fundUsdc(payer.address, 3000n);
  const payments = await Promise.all([1, 2, 3].map(() => newPayment(chain, { payer, to })));
  await chain.pauseMining();
  await collectAll(wallet, payments);
  await untilPending(1);
  await mineUntilEnded(wallet, payments);
  for (const payment of payments) await expectCollected(wallet, payment);
  expect(await wallet.rows()).toHaveLength(1);
});

/** EVM code that uses all of its gas, forever: JUMPDEST PUSH1 0 JUMP. */
const BURNER = "0x5b600056";

test("a payer that takes on code to burn everybody's gas pays for it alone, and its neighbours are collected", async () => {
  const wallet = await start(BATCH);
  const { payments, row } = await sharedUnmined(6, wallet);
  const [burner, ...others] = payments;
  await chain.rpc("anvil_setCode", [burner!.payer.address, BURNER]);
  await mineUntilEnded(wallet, payments);
  expect((await wallet.payment(burner!))!.status).toBe("failed");
  for (const payment of others) await expectCollected(wallet, payment);
  expect(await burnedToday(wallet)).toBe((await gasOf(row.hash)).wei);
  const burned = (await partsOf(wallet)).filter(({ gas_burned }) => gas_burned !== null);
  expect(burned.map(({ nonce }) => nonce)).toEqual([burner!.key.nonce]);
});

test("a transaction that reverts as a whole fails none of its payments: each is sent again alone", async () => {
  const wallet = await start(BATCH);
  const { payments, row } = await sharedUnmined(3, wallet);
  await chain.rpc("anvil_setCode", [MULTICALL3, "0x60006000fd"]);
  await chain.mine();
  await chain.rpc("anvil_setCode", [MULTICALL3, multicall3.code]);
  await mineUntilEnded(wallet, payments);
  expect((await chain.client.getTransactionReceipt({ hash: row.hash })).status).toBe("reverted");
  for (const payment of payments) await expectCollected(wallet, payment);
  expect((await wallet.rows()).map(({ payer }) => payer)).toEqual([null, ...payments.map(() => expect.any(String))]);
  expect(await burnedToday(wallet)).toBe(0n);
});

test("a payer with code has a transaction of its own", async () => {
  const wallet = await start(BATCH);
  const owner = newPayer();
  const from = (await chain.contractWallet(owner.address)).toLowerCase() as `0x${string}`;
  await chain.fundUsdc(from, 1000n);
  const contract = await newPayment(chain, { payer: owner, from });
  const payments = [contract, ...(await newPayments(2))];
  await chain.pauseMining();
  await collectAll(wallet, payments);
  await untilPending(2);
  await mineUntilEnded(wallet, payments);
  for (const payment of payments) await expectCollected(wallet, payment);
  const alone = (await wallet.rows()).filter(({ payer }) => payer !== null);
  expect(alone.map(({ payer }) => payer)).toEqual([from]);
});

test("without Multicall3 on the chain payments go one by one, and the facilitator does not start", async () => {
  await chain.rpc("anvil_setCode", [MULTICALL3, "0x00"]);
  await chain.mine();
  const wallet = await start(BATCH);
  const payments = await newPayments(3);
  await collectAll(wallet, payments);
  for (const payment of payments) await expectCollected(wallet, payment);
  expect(await wallet.rows()).toHaveLength(3);
  await expect(requireMulticall3(wallet.chain)).rejects.toThrow("TOLLGATE_BATCH");
  await chain.rpc("anvil_setCode", [MULTICALL3, multicall3.code]);
  await requireMulticall3(wallet.chain);
});

test("one that three blocks leave out is replaced at its nonce, and each payment is collected once", async () => {
  const wallet = await startBehind(BATCH);
  relay.on("eth_sendRawTransaction", { kind: "result", result: `0x${"11".repeat(32)}` }, 1);
  const payments = await newPayments(4);
  await chain.pauseMining();
  await collectAll(wallet, payments);
  await mineUntilEnded(wallet, payments);
  for (const payment of payments) await expectCollected(wallet, payment);
  const rows = await wallet.rows();
  expect(rows.map(({ wallet_nonce, replacement }) => [wallet_nonce, replacement])).toEqual([
    [0, 0],
    [0, 1],
  ]);
});

test("a replacement leaves out what has ended, and makes the others", async () => {
  const wallet = await start({ limits: { batch: 50, rebroadcastMs: 100 } });
  const now = Number((await chain.client.getBlock()).timestamp);
  const short = await newPayment(chain, { validBefore: now + 60 });
  const payments = await newPayments(2);
  await chain.pauseMining();
  await collectAll(wallet, [short, ...payments]);
  await untilPending(1);
  await chain.rpc("anvil_dropAllTransactions");
  await chain.rpc("evm_setNextBlockTimestamp", [now + 61]);
  await mineUntilEnded(wallet, [short, ...payments]);
  expect(await wallet.payment(short)).toMatchObject({ status: "failed", reason: "expired" });
  for (const payment of payments) await expectCollected(wallet, payment);
  const parts = await partsOf(wallet);
  const byHash = Object.values(Object.groupBy(parts, ({ hash }) => hash)).map((each) => each!.length);
  expect(byHash.sort()).toEqual([2, 3]);
});

test("a reorganisation takes all of them back, and those that had not failed land again", async () => {
  const wallet = await start(BATCH);
  const { payments } = await sharedUnmined(4, wallet);
  const [failed, ...others] = payments;
  const foreign = await collectElsewhere(failed!);
  await chain.mine();
  await Promise.all(payments.map((payment) => until(async () => (await wallet.payment(payment))!.status !== "sent")));
  await chain.reorg(1, [foreign]);
  for (const payment of others) expect(await transfersOf(payment)).toHaveLength(0);
  await until(async () => {
    await chain.mine();
    const found = await Promise.all(others.map(transfersOf));
    return found.every(({ length }) => length === 1);
  });
  await Promise.all(others.map((payment) => until(async () => (await wallet.payment(payment))!.status === "settled")));
  expect(await wallet.payment(failed!)).toMatchObject({ status: "failed", foreign_transaction: foreign });
});

/** Nodes give receipts without events, and refuse to search for events. */
function hideEvents(): void {
  const rewrite = (receipt: unknown) => (receipt === null ? null : { ...(receipt as object), logs: [] });
  relay.on("eth_getTransactionReceipt", { kind: "rewrite", rewrite }, 100_000);
  refuseSearches();
}

function refuseSearches(): void {
  relay.on("eth_getLogs", { kind: "error", message: "range too large" }, 100_000);
}

async function mineSlowly(blocks: number): Promise<void> {
  for (let mined = 0; mined < blocks; mined++) {
    const asked = relay.count("eth_getTransactionReceipt");
    await chain.mine();
    await relay.called("eth_getTransactionReceipt", asked + 1);
  }
}

test("a receipt without its events, or none at all, fails no payment, however long nodes give no other", async () => {
  const wallet = await startBehind(BATCH);
  const payments = await newPayments(3);
  await chain.pauseMining();
  await collectAll(wallet, payments);
  await untilPending(1);
  relay.on("eth_getTransactionReceipt", { kind: "result", result: null }, 3);
  hideEvents();
  await mineSlowly(20);
  for (const payment of payments) expect(await wallet.payment(payment)).toMatchObject({ status: "sent" });
  relay.heal();
  await mineUntilEnded(wallet, payments);
  for (const payment of payments) await expectCollected(wallet, payment);
  expect(await wallet.rows()).toHaveLength(1);
});

test("while one of them is in doubt, a reorganisation still takes the others back, and they land again", async () => {
  const wallet = await startBehind(BATCH);
  const { payments } = await sharedUnmined(3, wallet);
  const [doubtful, ...others] = payments;
  refuseSearches();
  const foreign = await collectElsewhere(doubtful!);
  await chain.mine();
  for (const payment of others) await until(async () => (await wallet.payment(payment))!.status === "settled");
  expect(await wallet.payment(doubtful!)).toMatchObject({ status: "sent" });
  await chain.reorg(1, [foreign]);
  for (const payment of others) expect(await transfersOf(payment)).toHaveLength(0);
  await until(async () => {
    await chain.mine();
    return (await Promise.all(others.map(transfersOf))).every(({ length }) => length === 1);
  });
  relay.heal();
  await mineUntilEnded(wallet, payments);
  for (const payment of others) await expectCollected(wallet, payment);
  expect(await wallet.payment(doubtful!)).toMatchObject({ status: "failed", foreign_transaction: foreign });
});

const crashes: Readonly<Record<string, () => Promise<unknown> | unknown>> = {
  "before it is broadcast": () => relay.on("eth_sendRawTransaction", { kind: "hang" }, 1000),
  "after a broadcast whose answer was lost": () =>
    relay.on("eth_sendRawTransaction", { kind: "hang", after: true }, 1000),
  "when it is in a block, before that is seen": () => {},
};

for (const [when, prepare] of Object.entries(crashes)) {
  test(`a process that dies ${when} leaves a transaction that the next one brings home`, async () => {
    const options: WalletOptions = { ...BATCH };
    const first = await startBehind(options);
    const payments = await newPayments(4);
    await chain.pauseMining();
    await prepare();
    await collectAll(first, payments);
    const [row] = await first.rows();
    if (when.includes("block")) {
      await untilPending(1);
      // From here on the first process sees nothing any more.
      relay.on("*", { kind: "hang" }, 100_000);
      await chain.mine();
    }
    const second = await start({ ...options, store: first.store, signers: first.signers });
    await mineUntilEnded(second, payments);
    for (const payment of payments) await expectCollected(second, payment);
    expect((await second.rows())[0]!.hash).toBe(row!.hash);
    const transactions = new Set(
      (await Promise.all(payments.map(transfersOf))).flat().map((each) => each.transaction_hash),
    );
    expect(transactions.size).toBe(1);
    relay.heal();
  });
}

test("a process that dies when some of them are recorded leaves none behind, in the chain or undone by it", async () => {
  const first = await start(BATCH);
  const { payments, row } = await sharedUnmined(3, first);
  await chain.mine();
  for (const payment of payments) expect(await first.ended(payment)).toMatchObject({ status: "settled" });
  await first.wallet.stop();
  // As if the process had died between the first record and the others.
  const { facilitatorPayments: t } = first.store.read.tables;
  await first.store.write(async (tx) => {
    for (const { key } of payments.slice(1))
      await tx.db.update(t).set({ status: "sent", block_number: null, block_hash: null }).where(eq(t.nonce, key.nonce));
  });
  const second = await start({ ...BATCH, store: first.store, signers: first.signers });
  await mineUntilEnded(second, payments);
  for (const payment of payments) await expectCollected(second, payment);
  expect((await second.rows()).map(({ hash }) => hash)).toEqual([row.hash]);
});
