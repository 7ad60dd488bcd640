import { expect, test } from "bun:test";
import { not } from "drizzle-orm";
import { eachStore, useStore } from "../../test/support/stores/one-store.ts";
import { createLeaseTrust, leaseHolds, whereLeaseHolds } from "./leases.ts";
import type { Store } from "./store.ts";

const [NOW, MS] = [1_790_000_000_000, 15_000];

eachStore((makePlace) => {
  let store: Store;
  useStore(makePlace, (opened) => {
    ({ store } = opened);
  });

  test("a lease holds until its end, and not when it ends later than it can, here as in a statement", async () => {
    const left = [-MS, -1, 0, 1, MS, MS + 1, 100 * MS];
    const holding = left.filter((ms) => leaseHolds(NOW + ms, NOW, MS));
    expect(holding).toEqual([1, MS]);
    const { jobLeases: t } = store.read.tables;
    await store.write(async ({ db }) => {
      await db.insert(t).values(left.map((ms) => ({ job: `${ms}`, next_at: NOW + ms })));
    });
    const holds = whereLeaseHolds(t.next_at, NOW, MS);
    for (const [where, expected] of [
      [holds, holding] as const,
      [not(holds), left.filter((ms) => !holding.includes(ms))] as const,
    ]) {
      const rows = await store.read.db.select({ job: t.job }).from(t).where(where);
      expect(rows.map(({ job }) => Number(job)).sort((a, b) => a - b)).toEqual(expected);
    }
  });
});

const LEASE_MS = 15_000;
const RENEW_MS = 5_000;

/** A replica that renews every five seconds; the test moves the database's clock and its own. */
function replica() {
  let [database, own] = [1_790_000_000_000, 0];
  const trust = createLeaseTrust(LEASE_MS, () => own);
  const pass = (ms: number, databaseMs = ms) => {
    own += ms;
    database += databaseMs;
  };
  const renew = () => trust.renewed(database);
  const renewFor = (ms: number) => {
    for (let passed = 0; passed < ms; passed += RENEW_MS) {
      pass(RENEW_MS);
      renew();
    }
  };
  return { pass, renew, renewFor, holds: () => trust.holds(database) };
}

test("a replica believes the others' leases when it has renewed its own for the time of one", () => {
  const at = replica();
  expect(at.holds()).toBe(false);
  at.renew();
  expect(at.holds()).toBe(false);
  at.renewFor(10_000);
  expect(at.holds()).toBe(false);
  at.renewFor(5_000);
  expect(at.holds()).toBe(true);
});

test.each<[string, number, number]>([
  ["an outage of the database", 16_000, 16_000],
  ["a database whose clock is set ahead", 1_000, 3_600_000],
  ["a database whose clock is set back", 1_000, -3_600_000],
  ["a pause of the machine, for which its own clock stood still", 1_000, 60_000],
])("a replica ends no other's call for the time of a lease after %s", (_, ownMs, databaseMs) => {
  const at = replica();
  at.renew();
  at.renewFor(60_000);
  expect(at.holds()).toBe(true);
  at.pass(ownMs, databaseMs);
  expect(at.holds()).toBe(false);
  at.renew();
  at.renewFor(10_000);
  expect(at.holds()).toBe(false);
  at.renewFor(5_000);
  expect(at.holds()).toBe(true);
});
