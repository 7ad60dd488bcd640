import { afterAll, beforeAll, expect, test } from "bun:test";
import { hashOf, keyOfRequest, NOON, request, UNMEASURED } from "../../../test/support/chain/settling.ts";
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import { Fault } from "../../core/fault.ts";
import type { Store } from "../../storage/store.ts";
import { claimPayment, markSent, recordSettled } from "../payments/payments.ts";
import { createSettlementWaiters } from "./settle.ts";

const place = sqlitePlace();
let store: Store;
beforeAll(async () => {
  store = await place.open();
});
afterAll(async () => {
  await store.close();
  place.remove();
});

async function sent() {
  const asked = await request();
  const key = keyOfRequest(asked);
  const { authorization, signature } = asked.payment;
  const claim = {
    key,
    claim: "first",
    account: "alpha",
    authorization,
    signature,
    requirements: "{}",
    ...UNMEASURED,
  };
  await store.write((tx) => claimPayment(tx, claim, NOON));
  await store.write((tx) => markSent(tx, claim, hashOf(key), NOON));
  const settle = () =>
    store.write((tx) => recordSettled(tx, key, { hash: hashOf(key), blockNumber: 1, blockHash: hashOf(key) }, NOON));
  return { key, settle };
}

test("an announced outcome wakes all who wait for that payment, and nobody else", async () => {
  const outcomes = createSettlementWaiters(store);
  const [one, other] = [await sent(), await sent()];
  const waits = [outcomes.wait(one.key, 60_000), outcomes.wait(one.key, 60_000)];
  const pending = outcomes.wait(other.key, 60_000);
  await one.settle();
  outcomes.announce(one.key);
  for (const row of await Promise.all(waits)) expect(row).toMatchObject({ status: "settled" });
  outcomes.announce(other.key);
  expect(await Promise.race([pending, Promise.resolve("still waiting")])).toBe("still waiting");
  await other.settle();
  outcomes.announce(other.key);
  expect(await pending).toMatchObject({ status: "settled" });
});

test("an outcome that was there before the wait, or is decided by another process, is found by looking", async () => {
  const { key, settle } = await sent();
  const waiting = createSettlementWaiters(store).wait(key, 60_000);
  await settle();
  expect(await waiting).toMatchObject({ status: "settled" });
  expect(await createSettlementWaiters(store).wait(key, 0)).toMatchObject({ status: "settled" });
});

test("at the time limit and at the release a payment is given as it is; without a record there is no wait", async () => {
  const outcomes = createSettlementWaiters(store);
  const { key } = await sent();
  expect(await outcomes.wait(key, 5)).toMatchObject({ status: "sent" });
  const waiting = outcomes.wait(key, 60_000);
  outcomes.release();
  expect(await waiting).toMatchObject({ status: "sent" });
  expect(await outcomes.wait(key, 60_000)).toMatchObject({ status: "sent" });
  const unknown = keyOfRequest(await request());
  expect(await createSettlementWaiters(store).wait(unknown, 60_000)).toBeNull();
});

test("a database that is away for a look is asked again, and at the last look its error goes to the caller", async () => {
  let looks = 0;
  const select = () => {
    looks += 1;
    throw new Fault("unavailable", "away");
  };
  const away = { ...store, read: { ...store.read, db: { ...store.read.db, select } } };
  const { key, settle } = await sent();
  const flaky: Store = {
    ...store,
    get read() {
      return looks === 0 ? away.read : store.read;
    },
  };
  await settle();
  expect(await createSettlementWaiters(flaky).wait(key, 60_000)).toMatchObject({ status: "settled" });
  expect(looks).toBe(1);
  await expect(createSettlementWaiters(away).wait(key, 0)).rejects.toMatchObject({ kind: "unavailable" });
});

test("however many wait, outcomes of other processes are found by one query for all of them", async () => {
  const COUNT = 20;
  const LOOKS = 8;
  let selects = 0;
  const looked = Promise.withResolvers<void>();
  const select = (...columns: []) => {
    selects += 1;
    if (selects === COUNT + LOOKS) looked.resolve();
    return store.read.db.select(...columns);
  };
  // Looked for as often as on a database that processes share.
  const shared: Store = { ...store, isShared: true, read: { ...store.read, db: { ...store.read.db, select } } };
  const outcomes = createSettlementWaiters(shared);
  const open = await Promise.all(Array.from({ length: COUNT }, sent));
  const startedAt = performance.now();
  const waits = open.map(({ key }) => outcomes.wait(key, 60_000));
  await looked.promise;
  // One for each would have been there after a second look of each.
  expect(performance.now() - startedAt).toBeGreaterThan(1_000);
  for (const { settle } of open) await settle();
  for (const row of await Promise.all(waits)) expect(row).toMatchObject({ status: "settled" });
});
