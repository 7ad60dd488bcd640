import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eq } from "drizzle-orm";
import { newPayer, signPayment, verifiedAtOnce } from "../../../test/support/chain/payments.ts";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { startPostgres } from "../../../test/support/stores/postgres.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import { silentLog } from "../../core/log.ts";
import { silentMeters } from "../../core/meters.ts";
import { counted } from "../../storage/counts.ts";
import { openStore } from "../../storage/open.ts";
import { CommitUnknown, type Store } from "../../storage/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { cleanUp } from "../invocations/retention.ts";
import { abandon, accept, claim, type InvocationRow } from "../invocations/service.ts";
import type { SettleOutcome } from "./outcome.ts";
import { createRestoreGuard } from "./restore-guard.ts";
import { type Charge, createPayments, type PricedCall, paidColumns } from "./service.ts";
import { createSettler, type Settler, type SettlerOptions } from "./settler.ts";
import { insertPayment, paymentOf } from "./store.ts";

const DAY_MS = 86_400_000;
const SETTLE_WAIT_MS = 1_000;
const LEASE_MS = SETTLE_WAIT_MS + 5_000;
const PAY_TO = newPayer().address;
const HASH = `0x${"cd".repeat(32)}` as const;
const COLLECTED: SettleOutcome = { kind: "collected", transaction: HASH, fee: 100n };
const DECLINED: SettleOutcome = { kind: "declined", definite: true, why: "" };
const UNKNOWN: SettleOutcome = { kind: "unknown", why: "" };

const databases: Record<string, () => Promise<string | null>> = {
  sqlite: async () => null,
  postgres: async () => (await startPostgres()).freshDatabase(),
};

/** Fails the test by its time limit when it never comes. */
async function until(holds: () => Promise<boolean> | boolean): Promise<void> {
  while (!(await holds())) await Bun.sleep(10);
}

