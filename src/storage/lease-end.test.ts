import { expect, test } from "bun:test";
import { not } from "drizzle-orm";
import { eachStore, useStore } from "../../test/support/stores/one-store.ts";
import { leaseHolds, whereLeaseHolds } from "./lease-end.ts";
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
