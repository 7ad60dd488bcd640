import { describe, expect, test } from "bun:test";
import { eq } from "drizzle-orm";
import {
  COLLECTED,
  DECLINED,
  databases,
  LEASE_MS,
  UNKNOWN,
  usePayments,
} from "../../../test/support/stores/settlements.ts";
import { until } from "../../../test/support/until.ts";
import { Fault } from "../../core/fault.ts";
import { CommitUnknown, type Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import type { SettleOutcome } from "./outcome.ts";
import { createSettlementLimits, type SettlerOptions } from "./settler.ts";
import {
  facilitatorsWithOpen,
  markSending,
  type OpenPayment,
  type PaymentRow,
  paymentOf,
  tenantsWithOpen,
} from "./store.ts";

/** As a facilitator that got the payment and answered nothing. */
const SILENT: SettleOutcome = { kind: "unknown", why: "", isSilent: true };
/** As a facilitator that answers 403. */
const REFUSED: SettleOutcome = { kind: "declined", definite: false, why: "" };

for (const [name, databaseUrl] of Object.entries(databases)) {
  describe(`on ${name}`, () => {
    const { clock, store, replica, configured, priced, recorded, shown, total, kindOf } = usePayments(databaseUrl);

    /** As a process leaves it that dies with the first attempt under way. */
    async function forsaken(tenant: string, fields: { readonly sent_at?: number }) {
      const { key } = await recorded(
        replica(() => COLLECTED),
        await priced(tenant),
      );
      await store().write(({ db, tables: { payments: t } }) =>
        db
          .update(t)
          .set({ attempts: 1, ...fields })
          .where(eq(t.invocation_id, key.id)),
      );
      if (store().isShared) clock.time += LEASE_MS;
      return key;
    }

    /** An open payment of the tenant, and copies of it at other facilitators. */
    async function waiting(tenant: string, copies: readonly Partial<PaymentRow>[]) {
      const { key } = await recorded(
        replica(() => UNKNOWN),
        await priced(tenant),
      );
      const row = await paymentOf(store().read, key);
      if (row === null) throw new Error("it is not there");
      for (let n = 0; n < copies.length; n += 500) {
        const rows = copies.slice(n, n + 500).map((fields, i) => {
          const nonce: Hex = `0x${String(n + i).padStart(64, "0")}`;
          return { ...row, nonce, invocation_id: nonce, ...fields };
        });
        await store().write(({ db, tables: { payments: t } }) => db.insert(t).values(rows));
      }
      return key;
    }

    /** Due payments of so many tenants at a facilitator, and of one more, the last by name, at a quick one. */
    async function crowd(tenants: number, facilitator_url: string) {
      const next_attempt_at = clock.now() - 1_000;
      const shared = Array.from({ length: tenants * 120 }, (_, n) => ({
        tenant: `tenant ${n % tenants}`,
        facilitator_url,
        next_attempt_at,
      }));
      const quick = Array.from({ length: 3_000 }, () => ({
        facilitator_url: "https://quick.example",
        next_attempt_at,
      }));
      await waiting(await configured(`z-${crypto.randomUUID()}`), [...shared, ...quick]);
    }

    test("a payment is attempted however many of its tenant wait, due before and after it, at a silent facilitator", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      const tenant = await configured();
      const now = clock.now();
      const silent = Array.from({ length: 3_000 }, (_, n) => ({
        facilitator_url: "https://a.silent.test",
        next_attempt_at: now - n,
      }));
      const key = await waiting(tenant, silent);
      await store().write(({ db, tables: { payments: t } }) =>
        db
          .update(t)
          .set({ facilitator_url: "https://b.test", next_attempt_at: now - 1_500 })
          .where(eq(t.invocation_id, key.id)),
      );
      const asked: string[] = [];
      const silence = Promise.withResolvers<SettleOutcome>();
      const at = replica(() => UNKNOWN, {
        client: {
          settle({ facilitator_url }) {
            asked.push(facilitator_url);
            return facilitator_url === "https://b.test" ? Promise.resolve(COLLECTED) : silence.promise;
          },
        },
      });
      at.settler.start();
      await until(() => asked.includes("https://b.test"));
      silence.resolve(UNKNOWN);
      await at.settler.stop(0);
      await store().write((tx) => tx.db.delete(tx.tables.payments));
    });

    test("a payment is attempted however many other facilitators its tenant has", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      const tenant = await configured();
      const at = replica(() => COLLECTED);
      const later = Array.from({ length: 300 }, (_, n) => ({
        facilitator_url: `https://a${n}.test`,
        next_attempt_at: clock.now() + 10_000,
      }));
      const key = await waiting(tenant, later);
      await store().write(({ db, tables: { payments: t } }) =>
        db
          .update(t)
          .set({ facilitator_url: "https://b.test", next_attempt_at: clock.now() })
          .where(eq(t.invocation_id, key.id)),
      );
      at.settler.start();
      await until(async () => (await shown(key))[2] === "settled");
      await at.settler.stop(0);
      expect(at.attempts()).toBe(1);
      await store().write((tx) => tx.db.delete(tx.tables.payments));
    });

    test("what is due is looked for in turns of the event loop, one for each tenant", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      const tenants = Array.from({ length: 50 }, (_, n) => ({
        tenant: `tenant ${n}`,
        next_attempt_at: clock.now() + 10_000,
      }));
      await waiting(await configured("tenant"), tenants);
      let [turns, isOver] = [0, false];
      const turn = () => {
        turns++;
        if (!isOver) setImmediate(turn);
      };
      setImmediate(turn);
      const found: number[] = [];
      for await (const { tenant } of tenantsWithOpen(store().read, "tenant 3")) {
        found.push((await facilitatorsWithOpen(store().read, tenant, "", 4)).length);
      }
      isOver = true;
      expect([found.length, Math.max(...found)]).toEqual([51, 1]);
      expect(turns).toBeGreaterThanOrEqual(50);
      await store().write((tx) => tx.db.delete(tx.tables.payments));
    });

    test("a payment whose next attempt is later than any pause, as after the clock was set back, is made due at once", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      const at = replica(() => COLLECTED);
      const { key } = await recorded(at, await priced(await configured()));
      const day = clock.now() + 86_400_000;
      await store().write(({ db, tables: { payments: t } }) => db.update(t).set({ next_attempt_at: day }));
      at.settler.start();
      await until(async () => (await shown(key))[2] === "settled");
      await at.settler.stop(0);
    });

    test("a payment that a process may have sent before it ended is taken up, and counts as unknown", async () => {
      const tenant = await configured();
      const key = await forsaken(tenant, { sent_at: clock.now() });
      const at = replica(() => DECLINED);
      await at.settler.recover();
      at.settler.start();
      await until(() => at.attempts() === 1);
      await until(async () => (await paymentOf(store().read, { tenant, id: key.id }))?.unknown_since !== null);
      expect(await shown(key)).toEqual(["pending", null, "pending"]);
      expect((await paymentOf(store().read, { tenant, id: key.id }))?.attempts).toBe(2);
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
        await store().write((tx) => tx.db.delete(tx.tables.payments));
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
          await at.settler.attempt((await recorded(at, await priced(tenant))).payment);
          clock.time += 2_000;
          await until(() => asked.filter((name) => name === tenant).length >= 2);
        }
        await at.settler.stop(0);
      }
    });

    test("tenants take turns at a facilitator that lets attempts run out of time, and has few slots for that, whoever pays at another", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      const asked: string[] = [];
      const at = replica(() => UNKNOWN, {
        // Attempts at the shared facilitator take longer, and longer than a search for due payments.
        settleWaitMs: 150,
        client: {
          async settle({ tenant, facilitator_url }) {
            const isQuick = facilitator_url === "https://quick.example";
            if (!isQuick) asked.push(tenant);
            await Bun.sleep(isQuick ? 50 : 200);
            return isQuick ? UNKNOWN : SILENT;
          },
        },
      });
      await crowd(3, `https://shared.example/${"a".repeat(400)}`);
      at.settler.start();
      await until(() => asked.length > 40);
      asked.length = 0;
      await until(() => asked.length >= 18);
      await at.settler.stop(0);
      const counts = [0, 1, 2].map((n) => asked.filter((name) => name === `tenant ${n}`).length);
      expect(Math.min(...counts)).toBeGreaterThanOrEqual(4);
    });

    test("tenants take turns at a facilitator whose slots are all taken, whoever pays at another", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      const asked: string[] = [];
      const at = replica(() => UNKNOWN, {
        client: {
          async settle({ tenant, facilitator_url }) {
            if (facilitator_url === "https://shared.example") asked.push(tenant);
            await Bun.sleep(50);
            return UNKNOWN;
          },
        },
      });
      await crowd(12, "https://shared.example");
      at.settler.start();
      await until(() => asked.length >= 500);
      await at.settler.stop(0);
      expect(new Set(asked.slice(0, 500)).size).toBe(12);
    });

    test("a tenant whose own secrets store delays its payments takes no slots from others at the facilitator", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      let waitingHere = 0;
      const silence = Promise.withResolvers<SettleOutcome>();
      const slow = await configured();
      const at = replica(() => UNKNOWN, {
        settleWaitMs: 1,
        client: {
          async settle({ tenant }) {
            if (tenant !== slow) waitingHere++;
            else await Bun.sleep(20);
            return tenant === slow ? { kind: "unsent", why: "no answer in time" } : silence.promise;
          },
        },
      });
      const { payment } = await recorded(at, await priced(slow));
      await at.settler.attempt(payment);
      const { facilitator_url } = payment;
      const due = Array.from({ length: 9 }, () => ({ facilitator_url, next_attempt_at: clock.now() - 1_000 }));
      await waiting(await configured(), due);
      at.settler.start();
      await until(() => waitingHere === 9);
      silence.resolve(UNKNOWN);
      await at.settler.stop(0);
    });

    test("a facilitator that is silent holds up none of its tenant's payments at another one, however many wait for it", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      const tenant = await configured();
      const silent = Promise.withResolvers<SettleOutcome>();
      const asked: string[] = [];
      const at = replica(() => UNKNOWN, {
        client: {
          settle({ facilitator_url }) {
            asked.push(facilitator_url);
            return facilitator_url === "https://other.example" ? Promise.resolve(COLLECTED) : silent.promise;
          },
        },
      });
      const keys = [];
      for (let made = 0; made < 150; made++) keys.push((await recorded(at, await priced(tenant))).key);
      const last = keys.at(-1);
      if (last === undefined) throw new Error("no payment");
      await store().write(async (tx) => {
        const { payments: t } = tx.tables;
        await tx.db.update(t).set({ next_attempt_at: clock.now() - 1_000 });
        await tx.db
          .update(t)
          .set({ facilitator_url: "https://other.example", next_attempt_at: clock.now() })
          .where(eq(t.invocation_id, last.id));
      });
      at.settler.start();
      await until(() => asked.includes("https://other.example"));
      silent.resolve(COLLECTED);
      await at.settler.stop(0);
    });

    test("an attempt that was paused before it sent its payment makes the decline of a later one no final one", async () => {
      await store().write((tx) => tx.db.delete(tx.tables.payments));
      const tenant = await configured();
      const { key, payment } = await recorded(
        replica(() => UNKNOWN),
        await priced(tenant),
      );
      clock.time += LEASE_MS;
      let isLeased = false;
      // Another replica has read the payment and is about to lease it when the paused attempt goes on.
      const late: Store = {
        ...store(),
        async write(work) {
          if (!isLeased)
            expect(await store().write((tx) => markSending(tx, payment as OpenPayment, clock.now()))).toBe(true);
          isLeased = true;
          return store().write(work);
        },
      };
      const at = replica(() => REFUSED, { store: late });
      at.settler.start();
      await until(() => at.attempts() === 1);
      await at.settler.stop(5_000);
      expect(await shown(key)).toEqual(["pending", null, "pending"]);
      expect((await paymentOf(store().read, { tenant, id: key.id }))?.unknown_since).not.toBeNull();
    });

    test("an attempt that another replica has overtaken refuses nothing, and may collect", async () => {
      const tenant = await configured();
      for (const [outcome, expected] of [
        [DECLINED, "pending"],
        [COLLECTED, "settled"],
      ] as const) {
        const at = replica(async () => {
          await store().write((tx) => tx.db.update(tx.tables.payments).set({ attempts: 2 }));
          return outcome;
        });
        const { payment, key } = await recorded(at, await priced(tenant));
        await at.settler.attempt(payment);
        expect((await shown(key))[2]).toBe(expected);
      }
    });

    test("a store that is away for a moment loses no outcome", async () => {
      const tenant = await configured();
      let refusals = 3;
      const flaky: Store = {
        ...store(),
        write: (work) => (refusals-- > 0 ? Promise.reject(new Fault("unavailable", "away")) : store().write(work)),
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
          ...store(),
          async write(work) {
            const value = await store().write(work);
            writes++;
            if (writes === 1) throw new CommitUnknown(new Error("connection lost"));
            return value;
          },
        };
        const at = replica(() => outcome, { store: losing });
        const { payment, key } = await recorded(at, await priced(tenant));
        await at.settler.attempt(payment);
        expect((await shown(key))[2]).toBe(expected);
        expect(at.told).toEqual([outcome === COLLECTED ? `paid ${payment.agent_id}` : `ended ${key.id}`]);
      }
    });

    test("a store that stays away holds up no caller for long, and still loses no outcome", async () => {
      const tenant = await configured();
      let isAway = true;
      const flaky: Store = {
        ...store(),
        write: (work) => (isAway ? Promise.reject(new Fault("unavailable", "away")) : store().write(work)),
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
        at.settler.attempt({ ...payment, invocation_id: `inv_${n}` }),
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
      expect((await paymentOf(store().read, { tenant, id: key.id }))?.next_attempt_at).not.toBeNull();
    });
  });
}