for (const [name, databaseUrl] of Object.entries(databases)) {
  describe(`on ${name}`, () => {
    const clock = { time: Date.now(), now: () => clock.time };
    let dir: string;
    let store: Store;
    const running: Settler[] = [];
    beforeAll(async () => {
      dir = mkdtempSync(join(tmpdir(), "tollgate-payments-"));
      store = await openStore({ databaseUrl: await databaseUrl(), dataDir: dir, log: silentLog, clock });
    }, 30_000);
    afterAll(async () => {
      await Promise.all(running.map((settler) => settler.stop(0)));
      await store.close();
      rmSync(dir, { recursive: true });
    });

    type Answer = (attempt: number) => SettleOutcome | Promise<SettleOutcome>;

    /** The payments of one replica, whose facilitator answers by the number of the attempt here. */
    function replica(answer: Answer, changes: Partial<SettlerOptions> = {}) {
      const told: string[] = [];
      store.onCallEnded(({ invocation_id }) => void told.push(`ended ${invocation_id}`));
      let attempts = 0;
      const settler = createSettler({
        store,
        clock,
        time: { earliest: clock.now },
        log: silentLog,
        meters: silentMeters,
        settleWaitMs: SETTLE_WAIT_MS,
        client: { settle: async () => answer(++attempts) },
        paid: (_tenant, agentId) => void told.push(`paid ${agentId}`),
        guard: createRestoreGuard(null),
        ...changes,
      });
      running.push(settler);
      const look = (tenant: string, id: string) => findInvocation(store.read, tenant, id);
      const payments = createPayments({
        store,
        clock,
        meters: silentMeters,
        settler,
        verifier: verifiedAtOnce,
        settleWaitMs: SETTLE_WAIT_MS,
        publicUrl: null,
        guard: createRestoreGuard(null),
        findInvocation: look,
      });
      return { settler, payments, told, attempts: () => attempts };
    }

    type Replica = ReturnType<typeof replica>;

    const attemptsShown = async (tenant: string, id: string) => {
      const { settlement } = await findInvocation(store.read, tenant, id);
      return (JSON.parse(settlement ?? "{}") as { attempts?: number }).attempts;
    };

    async function configured(tenant: string = crypto.randomUUID()): Promise<string> {
      await store.write((tx) =>
        tx.db.insert(tx.tables.settlementConfigs).values({
          tenant,
          facilitator_url: `https://${encodeURIComponent(tenant)}.example.com`,
          facilitator_credential_ref: "cred_x",
          created_at: 0,
          updated_at: 0,
        }),
      );
      return tenant;
    }

    async function priced(tenant: string, validForSeconds = 60): Promise<PricedCall> {
      const validBefore = Math.floor(clock.now() / 1000) + validForSeconds;
      const { header } = await signPayment(newPayer(), {
        to: PAY_TO,
        value: 1000n,
        validBefore,
        validAfter: 0,
      });
      return {
        tenant,
        caller: "alice",
        agent_id: newId("agt", clock.now()),
        path: "/v1/proxy/agt_x",
        price: { amount: 1000n, pay_to: PAY_TO },
        headers: new Headers({ "x-payment": header, host: "localhost" }),
        body: new Uint8Array(3),
        note() {},
      };
    }

    async function chargeOf({ payments }: Replica, call: PricedCall): Promise<Charge> {
      const checked = await payments.check(call);
      if (checked.kind !== "charge") throw new Error(`${checked.kind} instead of a charge`);
      return checked.charge;
    }

    /** Everything up to the record, as admission does it. */
    async function recorded(at: Replica, call: PricedCall) {
      const charge = await chargeOf(at, call);
      const { tenant, agent_id } = call;
      const one = accepted(clock.now(), { tenant, agent_id, ...paidColumns(charge) });
      const payment = at.payments.paymentRow(charge, one.row, null);
      await store.write(async (tx) => {
        await accept(tx, one);
        await insertPayment(tx, payment);
      });
      return { payment, key: { tenant, id: one.row.id } };
    }

    const shown = async ({ tenant, id }: { tenant: string; id: string }): Promise<unknown[]> => {
      const row = await findInvocation(store.read, tenant, id);
      return [row.status, row.error_class, row.settlement_status];
    };
    const total = (tenant: string, status: NonNullable<InvocationRow["settlement_status"]>) =>
      counted(store.read, tenant, "settlement", status);
    const kindOf = (work: Promise<unknown>) =>
      work.then(
        () => "done",
        (error: unknown) => (error instanceof Fault ? error.kind : String(error)),
      );

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
      await until(async () => (await paymentOf(store.read, tenant, key.id))?.unknown_since !== null);
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
      const take = () => store.write((tx) => claim(tx, { key, owner: "rep", token: "t", now: 0, inHand: null }));
      expect(await take()).toBeNull();
      await at.payments.settle(payment);
      expect(at.told).toEqual([`paid ${payment.agent_id}`]);
      expect(await paymentOf(store.read, tenant, key.id)).toMatchObject({
        settle_request: null,
        next_attempt_at: null,
        attempts: 1,
      });
      const { settlement } = await findInvocation(store.read, tenant, key.id);
      expect(JSON.parse(settlement ?? "")).toMatchObject({
        settled_amount: "1000",
        operator_amount: "900",
        facilitator_fee: "100",
      });
      expect(await take()).not.toBeNull();
      await store.write((tx) => abandon(tx, key, "internal", clock.now()));
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
      await until(async () => (await paymentOf(store.read, tenant, key.id))?.next_attempt_at !== null);
      expect(await shown(key)).toEqual(["pending", null, "pending"]);
      clock.time += 70_000;
      await until(() => at.told.length > 0);
      expect(at.told).toEqual([`ended ${key.id}`]);
      expect(await shown(key)).toEqual(["failed", null, "settlement_failed"]);
      expect(await kindOf(at.payments.recall(tenant, key.id))).toBe("payment_required");
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
      await until(async () => (await findInvocation(store.read, tenant, key.id)).settlement === '{"attempts":2}');
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
      await store.write(({ db, tables: { payments: t } }) =>
        db.update(t).set({ asked_ms: DAY_MS }).where(eq(t.invocation_id, key.id)),
      );
      clock.time += 120_000;
      await until(() => at.told.length > 0);
      expect(await shown(key)).toEqual(["failed", null, "settlement_failed"]);
      const { settlement } = await findInvocation(store.read, tenant, key.id);
      expect(JSON.parse(settlement ?? "")).toEqual({ attempts: 3, reason: "unknown" });
      await at.settler.stop(0);
    });

    /** As a process leaves it that dies with the first attempt under way. */
    async function forsaken(tenant: string, fields: { readonly sent_at?: number }) {
      const { key } = await recorded(
        replica(() => COLLECTED),
        await priced(tenant),
      );
      await store.write(({ db, tables: { payments: t } }) =>
        db
          .update(t)
          .set({ attempts: 1, ...fields })
          .where(eq(t.invocation_id, key.id)),
      );
      if (store.dialect === "postgres") clock.time += LEASE_MS;
      return key;
    }

    test("a payment that a process may have sent before it ended is taken up, and counts as unknown", async () => {
      const tenant = await configured();
      const key = await forsaken(tenant, { sent_at: clock.now() });
      const at = replica(() => DECLINED);
      await at.settler.recover();
      at.settler.start();
      await until(() => at.attempts() === 1);
      await until(async () => (await paymentOf(store.read, tenant, key.id))?.unknown_since !== null);
      expect(await shown(key)).toEqual(["pending", null, "pending"]);
      expect((await paymentOf(store.read, tenant, key.id))?.attempts).toBe(2);
      await at.settler.stop(0);
    });

    test("a payment that a process had not sent before it ended is taken up as if for the first attempt", async () => {
      const tenant = await configured();
      const key = await forsaken(tenant, {});
      const at = replica(() => DECLINED);
      await at.settler.recover();
      at.settler.start();
      await until(() => at.told.length > 0);
      expect(await shown(key)).toEqual(["failed", null, "settlement_failed"]);
      await at.settler.stop(0);
    });

    test("two replicas never try one payment at the same time", async () => {
      const [tenant, first] = [await configured(), replica(() => UNKNOWN)];
      for (let made = 0; made < 8; made++) {
        const { payment } = await recorded(first, await priced(tenant));
        await first.payments.settle(payment);
      }
      const asked: string[] = [];
      const client: SettlerOptions["client"] = {
        async settle(attempt) {
          if (attempt.tenant !== tenant) return UNKNOWN;
          asked.push(attempt.settle_request);
          await Bun.sleep(300);
          return COLLECTED;
        },
      };
      const [one, two] = [replica(() => UNKNOWN, { client }), replica(() => UNKNOWN, { client })];
      clock.time += 2_000;
      one.settler.start();
      two.settler.start();
      await until(async () => (await total(tenant, "settled")) === 8);
      expect([asked.length, new Set(asked).size]).toEqual([8, 8]);
      await Promise.all([one.settler.stop(0), two.settler.stop(0)]);
    });

    test("tenants get their turns, whatever order the database has for their names", async () => {
      for (const [last, next] of [
        ["Zeta", "acme"],
        ["\u{10000}", "\ue000"],
      ] as const) {
        await store.write((tx) => tx.db.delete(tx.tables.payments));
        const asked: string[] = [];
        const at = replica(() => UNKNOWN, {
          client: {
            async settle({ tenant }) {
              asked.push(tenant);
              return UNKNOWN;
            },
          },
        });
        at.settler.start();
        for (const stem of [last, next]) {
          const tenant = await configured(`${stem}-${crypto.randomUUID()}`);
          await at.settler.attempt((await recorded(at, await priced(tenant))).payment as never);
          clock.time += 2_000;
          await until(() => asked.filter((name) => name === tenant).length >= 2);
        }
        await at.settler.stop(0);
      }
    });

    test("an attempt that another replica has overtaken refuses nothing, and may collect", async () => {
      const tenant = await configured();
      for (const [outcome, expected] of [
        [DECLINED, "pending"],
        [COLLECTED, "settled"],
      ] as const) {
        const at = replica(async () => {
          await store.write((tx) => tx.db.update(tx.tables.payments).set({ attempts: 2 }));
          return outcome;
        });
        const { payment, key } = await recorded(at, await priced(tenant));
        await at.settler.attempt(payment as never);
        expect((await shown(key))[2]).toBe(expected);
      }
    });

    test("a store that is away for a moment loses no outcome", async () => {
      const tenant = await configured();
      let refusals = 3;
      const flaky: Store = {
        ...store,
        write: (work) => (refusals-- > 0 ? Promise.reject(new Fault("unavailable", "away")) : store.write(work)),
      };
      const at = replica(() => COLLECTED, { store: flaky });
      const { payment, key } = await recorded(at, await priced(tenant));
      expect(Object.keys(await at.payments.settle(payment))).toEqual(["x-payment-response"]);
      expect((await shown(key))[2]).toBe("settled");
    });

    test("an outcome that is stored without an answer is told all the same", async () => {
      const tenant = await configured();
      for (const [outcome, expected] of [
        [COLLECTED, "settled"],
        [DECLINED, "settlement_failed"],
      ] as const) {
        let writes = 0;
        const losing: Store = {
          ...store,
          async write(work) {
            const value = await store.write(work);
            writes++;
            if (writes === 1) throw new CommitUnknown(new Error("connection lost"));
            return value;
          },
        };
        const at = replica(() => outcome, { store: losing });
        const { payment, key } = await recorded(at, await priced(tenant));
        await at.settler.attempt(payment as never);
        expect((await shown(key))[2]).toBe(expected);
        expect(at.told).toEqual([outcome === COLLECTED ? `paid ${payment.agent_id}` : `ended ${key.id}`]);
      }
    });

    test("a store that stays away holds up no caller for long, and still loses no outcome", async () => {
      const tenant = await configured();
      let isAway = true;
      const flaky: Store = {
        ...store,
        write: (work) => (isAway ? Promise.reject(new Fault("unavailable", "away")) : store.write(work)),
      };
      const at = replica(() => COLLECTED, { store: flaky });
      const { payment, key } = await recorded(at, await priced(tenant));
      const twin = at.payments.settle(payment);
      expect(await Promise.all([twin, at.payments.recall(tenant, key.id)])).toEqual([{}, {}]);
      // It has stayed away until now.
      isAway = false;
      await until(async () => (await shown(key))[2] === "settled");
      expect([at.attempts(), at.told]).toEqual([1, [`paid ${payment.agent_id}`]]);
    });

    test("a tenant with too many payments under way is put off, and uses up none", async () => {
      const silence = Promise.withResolvers<SettleOutcome>();
      const at = replica(() => silence.promise);
      const [tenant, other] = [await configured(), await configured()];
      const { payment } = await recorded(at, await priced(tenant));
      const flights = Array.from({ length: 3584 }, (_, n) =>
        at.settler.attempt({ ...payment, invocation_id: `inv_${n}` } as never),
      );
      const call = await priced(tenant);
      expect(await kindOf(at.payments.check(call))).toBe("unavailable");
      expect(await kindOf(at.payments.check(await priced(other)))).toBe("done");
      silence.reject(new Error("over"));
      await Promise.all(flights);
      expect((await at.payments.check(call)).kind).toBe("charge");
    });

    test("stopping with time left tells whoever waits what came of the attempt", async () => {
      const gate = Promise.withResolvers<SettleOutcome>();
      const [tenant, at] = [await configured(), replica(() => gate.promise)];
      const { payment, key } = await recorded(at, await priced(tenant));
      const settled = at.payments.settle(payment);
      const told = at.payments.recall(tenant, key.id);
      const stopped = at.settler.stop(5_000);
      gate.resolve(COLLECTED);
      expect(Object.keys(await told)).toEqual(["x-payment-response"]);
      await Promise.all([settled, stopped]);
    });

    test("stopping breaks off what is under way, and leaves it open", async () => {
      const tenant = await configured();
      const asked = Promise.withResolvers<void>();
      const at = replica(() => UNKNOWN, {
        client: {
          settle(_, stop) {
            asked.resolve();
            return new Promise((resolve) => {
              stop.addEventListener("abort", () => resolve(UNKNOWN));
            });
          },
        },
      });
      const { payment, key } = await recorded(at, await priced(tenant));
      const told = at.payments.settle(payment);
      await asked.promise;
      await at.settler.stop(20);
      expect(await told).toEqual({});
      expect(await shown(key)).toEqual(["pending", null, "pending"]);
      expect((await paymentOf(store.read, tenant, key.id))?.next_attempt_at).not.toBeNull();
    });

    test("a record goes with its payment, but not while that is open or could come again", async () => {
      const tenant = await configured();
      const keep = replica(() => UNKNOWN);
      const open = await recorded(keep, await priced(tenant));
      await keep.payments.settle(open.payment);
      await store.write((tx) => abandon(tx, open.key, "cancelled", clock.now()));
      const at = replica(() => COLLECTED);
      const [short, long] = [await recorded(at, await priced(tenant)), await recorded(at, await priced(tenant))];
      const later = Math.floor(clock.now() / 1000) + 400 * 86_400;
      await store.write(({ db, tables: { payments: t } }) =>
        db.update(t).set({ valid_before: later }).where(eq(t.invocation_id, long.key.id)),
      );
      for (const { payment, key } of [short, long]) {
        await at.payments.settle(payment);
        await store.write((tx) => abandon(tx, key, "cancelled", clock.now()));
      }
      const retention = { body_days: 0, history_days: 30 };
      await cleanUp(store, { now: () => clock.time + 31 * DAY_MS }, retention, silentLog);
      const kept = ({ tenant: owner, id }: { tenant: string; id: string }) =>
        kindOf(findInvocation(store.read, owner, id));
      expect(await Promise.all([open.key, short.key, long.key].map(kept))).toEqual(["done", "not_found", "done"]);
      expect(await paymentOf(store.read, tenant, short.key.id)).toBeNull();
      expect(await paymentOf(store.read, tenant, long.key.id)).not.toBeNull();
    });
  });
}
