// Two processes with one key and one database: what one has stored for a payment, and the other does not know of
// yet, keeps it from being recorded as failed; and what is recorded as failed is sent by neither.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { NOON, UNMEASURED } from "../../../test/support/chain/settling.ts";
import { type Place, places } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import { CHAIN_ID } from "../../x402/kind.ts";
import type { Hex } from "../../x402/types.ts";
import { TOKEN_ADDRESS } from "../chain/token.ts";
import { type ClaimedPayment, claimPayment, findPayment, markSent, recordFailed } from "../payments/payments.ts";
import { createBatchStore, NotClaimed } from "./batch.ts";
import { createPendingNonces } from "./pending.ts";
import { createOutcomeRecorder, NotKnownYet } from "./record-outcome.ts";
import { insertTransactions, type TransactionRow } from "./transactions.ts";

const clock = { now: () => NOON };
const WALLET: Hex = `0x${"aa".repeat(20)}`;
const expired = { reason: "expired", foreign_transaction: null, gas_burned: null };
const word = (text: string): Hex => `0x${new Bun.CryptoHasher("sha256").update(text).digest("hex")}`;

let place: Place;
let store: Store;
beforeAll(async () => {
  place = await places.postgres();
  store = await place.open();
}, 30_000);
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
    key: { chain_id: CHAIN_ID, token: TOKEN_ADDRESS, payer: from, nonce: word(name) },
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
  const onConflict = () => void conflicts++;
  const outcomes = { announce() {} };
  const verdicts = createOutcomeRecorder({
    store,
    clock,
    log: silentLog,
    outcomes,
    pendingNonces,
    onConflict,
  });
  const other = rowOf(payment, 1);
  await store.write((tx) => insertTransactions(tx, [other]));
  await expect(verdicts.fail(open!, expired, [])).rejects.toBeInstanceOf(NotKnownYet);
  expect(await findPayment(store.read, payment.key)).toMatchObject({ status: "sent", reason: null });
  expect([open!.status, conflicts]).toEqual(["sent", 1]);
  pendingNonces.add(other, [{ ...payment, status: "sent" }]);
  await verdicts.fail(open!, expired, []);
  expect(await findPayment(store.read, payment.key)).toMatchObject({ status: "failed", reason: "expired" });
});

test("a payment that has failed is not sent again, and its transaction is not stored", async () => {
  const { payment } = await sent("failed", 10);
  const batch = createBatchStore(store, clock, silentLog);
  const again = (nonce: number) =>
    batch.write([{ jobs: [{ payment, gas: 1n, again: true, mayShare: false }], row: rowOf(payment, nonce) }]);
  await again(11);
  await store.write((tx) => recordFailed(tx, payment.key, expired, { was: "sent", now: NOON }));
  await expect(again(12)).rejects.toBeInstanceOf(NotClaimed);
  const { db, tables } = store.read;
  const rows = await db.select().from(tables.facilitatorTransactions);
  expect(rows.map((row) => row.wallet_nonce).sort((a, b) => a - b)).toEqual([0, 1, 10, 11]);
});
