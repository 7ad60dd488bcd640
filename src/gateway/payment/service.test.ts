import { describe, expect, test } from "bun:test";
import { eq } from "drizzle-orm";
import {
  COLLECTED,
  DAY_MS,
  DECLINED,
  databases,
  LEASE_MS,
  UNKNOWN,
  usePayments,
} from "../../../test/support/stores/settlements.ts";
import { until } from "../../../test/support/until.ts";
import { silentLog } from "../../core/log.ts";
import { findInvocation } from "../invocations/history.ts";
import { cleanUp } from "../invocations/retention.ts";
import { claim, endOpen } from "../invocations/service.ts";
import { createRestoreGuard } from "./restored.ts";
import { paymentOf } from "./store.ts";

for (const [name, databaseUrl] of Object.entries(databases)) {
  describe(`on ${name}`, () => {
    const { clock, store, replica, attemptsShown, configured, priced, recorded, shown, total, kindOf } =
      usePayments(databaseUrl);

    test("a caller who lost the answer learns the truth with the payment that it has, expired or not", async () => {
      const [tenant, at] = [await configured(), replica(() => COLLECTED)];
      const call = await priced(tenant);
      const late = await priced(tenant);
      const { payment, key } = await recorded(at, call);
      await at.payments.settle(payment);
      clock.time += 3_600_000;
      expect(await at.payments.check(call)).toEqual({ kind: "known", invocation_id: key.id });
      expect(Object.keys(await at.payments.recall(tenant, key.id))).toEqual(["x-payment-response"]);
      expect(await kindOf(at.payments.check(late))).toBe("payment_required");
    });

    test("after a restore a facilitator is asked about an older payment once it can't be collected any more", async () => {
      const tenant = await configured();
      const { payment, key } = await recorded(
        replica(() => COLLECTED),
        await priced(tenant),
      );
      clock.time = (payment.next_attempt_at ?? 0) + 1;
      const at = replica(() => DECLINED, { guard: createRestoreGuard(clock.now()) });
      at.settler.start();
      await until(async () => (await paymentOf(store().read, { tenant, id: key.id }))?.unknown_since !== null);
      expect([at.attempts(), await shown(key)]).toEqual([0, ["pending", null, "pending"]]);
      clock.time = (payment.valid_before + 11) * 1_000 + LEASE_MS;
      await until(async () => (await shown(key))[2] === "settlement_failed");
      expect(at.attempts()).toBe(1);
      await at.settler.stop(0);
    });

    test("a payment must be good for six seconds more", async () => {
      const [tenant, at] = [await configured(), replica(() => COLLECTED)];
      expect(await kindOf(at.payments.check(await priced(tenant, 6)))).toBe("done");
      expect(await kindOf(at.payments.check(await priced(tenant, 5)))).toBe("payment_required");
    });

    test("a collected payment is closed: its signature is gone, and its call may be claimed", async () => {
      const [tenant, at] = [await configured(), replica(() => COLLECTED)];
      const { payment, key } = await recorded(at, await priced(tenant));
      const take = () => store().write((tx) => claim(tx, { key, owner: "rep", token: "t", now: 0 }));
      expect(await take()).toBeNull();
      await at.payments.settle(payment);
      expect(at.told).toEqual([`paid ${payment.agent_id}`]);
      expect(await paymentOf(store().read, { tenant, id: key.id })).toMatchObject({
        settle_request: null,
        next_attempt_at: null,
        attempts: 1,
      });
      const { settlement } = await findInvocation(store().read, tenant, key.id);
      expect(JSON.parse(settlement ?? "")).toMatchObject({
        settled_amount: "1000",
        operator_amount: "900",
        facilitator_fee: "100",
      });
      expect(await take()).not.toBeNull();
      await store().write((tx) => endOpen(tx, key, "internal", clock.now()));
      expect(await shown(key)).toEqual(["failed", "internal", "settled_upstream_failed"]);
      expect(await total(tenant, "settled_upstream_failed")).toBe(1);
      expect(await total(tenant, "settled")).toBe(0);
    });

    test("a payment of unknown outcome is refused only by an answer after its time, and its call ends then without a class", async () => {
      const tenant = await configured();
      const at = replica((attempt) => (attempt === 1 ? UNKNOWN : DECLINED));
      const { payment, key } = await recorded(at, await priced(tenant));
      expect(await at.payments.settle(payment)).toEqual({});
      await at.settler.recover();
      at.settler.start();
      clock.time += 2_000;
      await until(() => at.attempts() === 2);
      await until(async () => (await paymentOf(store().read, { tenant, id: key.id }))?.next_attempt_at !== null);
      expect(await shown(key)).toEqual(["pending", null, "pending"]);
      clock.time += 70_000;
      await until(() => at.told.length > 0);
      expect(at.told).toEqual([`ended ${key.id}`]);
      expect(await shown(key)).toEqual(["failed", null, "settlement_failed"]);
      expect(await kindOf(at.payments.recall(tenant, key.id))).toBe("payment_required");
      await expect(at.payments.recall(tenant, key.id)).rejects.toThrow(
        /^the facilitator declined the payment, and nothing was collected; .* has too little USDC, the amount is below the facilitator's minimum/,
      );
      expect([await total(tenant, "pending"), await total(tenant, "settlement_failed")]).toEqual([0, 1]);
      await at.settler.stop(0);
    });

    test("a refusal that was asked for within the payment's time is none, however late it comes", async () => {
      const tenant = await configured();
      const at = replica((attempt) => {
        if (attempt === 2) clock.time += 70_000;
        return attempt === 1 ? UNKNOWN : DECLINED;
      });
      const { payment, key } = await recorded(at, await priced(tenant));
      await at.payments.settle(payment);
      at.settler.start();
      clock.time += 2_000;
      await until(async () => (await findInvocation(store().read, tenant, key.id)).settlement === '{"attempts":2}');
      expect(await shown(key)).toEqual(["pending", null, "pending"]);
      clock.time += 120_000;
      await until(() => at.told.length > 0);
      expect(await shown(key)).toEqual(["failed", null, "settlement_failed"]);
      await at.settler.stop(0);
    });

    test("a payment ends as unknown when its facilitator stays away for a day of asking", async () => {
      const [tenant, at] = [await configured(), replica(() => UNKNOWN)];
      const { payment, key } = await recorded(at, await priced(tenant));
      await at.payments.settle(payment);
      // The gateway was away itself, so nobody asked.
      clock.time += 2 * DAY_MS;
      await at.settler.recover();
      at.settler.start();
      await until(() => at.attempts() === 2);
      expect(await shown(key)).toEqual(["pending", null, "pending"]);
      await until(async () => (await attemptsShown(tenant, key.id)) === 2);
      await store().write(({ db, tables: { payments: t } }) =>
        db.update(t).set({ asked_ms: DAY_MS }).where(eq(t.invocation_id, key.id)),
      );
      clock.time += 120_000;
      await until(() => at.told.length > 0);
      expect(await shown(key)).toEqual(["failed", null, "settlement_failed"]);
      await expect(at.payments.recall(tenant, key.id)).rejects.toThrow(
        /^it is unknown whether .* before you pay again$/,
      );
      const { settlement } = await findInvocation(store().read, tenant, key.id);
      expect(JSON.parse(settlement ?? "")).toEqual({ attempts: 3, reason: "unknown" });
      await at.settler.stop(0);
    });

    test("a record goes with its payment, but not while that is open or could come again", async () => {
      const tenant = await configured();
      const keep = replica(() => UNKNOWN);
      const open = await recorded(keep, await priced(tenant));
      await keep.payments.settle(open.payment);
      await store().write((tx) => endOpen(tx, open.key, "cancelled", clock.now()));
      const at = replica(() => COLLECTED);
      const [short, long] = [await recorded(at, await priced(tenant)), await recorded(at, await priced(tenant))];
      const later = Math.floor(clock.now() / 1000) + 400 * 86_400;
      await store().write(({ db, tables: { payments: t } }) =>
        db.update(t).set({ valid_before: later }).where(eq(t.invocation_id, long.key.id)),
      );
      for (const { payment, key } of [short, long]) {
        await at.payments.settle(payment);
        await store().write((tx) => endOpen(tx, key, "cancelled", clock.now()));
      }
      const retention = { body_days: 0, history_days: 30 };
      await cleanUp(store(), { now: () => clock.time + 31 * DAY_MS }, retention, silentLog);
      const kept = ({ tenant: owner, id }: { tenant: string; id: string }) =>
        kindOf(findInvocation(store().read, owner, id));
      expect(await Promise.all([open.key, short.key, long.key].map(kept))).toEqual(["done", "not_found", "done"]);
      expect(await paymentOf(store().read, { tenant, id: short.key.id })).toBeNull();
      expect(await paymentOf(store().read, { tenant, id: long.key.id })).not.toBeNull();
    });
  });
}
