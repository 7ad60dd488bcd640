// What is too old goes, what must stay does, and the totals are those of the calls that there are at every moment.

import { expect, test } from "bun:test";
import { SQL } from "bun";
import type { Tables } from "../../db/schema.ts";
import { BASE } from "../../test/support/network.ts";
import { accepted, SUCCESS } from "../../test/support/stores/invocations.ts";
import { eachStore, type MakePlace } from "../../test/support/stores/one-store.ts";
import { type Place, postgresPlace } from "../../test/support/stores/stores.ts";
import { silentLog } from "../core/log.ts";
import { silentMeters } from "../core/meters.ts";
import { DAY_MS, HOUR_MS } from "../core/time.ts";
import { leaseJob } from "../storage/leases.ts";
import type { Store } from "../storage/store.ts";
import { joinTotals } from "../storage/totals.ts";
import { bodyPartsOf } from "../wire/body.ts";
import { findInvocation, readHistory } from "./invocations/history.ts";
import { findByIdempotencyKey } from "./invocations/idempotency.ts";
import { cleanUp } from "./invocations/retention.ts";
import { accept, claim, endOpen, finish, type InvocationKey, type InvocationRow } from "./invocations/service.ts";
import { attemptSettlement } from "./payment/attempt.ts";
import { removeCountedCallsOnLease } from "./retention.ts";

const RETENTION = { body_days: 30, history_days: 60 };
const LARGE = "x".repeat(700_000);
const START = Math.floor(Date.UTC(2026, 0, 10) / DAY_MS) * DAY_MS + DAY_MS / 2;
const ALL_TIME = "since=1970-01-01T00:00:00Z";

/** A gateway's tables as the days go by. */
async function openDays(makePlace: MakePlace) {
  const place: Place = await makePlace();
  const opened = await place.open();
  const clock = { time: START, now: () => clock.time };
  const store: Store = { ...opened, clock };
  const put = async (fields: Partial<InvocationRow> = {}, body?: string) => {
    const one = accepted(clock.time, fields, body);
    await accept(store, one);
    return { tenant: one.row.tenant, id: one.row.id };
  };
  const end = async (key: InvocationKey) => {
    await claim(store, { key, owner: "r", token: "t", now: clock.time });
    await finish(store, { key, token: "t", request_id: "q" }, SUCCESS, clock.time);
    return key;
  };
  const page = async (query: string, tenant = "acme") => {
    const { rows, total } = await readHistory(store.read, tenant, new URLSearchParams(`limit=100&${query}`));
    return { ids: rows.map(({ id }) => id), total };
  };
  return {
    store,
    clock,
    put,
    page,
    call: async (fields?: Partial<InvocationRow>) => end(await put(fields)),
    end,
    ids: async () => (await page("")).ids,
    /** Each total with the calls that are counted beside it. */
    async expectExact() {
      for (const query of ["", "status=succeeded", "status=pending", "status=failed", "agent_id=agt_a", "model=m"]) {
        const kept = await page(query);
        expect([query, kept]).toEqual([query, await page(`${query}&${ALL_TIME}`)]);
      }
    },
    clean: () => cleanUp(store, clock, RETENTION, silentLog),
    async bodies() {
      const { invocationBodies: t } = store.read.tables;
      const rows = await store.read.db.select({ id: t.invocation_id }).from(t);
      return rows.map(({ id }) => id).sort();
    },
    async [Symbol.asyncDispose]() {
      await opened.close();
      place.remove();
    },
  };
}

type PaymentRow = Tables["payments"]["$inferSelect"];
type Days = Awaited<ReturnType<typeof openDays>>;

const [STEP, CALLS] = [25 * DAY_MS, 3];

/** Calls at so many times, 25 days apart. */
async function live({ clock, call, store }: Days, steps: number) {
  const calls: { id: string; at: number }[] = [];
  for (let step = 0; step < steps; step++) {
    await joinTotals(store);
    for (let i = 0; i < CALLS; i++) {
      const { id } = await call({ model: i === 0 ? "m" : null });
      calls.push({ id, at: clock.time });
      clock.time += HOUR_MS;
    }
    clock.time += STEP - CALLS * HOUR_MS;
  }
  return calls;
}