const fill = (take: () => { release(): void } | null) => {
  const places: { release(): void }[] = [];
  for (let place = take(); place !== null; place = take()) places.push(place);
  return places;
};

describe("the limits of settlements", () => {
  test("put off a tenant with too many under way, and nobody else, until some have ended", () => {
    const room = createSettlementLimits();
    const places = fill(() => (room.isCrowded("t") ? null : room.enter("t")));
    expect(places.length).toBe(3584);
    expect(room.isCrowded("u")).toBe(false);
    places[0]?.release();
    expect(room.isCrowded("t")).toBe(false);
  });

  test("are shares by tenant in the background, bounded for a facilitator and in all, and come back", () => {
    const room = createSettlementLimits();
    let serial = 0;
    const own = fill(() => (serial < 200 ? room.take("a", `own-${++serial}`) : null));
    expect([own.length, room.ofTenant("a")]).toEqual([112, 0]);
    for (const place of own) place.release();
    const stuck = fill(() => room.take("b", "shared"));
    expect(stuck.length).toBe(28);
    const others = ["c", "d", "e"].map((tenant) => fill(() => room.take(tenant, "shared")).length);
    expect(Math.min(...others)).toBeGreaterThan(0);
    for (const place of stuck) place.release();
    expect(fill(() => room.take("c", "shared")).length).toBeGreaterThan(10);
    expect(room.take("b", "another")).not.toBeNull();
  });

  test("are few at a facilitator that lets attempts run out of time, until one ends in time", () => {
    const room = createSettlementLimits();
    room.learn("one", false);
    const few = fill(() => room.take("a", "one"));
    expect([few.length, fill(() => room.take("a", "two")).length]).toEqual([2, 28]);
    room.learn("one", true);
    expect(fill(() => room.take("b", "one")).length).toBeGreaterThan(20);
  });
});
