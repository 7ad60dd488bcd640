// Two processes with one key and one database: what one has stored for a payment, and the other does not know of
// yet, keeps it from being recorded as failed; and what is recorded as failed is sent by neither.

import { afterAll, beforeAll, expect, test } from "bun:test";
import { NOON, UNMEASURED } from "../../../test/support/chain/settling.ts";
import { NO_LEASES } from "../../../test/support/chain/wallet.ts";
import { BASE } from "../../../test/support/network.ts";
import { type Place, places } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import { silentMeters } from "../../core/meters.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { utcDay } from "../payments/guardrails.ts";
import { type ClaimedPayment, claimPayment, markSent, recordFailed, storedPayment } from "../payments/payments.ts";
import { createPendingNonces, type PendingNonce } from "./pending.ts";
import { createOutcomeRecorder, NotKnownYet } from "./resolution.ts";
import { createBatchStore, NotClaimed } from "./sender.ts";
import {
  insertTransactions,
  markBurned,
  type TransactionRow,
  transactionsOf,
  transactionsWith,
} from "./transactions.ts";

const HEAD = { number: 1, timestamp: NOON / 1000, baseFee: 1n, hash: "0x", parentHash: "0x" } as const;
const clock = { now: () => NOON };
const WALLET: Hex = `0x${"aa".repeat(20)}`;
const expired = { reason: "expired", foreign_transaction: null, gas_burned: null };
const word = (text: string): Hex => `0x${new Bun.CryptoHasher("sha256").update(text).digest("hex")}`;

let place: Place;
let store: Store;
beforeAll(async () => {
  place = await places.postgres();
  store = await place.open();
});
afterAll(async () => {
  await store.close();
  place.remove();
});

function rowOf({ key }: ClaimedPayment, wallet_nonce: number): TransactionRow {
  const { payer, nonce } = key;
  const fees = { gas: "1", max_fee: "1", max_priority_fee: "1" };
  const hash = word(`${nonce} ${wallet_nonce}`);
  const at = { open: true, gas_burned: null, stored_at_block: 1, created_at: NOON };
  return {
    hash,
    wallet: WALLET,
    wallet_nonce,
    replacement: 0,
    payer,
    nonce,
    raw: "0x",
    ...fees,
    ...at,
    payments: [{ payer, nonce, gas: 1n }],
  };
}

/** Claimed and sent, with its first transaction. */
async function sent(name: string, walletNonce: number) {
  const from: Hex = `0x${"cc".repeat(20)}`;
  const terms = { to: from, value: 7n, validAfter: 0n, validBefore: 9n };
  const payment: ClaimedPayment = {
    key: { chain_id: BASE.chainId, token: BASE.token.key, payer: from, nonce: word(name) },
    claim: name,
    authorization: { from, nonce: word(name), ...terms },
    signature: "0x",
  };
  const row = rowOf(payment, walletNonce);
  await store.write(async (tx) => {
    await claimPayment(tx, { ...payment, account: "acme", requirements: "{}", ...UNMEASURED }, NOON);
    await insertTransactions(tx, [row]);
    await markSent(tx, payment, row.hash, NOON);
  });
  return { payment, row };
}

test("a payment with a transaction of which the outcome is not known is not failed", async () => {
  const { payment, row } = await sent("unjudged", 0);
  const pendingNonces = createPendingNonces();
  const [open] = pendingNonces.add(row, [{ ...payment, status: "sent" }]).payments;
  let conflicts = 0;
  const reload = () => void conflicts++;
  const outcomes = { announce() {} };
  const verdicts = createOutcomeRecorder({
    store,
    clock,
    log: silentLog,
    meters: silentMeters,
    outcomes,
    pendingNonces,
    reload,
    limits: { dailyGasAllWei: 0n },
  });
  const other = rowOf(payment, 1);
  await store.write((tx) => insertTransactions(tx, [other]));
  await expect(verdicts.fail(open!, expired, [], HEAD)).rejects.toBeInstanceOf(NotKnownYet);
  expect(await storedPayment(store.read, payment.key)).toMatchObject({ status: "sent", reason: null });
  expect([open!.status, conflicts]).toEqual(["sent", 1]);
  pendingNonces.add(other, [{ ...payment, status: "sent" }]);
  await verdicts.fail(open!, expired, [], HEAD);
  expect(await storedPayment(store.read, payment.key)).toMatchObject({ status: "failed", reason: "expired" });
});