const payment = (key: InvocationKey, isOpen: boolean): PaymentRow => ({
  chain_id: 1,
  token: "0x1",
  payer: "0x2",
  nonce: `0x${key.id}`,
  tenant: key.tenant,
  invocation_id: key.id,
  agent_id: "agt_a",
  caller: "alice",
  body_sha256: "b",
  authorization_digest: "d",
  x402_version: 1,
  valid_before: 1,
  attempts: 1,
  unsent_attempts: 0,
  asked_ms: 0,
  created_at: 1,
  updated_at: 1,
  facilitator_url: null,
  facilitator_credential_ref: null,
  call_credential_ref: null,
  unknown_since: null,
  sent_at: null,
  next_attempt_at: isOpen ? 1 : null,
  final_at: null,
  settle_request: isOpen ? "{}" : null,
});

eachStore((makePlace, dialect) => {
  test("calls and bodies go by their age, and no younger ones", async () => {
    await using days = await openDays(makePlace);
    const calls = await live(days, 4);
    const { clock, clean, ids, bodies, expectExact } = days;
    await clean();
    const youngerThan = (life: number) =>
      calls.filter(({ at }) => at >= clock.time - life * DAY_MS).map(({ id }) => id);
    expect((await ids()).toSorted()).toEqual(youngerThan(RETENTION.history_days));
    expect(await bodies()).toEqual(youngerThan(RETENTION.body_days));
    expect((await bodies()).length).toBeLessThan((await ids()).length);
    expect((await ids()).length).toBeLessThan(calls.length);
    await expectExact();
    clock.time += 100 * DAY_MS;
    await clean();
    expect([await ids(), await bodies()]).toEqual([[], []]);
    await expectExact();
  });

  test("what must outlive its time does, until it need not any more", async () => {
    await using days = await openDays(makePlace);
    const { store, clock, put, call, end, clean, ids, expectExact } = days;
    const [gone, unpaid, paid, owed] = [
      await call(),
      await call({ payment_nonce: "n1" }),
      await call({ payment_nonce: "n2" }),
      await call({ outbox: "receipt" }),
    ];
    await store.write(async ({ db, tables: { payments: t } }) => {
      await db.insert(t).values(payment(unpaid, true));
      await db.insert(t).values(payment(paid, false));
    });
    const open = await put({ model: "m", payment_nonce: "n3" }, LARGE);
    // Its caller may come back for it, and its credential can't be deleted.
    await store.write(({ db, tables: { payments: t } }) => db.insert(t).values(payment(open, false)));
    clock.time += 100 * DAY_MS;
    const young = await call();
    await clean();
    expect(await ids()).toEqual([young, open, owed, unpaid].map(({ id }) => id));
    await expectExact();
    const { payments: p, outbox: due } = store.read.tables;
    const payments = await store.read.db.select({ id: p.invocation_id }).from(p);
    expect(payments.map(({ id }) => id).sort()).toEqual([unpaid.id, open.id].sort());

    const taken = await claim(store, { key: open, owner: "r", token: "t", now: clock.time });
    expect(Buffer.concat(bodyPartsOf(taken?.body ?? new Uint8Array())).toString()).toBe(LARGE);
    await finish(store, { key: open, token: "t", request_id: "q" }, SUCCESS, clock.time);
    await expectExact();
    await store.write(async ({ db }) => {
      await db.update(p).set({ next_attempt_at: null, settle_request: null });
      await db.delete(due);
    });
    clock.time += HOUR_MS;
    await clean();
    expect(await ids()).toEqual([young.id]);
    await expectExact();
    expect(gone.id < open.id).toBe(true);
    await end(young);
  });

  test("a payment that turns out while calls as old as its own go is told by its call", async () => {
    await using days = await openDays(makePlace);
    const { store, clock, put, clean } = days;
    const key = await put({ payment_nonce: "n", settlement_status: "pending" });
    const authorization = { value: "1", validAfter: "0", validBefore: "1" };
    const open = {
      ...payment(key, true),
      facilitator_url: "https://f",
      facilitator_credential_ref: "cred",
      settle_request: JSON.stringify({ paymentPayload: { payload: { authorization } } }),
    };
    await store.write(({ db, tables: { payments: t } }) => db.insert(t).values(open));
    await endOpen(store, key, "cancelled", clock.time);
    clock.time += 100 * DAY_MS;
    let isCleaned = false;
    const write: Store["write"] = (work) =>
      store.write(async (tx) => {
        // From here on it sees what was there before, where the isolation says so.
        await tx.db.select().from(tx.tables.payments);
        if (!isCleaned && dialect === "postgres") await clean();
        isCleaned = true;
        return work(tx);
      });
    const client = { settle: async () => ({ kind: "collected", transaction: "0x1", fee: null }) as const };
    const tools = {
      network: BASE,
      clock,
      time: { earliest: clock.now },
      log: silentLog,
      meters: silentMeters,
      client,
      paid() {},
    };
    await attemptSettlement({ ...tools, store: { ...store, write } }, open, new AbortController().signal);
    const row = await findInvocation(store.read, key.tenant, key.id);
    expect(row.settlement_status).toBe("settled_upstream_failed");
  });

  test("totals are exact at every moment, while two replicas clean up and calls begin, end late and are given up", async () => {
    await using days = await openDays(makePlace);
    const { store, clock, put, call, end, clean, expectExact } = days;
    const late = await Promise.all(Array.from({ length: 30 }, () => put({ model: "m" })));
    await live(days, 3);
    const works = late.map((key, i) => async () => {
      if (i % 3 === 0) await store.write((tx) => endOpen(tx, key, "cancelled", clock.time));
      else if (i % 3 === 1) await end(key);
      await call({ model: "m" });
    });
    const again = async () => {
      for (const work of works) await work();
    };
    await Promise.all([clean(), clean(), again(), joinTotals(store), clean()]);
    await clean();
    await joinTotals(store);
    await expectExact();
    for (const [i, key] of late.entries()) if (i % 3 === 2) await end(key);
    await clean();
    await expectExact();
    expect((await days.page("status=pending")).total).toBe(0);
  });

  test("of several replicas one has the lease of a job", async () => {
    await using days = await openDays(makePlace);
    const leases = () => Promise.all([1, 2, 3].map(() => leaseJob(days.store, "job", HOUR_MS)));
    expect((await leases()).filter(Boolean)).toHaveLength(1);
    expect((await leases()).filter(Boolean)).toHaveLength(0);
    days.clock.time += HOUR_MS;
    expect((await leases()).filter(Boolean)).toHaveLength(1);
  });

  test("a key stands for its call after a clock that was ahead is put right and the process has begun anew", async () => {
    const place = await makePlace();
    const store = await place.open();
    const first = { ...accepted(START), idempotency: { key: "k", body_sha256: "s", asked_at: 0, latest: 0 } };
    const ahead = START + 10 * DAY_MS;
    await accept(store, { ...first, idempotency: { ...first.idempotency, asked_at: ahead, latest: ahead } });
    const later = { key: "k", body_sha256: "s", asked_at: START + HOUR_MS, latest: START + HOUR_MS };
    expect(await findByIdempotencyKey(store, first.row, later)).toBe(first.row.id);
    await store.close();
    place.remove();
  });

  test("a key is one call's for replicas whose clocks differ, and goes when it has expired", async () => {
    const place = await makePlace();
    const stores = [await place.open(), await place.open()];
    for (const apart of [0, 1, 500, DAY_MS - 1]) {
      const at = [START, START + apart];
      const answers = await Promise.all(
        Array.from({ length: 12 }, (_, i) => {
          const time = at[i % 2] ?? 0;
          const idempotency = { key: `k${apart}`, body_sha256: "s", asked_at: time, latest: time + (i % 3) };
          return accept(stores[i % stores.length] as Store, { ...accepted(time), idempotency });
        }),
      );
      expect(new Set(answers).size).toBe(1);
    }
    const store = stores[0] as Store;
    const { invocations: calls, idempotencyKeys: t } = store.read.tables;
    expect(await store.read.db.select({ id: calls.id }).from(calls)).toHaveLength(4);
    const many = async () => (await store.read.db.select({ key: t.key }).from(t)).length;
    expect(await many()).toBeGreaterThan(0);
    const clean = (now: number) => cleanUp(store, { now: () => now }, { body_days: 0, history_days: 0 }, silentLog);
    await clean(START + DAY_MS);
    expect(await many()).toBe(4);
    await clean(START + 2 * DAY_MS + 2 * HOUR_MS);
    expect(await many()).toBe(0);
    for (const each of stores) await each.close();
    place.remove();
  });
});

test("what replicas have counted of callers is removed by one of them, and by no other for a while", async () => {
  const place = await postgresPlace();
  const [store, other] = [await place.open(), await place.open()];
  await using client = new SQL(place.url, { max: 1 });
  const put = () => client`insert into caller_calls values ('acme', 'agt_1', 'alice', 1, 1)`;
  const left = async () => (await client`select at from caller_calls`).length;
  await put();
  expect(await removeCountedCallsOnLease(store)).toBe(true);
  expect(await left()).toBe(0);
  await put();
  expect([await removeCountedCallsOnLease(other), await removeCountedCallsOnLease(store)]).toEqual([false, false]);
  expect(await left()).toBe(1);
  await client`update job_leases set next_at = 0 where job = 'caller calls'`;
  expect(await removeCountedCallsOnLease(other)).toBe(true);
  for (const one of [store, other]) await one.close();
});
