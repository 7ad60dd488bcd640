import { expect, test } from "bun:test";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { clock as fixed, places } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import { takeCommand, waitingAgents } from "../invocations/commands/queue.ts";
import { findInvocation } from "../invocations/history.ts";
import { accept, claim, collectSettlement, type InvocationRow } from "../invocations/service.ts";
import { keepResumablePaidCall } from "../proxy/gather.ts";
import { createReaper, KEPT_MS } from "./reaper.ts";

const PAID = {
  payment_network: "base",
  payment_asset: "USDC",
  payment_amount: "1",
  payment_payer: "0x01",
  payment_nonce: "0x02",
  settlement_status: "pending",
  settlement: "{}",
} as const;

const LOOK_MS = 5_000;
const TAKER = { replica: "rep_1", now: 0 };

for (const [name, place] of Object.entries(places)) {
  test(`on ${name} a paid call that nobody fetches ends, and only such a call, and only in time`, async () => {
    const where = await place();
    const store = await where.open();
    let now = fixed.now();
    let passed = 0;
    const clock = { now: () => now };
    const ended: string[] = [];
    store.onCallEnded(({ invocation_id }) => void ended.push(invocation_id));
    const endOnce = createReaper({
      store,
      clock,
      log: silentLog,
      monotonic: () => passed,
    });
    const put = (fields: Partial<InvocationRow>) => {
      const call = accepted(now, { mode: "streaming", ...fields });
      const key = { tenant: "acme", id: call.row.id };
      return store.write(async (tx) => {
        await accept(tx, call);
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
      // The scheduler's queue has none of them but the last.
      const agent = { tenant: "acme", agent_id: "agt_a" };
      expect(await store.execute(waitingAgents, { ...TAKER, after: "", limit: 10 })).toEqual([agent]);
      const block = { ...agent, owner: "rep_1", tokens: ["1", "2"], now, after: "", leftOut: [] };
      expect((await store.execute(takeCommand, block)).taken.map(({ id }) => id)).toEqual([waiting.id]);
      const taking = { key: fetched, owner: "rep_1", token: "t", now };
      expect(await store.write((tx) => claim(tx, taking))).not.toBeNull();
      expect(await store.write((tx) => claim(tx, { ...taking, key: unknown }))).toBeNull();

      // However old it is by the clock: what counts is what has been seen to pass.
      now += 48 * 3_600_000;
      expect(await endOnce()).toEqual([]);
      const watchFor = async (ms: number) => {
        const gone = [];
        for (let left = ms; left > 0; left -= LOOK_MS) {
          passed += Math.min(left, LOOK_MS);
          gone.push(...(await endOnce()));
        }
        return gone;
      };
      expect(await watchFor(KEPT_MS - 1)).toEqual([]);
      // Its caller has tried.
      const look = () => findInvocation(store.read, "acme", unclaimed.id);
      keepResumablePaidCall({ store, clock, log: silentLog }, await look())[Symbol.dispose]();
      // On Postgres one write may be done before another that was asked for first.
      while ((await look()).updated_at !== now) await store.write(async () => {});
      expect(await watchFor(LOOK_MS)).toEqual([]);
      expect(await watchFor(KEPT_MS - 1)).toEqual([]);
      expect(await watchFor(1)).toEqual([unclaimed]);
      expect(ended).toEqual([unclaimed.id]);
      expect(await findInvocation(store.read, "acme", unclaimed.id)).toMatchObject({
        status: "failed",
        error_class: "cancelled",
        settlement_status: "settled_upstream_failed",
      });
      expect(await endOnce()).toEqual([]);
      const states = await Promise.all(
        [unknown, fetched, waiting].map(async ({ id }) => (await findInvocation(store.read, "acme", id)).status),
      );
      expect(states).toEqual(["pending", "running", "running"]);
    } finally {
      await store.close();
      where.remove();
    }
  });
}
