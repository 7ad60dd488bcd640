// Wallets with leases on one Postgres: one that has lost its wallet and does not know it, one beside a version that knows of
// no leases, and one that is followed by another.

import { afterEach, beforeEach, expect, test } from "bun:test";
import type { TestChain } from "../../../test/support/chain/chain.ts";
import { fundedSigner, newPayment, type TestWallet } from "../../../test/support/chain/wallet.ts";
import { useChain } from "../../../test/support/chain/wallet-tests.ts";
import { places } from "../../../test/support/stores/stores.ts";
import { until } from "../../../test/support/until.ts";
import type { Chain } from "../../chain/chain.ts";
import { silentLog } from "../../core/log.ts";
import { systemClock } from "../../core/time.ts";
import type { Store } from "../../storage/store.ts";
import { changeHolder, createWalletLeases, type WalletLeases, WalletNotHeld } from "./leases.ts";
import type { Signer } from "./signer.ts";

let chain: TestChain;
let store: Store;
const { start, expectCollected } = useChain((nodes) => {
  ({ chain } = nodes);
});
beforeEach(async () => {
  store = await (await places.postgres()).open();
});
afterEach(() => store.close());

const leasesOf = ({ address }: Signer) =>
  createWalletLeases({ store, clock: systemClock, log: silentLog, wallets: [address] });

const startLeased = (signer: Signer, leases = leasesOf(signer)): Promise<TestWallet> =>
  start({ store, signers: [signer], leases });

test("a facilitator that does not know yet that it has lost its wallet stores nothing, and the claim stays", async () => {
  const wallet = await startLeased(await fundedSigner(chain));
  const payment = await newPayment(chain);
  await wallet.claim(payment);
  await store.write((tx) => changeHolder(tx, wallet.address, "another", 1));
  const sent = await wallet.send(payment).catch((error) => error);
  expect(sent).toBeInstanceOf(WalletNotHeld);
  expect(await wallet.rows()).toEqual([]);
  expect(await wallet.payment(payment)).toMatchObject({ status: "claimed", wallet: expect.any(String) });
});

test("one that stops leaves its wallet to the next one at once, with what is under way", async () => {
  const signer = await fundedSigner(chain);
  const first = await startLeased(signer);
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await first.collect(payment);
  await first.stop();
  const next = await startLeased(signer);
  await chain.resumeMining();
  await expectCollected(next, payment);
});

test("one whose signer fails hands over to one whose signer works", async () => {
  const signer = await fundedSigner(chain);
  const failing = await startLeased({ ...signer, sign: () => Promise.reject(new Error("the signer is away")) });
  const leases = leasesOf(signer);
  const working = await startLeased(signer, leases);
  const payment = await newPayment(chain);
  await failing.claim(payment);
  expect(await failing.send(payment).catch((error) => error)).toMatchObject({ kind: "unavailable" });
  await until(() => leases.holds(signer.address));
  await working.send(payment);
  await expectCollected(working, payment);
});

test("one whose nodes have no fresh block hands over to one whose nodes have", async () => {
  const signer = await fundedSigner(chain);
  const wrap = (nodes: Chain): Chain => ({ ...nodes, isFresh: () => false });
  await start({ store, signers: [signer], leases: leasesOf(signer), wrap });
  const leases = leasesOf(signer);
  const working = await startLeased(signer, leases);
  await until(() => leases.holds(signer.address));
  const payment = await newPayment(chain);
  await working.collect(payment);
  await expectCollected(working, payment);
});

/** Whether what is signed for the wallet would be stored now. */
const isFenced = (leases: WalletLeases, { address }: Signer) =>
  store
    .write((tx) => leases.fence(tx, address))
    .then(() => true)
    .catch((error) => {
      expect(error).toBeInstanceOf(WalletNotHeld);
      return false;
    });

/** As a failover to a standby that lacks the last commits leaves it. */
const setBack = (holder: string, token: number) =>
  store.write((tx) => tx.db.update(tx.tables.facilitatorWallets).set({ holder, token }));

test("a wallet whose lease a failover has lost is taken anew, and pays", async () => {
  const signer = await fundedSigner(chain);
  const leases = leasesOf(signer);
  const wallet = await startLeased(signer, leases);
  for (const lose of [
    () => store.write((tx) => tx.db.delete(tx.tables.facilitatorWallets)),
    () => setBack("one that is gone", 0),
  ]) {
    await lose();
    expect(await isFenced(leases, signer)).toBe(false);
    await until(() => isFenced(leases, signer));
  }
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  await expectCollected(wallet, payment);
});

test("of two that live, the one to which a failover has given a wallet back works for it again", async () => {
  const signer = await fundedSigner(chain);
  const [first, second] = [leasesOf(signer), leasesOf(signer)];
  const wallet = await startLeased(signer, first);
  const { facilitatorWallets, processes } = store.read.tables;
  const [before] = await store.read.db.select().from(facilitatorWallets);
  await startLeased(signer, second);
  const others = (await store.read.db.select().from(processes)).filter(({ id }) => id !== before!.holder);
  await store.write((tx) => changeHolder(tx, signer.address, others[0]!.id, before!.token));
  await until(() => second.holds(signer.address) && !first.holds(signer.address));
  await setBack(before!.holder, before!.token);
  await until(async () => first.holds(signer.address) && (await isFenced(first, signer)));
  await until(() => !second.holds(signer.address));
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  await expectCollected(wallet, payment);
});

test("beside a version that knows of no leases, each payment of both is collected once", async () => {
  const signer = await fundedSigner(chain);
  const wallets = [await startLeased(signer), await start({ store, signers: [signer] })];
  const payments = await Promise.all(Array.from({ length: 12 }, () => newPayment(chain)));
  await chain.resumeMining(1);
  await Promise.all(payments.map((payment, index) => wallets[index % 2]!.collect(payment)));
  for (const payment of payments) await expectCollected(wallets[0]!, payment);
  const nonces = (await wallets[0]!.rows())
    .filter(({ replacement }) => replacement === 0)
    .map((row) => row.wallet_nonce);
  expect(nonces).toEqual(payments.map((_, index) => index));
});
