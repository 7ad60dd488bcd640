import { expect, test } from "bun:test";
import { accepted } from "../../../test/support/invocations.ts";
import { clock as fixed, places } from "../../../test/support/stores.ts";
import { silentLog } from "../../core/log.ts";
import { nextAgentWithPending, pendingOf } from "../executor/queue.ts";
import { findInvocation } from "../invocations/history.ts";
import { accept, claim, collectSettlement, type InvocationRow } from "../invocations/service.ts";
import { endOnce, KEPT_MS } from "./unclaimed.ts";

const PAID = {
  payment_network: "base",
  payment_asset: "USDC",
  payment_amount: "1",
  payment_payer: "0x01",
  payment_nonce: "0x02",
  settlement_status: "pending",
  settlement: "{}",
} as const;

for (const [name, place] of Object.entries(places)) {
  test(`${name}: a paid call that nobody fetches ends, and only that, and only in time`, async () => {
    const where = await place();
    const store = await where.open();
    let now = fixed.now();
    const clock = { now: () => now };
    const ended: string[] = [];
    const options = { store, clock, log: silentLog, ended: (id: string) => void ended.push(id) };
    const put = (fields: Partial<InvocationRow>) => {
      const call = accepted(now, { mode: "streaming", ...fields });
      const key = { tenant: "acme", id: call.row.id };
      return store.write(async (tx) => {
        await accept(tx, call, now);
        return key;
      });
    };
    try {
      const unclaimed = await put(PAID);
      const unknown = await put(PAID);
      const fetched = await put(PAID);
      const waiting = await put({ mode: "transactional" });
      for (const key of [unclaimed, fetched]) {
        await store.write((tx) => collectSettlement(tx, key, "{}", now));
      }
      // The dispatcher's queue has none of them but the last.
      expect((await pendingOf(store.read, "agt_a", 10)).map(({ id }) => id)).toEqual([waiting.id]);
      expect(await nextAgentWithPending(store.read, "")).toBe("agt_a");
      const taking = { key: fetched, owner: "rep_1", now, inHand: null, again: false };
      expect(await store.write((tx) => claim(tx, taking))).not.toBeNull();
      expect(await store.write((tx) => claim(tx, { ...taking, key: unknown }))).toBeNull();

      now += KEPT_MS - 1;
      expect(await endOnce(options)).toEqual([]);
      now += 1;
      expect(await endOnce(options)).toEqual([unclaimed]);
      expect(ended).toEqual([unclaimed.id]);
      expect(await findInvocation(store.read, "acme", unclaimed.id)).toMatchObject({
        status: "failed",
        error_class: "cancelled",
        settlement_status: "settled_upstream_failed",
      });
      expect(await endOnce(options)).toEqual([]);
      const states = await Promise.all(
        [unknown, fetched, waiting].map(
          async ({ id }) => (await findInvocation(store.read, "acme", id)).status,
        ),
      );
      expect(states).toEqual(["pending", "running", "pending"]);
    } finally {
      await store.close();
      where.remove();
    }
  }, 30_000);
}
