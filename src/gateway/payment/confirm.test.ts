// A collected payment until it is final: asked about once more, whatever happens meanwhile to its call or to those who ask.
import { describe, expect, test } from "bun:test";
import { and, eq } from "drizzle-orm";
import { SUCCESS } from "../../../test/support/stores/invocations.ts";
import { DECLINED, databases, UNKNOWN, usePayments } from "../../../test/support/stores/settlements.ts";
import { until } from "../../../test/support/until.ts";
import { claim, finish, type InvocationKey } from "../invocations/service.ts";
import { settlementsOfCredential } from "./config.ts";
import type { SettleOutcome } from "./outcome.ts";
import { makeDue, paymentOf } from "./store.ts";

const FINAL_MS = 24_000;
const HASH = `0x${"cd".repeat(32)}` as const;
const FIRST = { kind: "collected" as const, transaction: HASH, fee: 100n, finalInMs: FINAL_MS } satisfies SettleOutcome;
const LAST = { ...FIRST, transaction: `0x${"ab".repeat(32)}` } satisfies SettleOutcome;
const MOVED = { ...FIRST, transaction: `0x${"ef".repeat(32)}` } satisfies SettleOutcome;

for (const [name, databaseUrl] of Object.entries(databases)) {
  describe(`on ${name}`, () => {
    const { clock, store, replica, configured, priced, recorded } = usePayments(databaseUrl);

    type Answers = Parameters<typeof replica>[0];

    /** A call whose payment has been collected, and is not final yet. */
    async function collected(then: Answers, changes: Parameters<typeof replica>[1] = {}) {
      const at = replica((attempt) => (attempt === 1 ? FIRST : then(attempt)), changes);
      const { payment, key } = await recorded(at, await priced(await configured(), 600));
      await store().write(({ db, tables: { openInvocations: t } }) =>
        db.update(t).set({ outbox: "receipt" }).where(eq(t.id, key.id)),
      );
      await at.payments.settle(payment);
      return { at, key };
    }

    async function end(key: InvocationKey): Promise<void> {
      const token = crypto.randomUUID();
      await claim(store(), { key, owner: "rep_1", token, now: clock.now() });
      expect(await finish(store(), { key, token, request_id: "req" }, SUCCESS, clock.now())).toBe(true);
    }

    async function owed({ tenant, id }: InvocationKey): Promise<number> {
      const { db, tables } = store().read;
      const t = tables.outbox;
      return (
        await db
          .select()
          .from(t)
          .where(and(eq(t.tenant, tenant), eq(t.invocation_id, id)))
      ).length;
    }

    async function hashOf({ tenant, id }: InvocationKey): Promise<string> {
      const { db, tables } = store().read;
      const t = tables.invocations;
      const [row] = await db
        .select()
        .from(t)
        .where(and(eq(t.tenant, tenant), eq(t.id, id)));
      return JSON.parse(row?.settlement ?? "{}").tx_hash;
    }

    const isOver = async ({ tenant, id }: InvocationKey) =>
      (await paymentOf(store().read, { tenant, id }))?.next_attempt_at === null;

    for (const [what, order] of Object.entries({
      "that has ended before": ["end", "confirm"],
      "that ends afterwards": ["confirm", "end"],
    })) {
      test(`it is final with the transaction that the last answer names, and a call ${what} is owed its receipt once`, async () => {
        const { at, key } = await collected(() => MOVED);
        at.settler.start();
        for (const step of order) {
          expect(await owed(key)).toBe(0);
          if (step === "end") await end(key);
          else {
            clock.time += FINAL_MS + 1;
            await until(() => isOver(key));
            expect(await hashOf(key)).toBe(MOVED.transaction);
          }
        }
        expect([await owed(key), at.attempts()]).toEqual([1, 2]);
        clock.time += 10 * FINAL_MS;
        await at.settler.stop(0);
        expect([await owed(key), at.attempts()]).toEqual([1, 2]);
      });
    }

    test.each<[string, SettleOutcome]>([
      ["nobody says more", UNKNOWN],
      ["its facilitator refuses the account", { kind: "declined", definite: false, why: "answered 403" }],
      ["its facilitator says that it was used", { kind: "declined", definite: true, mayHaveLanded: true, why: "" }],
    ])("it is final when for two minutes %s, and what is known of it stays", async (_what, answer) => {
      const { at, key } = await collected(() => answer);
      await end(key);
      at.settler.start();
      clock.time += FINAL_MS + 1;
      await until(() => at.attempts() >= 2);
      expect([await isOver(key), await owed(key)]).toEqual([false, 0]);
      clock.time += 120_000;
      await until(() => {
        clock.time += 1_000;
        return isOver(key);
      });
      expect([await hashOf(key), await owed(key)]).toEqual([HASH, 1]);
      await at.settler.stop(0);
    });

    test("it is looked at once for one who asks for the receipt of an ended call, and for nobody before; and again when it is final", async () => {
      const { at, key } = await collected((attempt) => (attempt === 2 ? MOVED : LAST));
      expect([await at.settler.confirm(key.tenant, key.id), await at.settler.confirm(key.tenant, null)]).toEqual([
        false,
        false,
      ]);
      await end(key);
      expect(await at.settler.confirm("another", key.id)).toBe(false);
      expect(await at.settler.confirm(key.tenant, key.id)).toBe(true);
      const known = async () => [await isOver(key), await hashOf(key), await owed(key), at.attempts()];
      expect(await known()).toEqual([false, MOVED.transaction, 1, 2]);
      expect(await at.settler.confirm(key.tenant, null)).toBe(false);
      at.settler.start();
      clock.time += FINAL_MS + 1;
      await until(() => isOver(key));
      expect(await known()).toEqual([true, LAST.transaction, 1, 3]);
      await at.settler.stop(0);
    });

    test("one whose call has ended is found among many whose calls have not", async () => {
      const { at, key } = await collected(() => LAST);
      await end(key);
      const row = await paymentOf(store().read, key);
      if (row === null) throw new Error("it is not there");
      const others = Array.from(
        { length: 150 },
        (_, n) => ({ ...row, nonce: `0x${n}`, invocation_id: `inv_0${n}` }) as const,
      );
      await store().write(({ db, tables: { payments: t } }) => db.insert(t).values(others));
      expect(await at.settler.confirm(key.tenant, null)).toBe(true);
      expect([await isOver(key), await hashOf(key), at.attempts()]).toEqual([false, LAST.transaction, 2]);
      await store().write(({ db, tables: { payments: t } }) => db.delete(t).where(eq(t.tenant, key.tenant)));
    });

    test("a restart before it is final makes it no more final", async () => {
      const { at, key } = await collected((attempt) => (attempt === 2 ? MOVED : LAST));
      await end(key);
      await makeDue(store(), clock.now(), clock.now());
      at.settler.start();
      await until(() => at.attempts() >= 2);
      await at.settler.stop(0);
      expect([await isOver(key), await hashOf(key)]).toEqual([false, MOVED.transaction]);
      const next = replica(() => LAST);
      next.settler.start();
      clock.time += FINAL_MS + 1;
      await until(() => isOver(key));
      expect([await hashOf(key), await owed(key)]).toEqual([LAST.transaction, 1]);
      await next.settler.stop(0);
    });

    for (const order of [
      ["end", "confirm"],
      ["confirm", "end"],
    ] as const) {
      test(`no receipt says that it was collected once it can't be any more (${order.join(", then ")})`, async () => {
        const { at, key } = await collected(() => DECLINED);
        at.settler.start();
        for (const step of order) {
          if (step === "end") await end(key);
          else {
            clock.time += FINAL_MS + 1;
            await until(() => isOver(key));
          }
        }
        expect([await isOver(key), await hashOf(key), await owed(key)]).toEqual([true, HASH, 0]);
        await at.settler.stop(0);
      });
    }

    test("while nodes can't tell yet, no receipt says that it was collected before its authorization is over", async () => {
      let seen: SettleOutcome | null = null;
      let looks = 0;
      const { at, key } = await collected(() => UNKNOWN, { look: async () => (++looks > 0 ? seen : null) });
      await end(key);
      at.settler.start();
      clock.time += FINAL_MS + 1;
      await until(() => looks > 0);
      clock.time += 200_000;
      const before = looks;
      await until(() => {
        clock.time += 1_000;
        return looks > before;
      });
      expect([await isOver(key), await owed(key)]).toEqual([false, 0]);
      seen = DECLINED;
      await until(() => {
        clock.time += 1_000;
        return isOver(key);
      });
      expect([await hashOf(key), await owed(key)]).toEqual([HASH, 0]);
      await at.settler.stop(0);
    });

    test("two replicas that ask at the same time owe its receipt once", async () => {
      const asked = Promise.withResolvers<SettleOutcome>();
      const { at, key } = await collected(() => asked.promise);
      await end(key);
      const other = replica(() => asked.promise);
      const asking = [at, other].map(({ settler }) => settler.confirm(key.tenant, null));
      await until(() => at.attempts() + other.attempts() >= 2);
      asked.resolve(MOVED);
      await Promise.all(asking);
      expect([await isOver(key), await hashOf(key), await owed(key)]).toEqual([false, MOVED.transaction, 1]);
    });

    test("it keeps no credential of its facilitator from being deleted", async () => {
      const { key } = await collected(() => UNKNOWN);
      await store().write(({ db, tables: { settlementConfigs: t } }) => db.delete(t).where(eq(t.tenant, key.tenant)));
      const of = { tenant: key.tenant, credentialId: "cred_x" };
      expect(await settlementsOfCredential(store().read, of, "", 1)).toEqual([]);
    });
  });
}