/** @param of what this process knows of a nonce */
const batchStore = (of: () => PendingNonce | undefined = () => ({}) as PendingNonce) =>
  createBatchStore({ store, clock, log: silentLog, leases: NO_LEASES, pendingNonces: { of } });

test("a payment that has failed is not sent again, and its transaction is not stored", async () => {
  const { payment } = await sent("failed", 10);
  const batch = batchStore();
  const again = (nonce: number) =>
    batch.write([{ jobs: [{ payment, gas: 1n, again: true, mayShare: false }], row: rowOf(payment, nonce) }]);
  await again(11);
  await store.write((tx) => recordFailed(tx, payment.key, expired, { was: "sent", day: utcDay(NOON), now: NOON }));
  await expect(again(12)).rejects.toBeInstanceOf(NotClaimed);
  const { db, tables } = store.read;
  const rows = await db.select().from(tables.facilitatorTransactions);
  expect(rows.map((row) => row.wallet_nonce).sort((a, b) => a - b)).toEqual([0, 1, 10, 11]);
});

test("a transaction that several payments share is found by each of them, and each counts its own loss once", async () => {
  const all = await Promise.all(["shared 1", "shared 2", "shared 3"].map((name, index) => sent(name, 20 + index)));
  const keys = all.map(({ payment }) => payment.key);
  const payments = keys.slice(0, 2).map(({ payer, nonce }) => ({ payer, nonce, gas: 90_000n }));
  const row = { ...rowOf(all[0]!.payment, 30), hash: word("shared"), payer: null, nonce: null, payments };
  await store.write((tx) => insertTransactions(tx, [row]));
  const found = await Promise.all(keys.map((key) => transactionsOf(store.read, key)));
  expect(found.map((rows) => rows.some(({ hash }) => hash === row.hash))).toEqual([true, true, false]);
  const [read] = await transactionsWith(store.read, [row.hash]);
  expect(new Set(read!.payments)).toEqual(new Set(payments));
  const burned = { hash: row.hash, gasWei: 5n };
  const mark = (key: PaymentKey) => store.write((tx) => markBurned(tx, key, burned));
  expect([await mark(keys[0]!), await mark(keys[0]!)]).toEqual([true, false]);
  expect([await mark(keys[1]!), await mark(keys[2]!)]).toEqual([true, false]);
});

test("of a payment that is not claimed, nothing is stored for those that were to share its transaction", async () => {
  const [open, over] = await Promise.all([sent("beside 1", 40), sent("beside 2", 41)]);
  await store.write((tx) => recordFailed(tx, over.payment.key, expired, { was: "sent", day: utcDay(NOON), now: NOON }));
  const jobs = [open, over].map(({ payment }) => ({ payment, gas: 1n, again: true, mayShare: true }));
  const payments = jobs.map(({ payment: { key }, gas }) => ({ payer: key.payer, nonce: key.nonce, gas }));
  const row = { ...rowOf(open.payment, 50), hash: word("beside"), payer: null, nonce: null, payments };
  const batch = batchStore();
  await expect(batch.write([{ jobs, row }])).rejects.toEqual(new NotClaimed(over.payment.key));
  expect(await transactionsWith(store.read, [row.hash])).toEqual([]);
});

test("a payment that another process has sent once more, which is not known here, is not sent again", async () => {
  const { payment } = await sent("moved elsewhere", 60);
  const write = (nonce: number, of: () => PendingNonce | undefined) =>
    batchStore(of).write([{ jobs: [{ payment, gas: 1n, again: true, mayShare: false }], row: rowOf(payment, nonce) }]);
  await expect(write(61, () => undefined)).rejects.toEqual(new NotClaimed(payment.key));
  await write(61, () => ({}) as PendingNonce);
});
