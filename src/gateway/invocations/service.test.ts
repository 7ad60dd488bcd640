import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { and, eq, sql } from "drizzle-orm";
import fc from "fast-check";
import type { CountDimension } from "../../../db/schema.ts";
import { accepted, counted, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { startPostgres } from "../../../test/support/stores/postgres.ts";
import { temporaryPlace } from "../../../test/support/temporary.ts";
import { silentLog } from "../../core/log.ts";
import { ERROR_CLASSES, INVOCATION_EVENTS, INVOCATION_STATUSES } from "../../core/states.ts";
import { renewProcess } from "../../storage/leases.ts";
import { openStore } from "../../storage/open.ts";
import type { Store } from "../../storage/store.ts";
import { joinTotals } from "../../storage/totals.ts";
import { endOrphans } from "../upstream/ownership.ts";
import { waitingAgents } from "./commands/queue.ts";
import { callHeaders, capturedBody, findInvocation, readHistory } from "./history.ts";
import { cleanUp } from "./retention.ts";
import {
  type AcceptedCall,
  accept,
  claim,
  type Ending,
  endOpen,
  finish,
  holdsClaim,
  type InvocationKey,
  type InvocationRow,
  release,
} from "./service.ts";

const DAY_MS = 86_400_000;
const clock = { time: 1_790_000_000_000, now: () => clock.time };

const opened: { store: Store; dir: string }[] = [];
const stores: Record<string, () => Promise<string | null>> = {
  sqlite: async () => null,
  postgres: async () => (await startPostgres()).freshDatabase(),
};

const FAILURE: Ending = { ...SUCCESS, status: "failed", error_class: "upstream_5xx", upstream_status: 502 };

const TAKER = { replica: "rep_1", now: 0 };

for (const [name, databaseUrl] of Object.entries(stores)) {
  describe(`on ${name}`, () => {
    let store: Store;
    beforeAll(async () => {
      const dir = mkdtempSync(join(temporaryPlace(), "tollgate-invocations-"));
      store = await openStore({ databaseUrl: await databaseUrl(), dataDir: dir, log: silentLog, clock });
      opened.push({ store, dir });
    });

    const renew = (id: string) => store.write((tx) => renewProcess(tx, { id, kind: "gateway" }));
    const put = (fields: Partial<InvocationRow> = {}, body?: string) => {
      const one = accepted(clock.now(), fields, body);
      return accept(store, one).then((id) => ({ tenant: one.row.tenant, id }));
    };
    const take = (key: InvocationKey, owner = "rep_1", token = "token") =>
      store.write((tx) => claim(tx, { key, owner, token, now: clock.now() }));
    const end = (key: InvocationKey, ending: Ending, token = "token") =>
      store.write((tx) => finish(tx, { key, token, request_id: "req" }, ending, clock.now()));

    test("the headers of an open call are its tenant's, and gone with its end", async () => {
      const key = await put();
      expect(await callHeaders(store.read, key)).toEqual([["content-type", "text/plain"]]);
      expect(await callHeaders(store.read, { ...key, tenant: "rival" })).toBeNull();
      await take(key);
      await end(key, SUCCESS);
      expect(await callHeaders(store.read, key)).toBeNull();
    });

    test("an accepted call is read back whole until it has been made, then its captured bodies are", async () => {
      const key = await put({}, "ü".repeat(3));
      expect((await take(key))?.call.headers).toEqual([["content-type", "text/plain"]]);
      expect(await end(key, SUCCESS)).toBe(true);
      const row = await findInvocation(store.read, "acme", key.id);
      expect(row).toMatchObject({
        status: "succeeded",
        upstream_status: 200,
        owner: null,
        completed_at: clock.time,
      });
      const request = await capturedBody(store.read, row, "request");
      const response = await capturedBody(store.read, row, "response");
      expect([request?.toString(), response?.toString()]).toEqual(["üüü", "world"]);
    });

    test("only the first MiB of a request stays when its call has ended, and nothing without capture", async () => {
      const body = "x".repeat(1024 * 1024 + 5);
      const key = await put({}, body);
      expect((await take(key))?.body.byteLength).toBe(body.length);
      const running = await findInvocation(store.read, "acme", key.id);
      expect((await capturedBody(store.read, running, "request"))?.byteLength).toBe(1024 * 1024);
      await end(key, SUCCESS);
      const row = await findInvocation(store.read, "acme", key.id);
      expect((await capturedBody(store.read, row, "request"))?.byteLength).toBe(1024 * 1024);

      const other = await put({ body_captured: false });
      await take(other);
      await end(other, { ...SUCCESS, response: null });
      const bodies = store.read.tables.invocationBodies;
      const left = await store.read.db.select({ id: bodies.invocation_id }).from(bodies);
      expect(left.map(({ id }) => id)).not.toContain(other.id);
    });

    test("a call is claimed once, and an event from another state changes nothing", async () => {
      const key = await put();
      expect(await end(key, SUCCESS)).toBe(false);
      const tokens = ["one", "two", "three"];
      const claims = await Promise.all(tokens.map((token) => take(key, "rep_1", token)));
      const winner = claims.findIndex((claimed) => claimed !== null);
      expect(claims.filter((claimed) => claimed !== null)).toHaveLength(1);
      expect(await end(key, FAILURE, tokens[winner])).toBe(true);
      expect(await end(key, SUCCESS)).toBe(false);
      expect(await take(key)).toBeNull();
      expect(await store.write((tx) => endOpen(tx, key, "cancelled", clock.now()))).toBe(false);
      expect((await findInvocation(store.read, "acme", key.id)).error_class).toBe("upstream_5xx");
    });

    test("a claim that is repeated because its answer was lost finds its own call, and no other's", async () => {
      const key = await put();
      await take(key, "rep_1", "one");
      // Of the same replica too: another request for the same call has a claim of its own.
      expect(await take(key, "rep_1", "two")).toBeNull();
      expect((await take(key, "rep_1", "one"))?.body.byteLength).toBe(5);
      expect(await end(key, SUCCESS, "two")).toBe(false);
      expect(await end(key, SUCCESS, "one")).toBe(true);
      expect(await take(key, "rep_1", "one")).toBeNull();
    });

    test("a claim that is given back leaves the call as it was, and only the call that it claimed", async () => {
      const key = await put();
      const giveBack = (token: string) => store.write((tx) => release(tx, key, token, clock.now()));
      await take(key, "rep_1", "one");
      expect(await holdsClaim(store.read, key, "one")).toBe(true);
      expect(await holdsClaim(store.read, key, "two")).toBe(false);
      await giveBack("two");
      expect((await findInvocation(store.read, "acme", key.id)).status).toBe("running");
      await giveBack("one");
      const row = await findInvocation(store.read, "acme", key.id);
      expect(row).toMatchObject({ status: "pending", owner: null, claim: null });
      expect(await take(key, "rep_1", "three")).not.toBeNull();
      await end(key, SUCCESS, "three");
    });

    test("a call that its replica gives back while it is taken for dead, and that another one claims, is not ended", async () => {
      const key = await put();
      await take(key, "rep_dead", "one");
      const moving: Store = {
        ...store,
        async write(work, options) {
          const found = await store.write(work, options);
          await store.write((tx) => release(tx, key, "one", clock.now()));
          await take(key, "rep_alive", "two");
          return found;
        },
      };
      await renew("rep_own");
      expect(await endOrphans(moving, clock, "rep_own")).toEqual([]);
      expect(await findInvocation(store.read, "acme", key.id)).toMatchObject({ status: "running" });
      await end(key, SUCCESS, "two");
    });

    test("calls that a process left running are handed to the store together, since the next start waits for their end", async () => {
      const left = await Promise.all(Array.from({ length: 300 }, () => put()));
      await Promise.all(left.map((key) => take(key, "rep_dead")));
      let [underWay, most] = [0, 0];
      const counting: Store = {
        ...store,
        async execute(command, input) {
          most = Math.max(most, ++underWay);
          const output = await store.execute(command, input);
          underWay--;
          return output;
        },
      };
      await renew("rep_own");
      expect(await endOrphans(counting, clock, "rep_own")).toHaveLength(left.length);
      expect(most).toBeGreaterThan(100);
    });

    test("of the calls that ran, those of a replica whose lease is over end as internal, and no others", async () => {
      const [dead, far, alive, own, waiting] = [await put(), await put(), await put(), await put(), await put()];
      const owners = [
        [dead, "rep_dead"],
        [far, "rep_far"],
        [alive, "rep_alive"],
        [own, "rep_own"],
      ] as const;
      for (const [key, owner] of owners) await take(key, owner);
      for (const [, owner] of owners) await renew(owner);
      // This process's own clock has no part in it.
      clock.time += 3_600_000;
      expect(await endOrphans(store, clock, "rep_own")).toEqual([]);
      const lease = (id: string, shiftMs: number) =>
        store.write(async ({ db, tables: { processes }, now }) => {
          await db
            .update(processes)
            .set({ lease_until: sql<number>`${now} + ${shiftMs}` })
            .where(eq(processes.id, id));
        });
      await lease("rep_dead", -1);
      // Only a clock that went back can have written this one.
      await lease("rep_far", 60_000);
      await lease("rep_own", -1);
      expect(await endOrphans(store, clock, "rep_own", () => false)).toEqual([]);
      expect(await endOrphans(store, clock, "rep_own")).toEqual([dead, far]);
      const states = await Promise.all(
        [dead, alive, own, waiting].map(({ id }) => findInvocation(store.read, "acme", id)),
      );
      expect(states.map(({ status, error_class }) => [status, error_class])).toEqual([
        ["failed", "internal"],
        ["running", null],
        ["running", null],
        ["pending", null],
      ]);
      for (const key of [alive, own]) await end(key, SUCCESS);
      await store.write(async ({ db, tables }) => void (await db.delete(tables.processes)));
    });

    test("an agent with a pending call is found, whichever it is, and its oldest calls first", async () => {
      const tenant = "pending";
      for (const agent_id of ["agt_x", "agt_y", "agt_y"]) await put({ tenant, agent_id });
      const found = await store.execute(waitingAgents, { ...TAKER, after: "agt_b", limit: 10 });
      expect(found).toEqual(["agt_x", "agt_y"].map((agent_id) => ({ tenant, agent_id })));
      expect(await store.execute(waitingAgents, { ...TAKER, after: "agt_b", limit: 1 })).toEqual(found.slice(0, 1));
      expect(await store.execute(waitingAgents, { ...TAKER, after: "agt_x", limit: 1 })).toEqual(found.slice(1));
    });

    test("an idempotency key stands for its first call, until it expires", async () => {
      const idempotency = { key: "k", body_sha256: "s", asked_at: clock.now(), latest: clock.now() };
      const send = (one: AcceptedCall) => store.write((tx) => accept(tx, one));
      const calls = Array.from({ length: 5 }, () => ({
        ...accepted(clock.now(), { tenant: "keys" }),
        idempotency,
      }));
      const ids = await Promise.all(calls.map(send));
      expect(new Set(ids).size).toBe(1);
      expect((await readHistory(store.read, "keys", new URLSearchParams())).total).toBe(1);
      const other = {
        ...accepted(clock.now(), { tenant: "keys" }),
        idempotency: { ...idempotency, body_sha256: "t" },
      };
      expect(send(other)).rejects.toThrow("Idempotency-Key: already used with another body");
      clock.time += DAY_MS;
      const later = {
        ...other,
        idempotency: { ...other.idempotency, asked_at: clock.now(), latest: clock.now() },
      };
      expect(ids).not.toContain(await send(later));
    });

    test("totals are those of the rows, after any sequence of events and clean-ups", async () => {
      await fc.assert(
        fc.asyncProperty(fc.array(anyEvent, { minLength: 5, maxLength: 40 }), async (events) => {
          const tenant = crypto.randomUUID();
          const keys: { tenant: string; id: string }[] = [];
          for (const { kind, agent, model, pick } of events) {
            const key = keys[pick % Math.max(keys.length, 1)];
            if (kind === "accept" || key === undefined) keys.push(await put({ tenant, agent_id: agent, model }));
            else if (kind === "claim") await take(key);
            else if (kind === "succeed") await end(key, SUCCESS);
            else if (kind === "fail") await end(key, FAILURE);
            else await store.write((tx) => endOpen(tx, key, "cancelled", clock.now()));
            clock.time += DAY_MS / 10;
          }
          await expectExactTotals(store, tenant);
          await cleanUp(store, clock, { body_days: 1, history_days: 2 }, silentLog);
          await expectExactTotals(store, tenant);
          await joinTotals(store);
          await expectExactTotals(store, tenant);
        }),
        { numRuns: 15 },
      );
    });

    test("clean-up takes ended records and bodies by age, and never what is still owed", async () => {
      const tenant = "cleaned";
      const [owed, ended] = [await put({ tenant }), await put({ tenant })];
      const large = "x".repeat(700_000);
      const answer = new TextEncoder().encode(large);
      const largeSuccess = { ...SUCCESS, response: answer, resp_size: answer.length };
      const [largeOwed, largeEnded] = [await put({ tenant }, large), await put({ tenant }, large)];
      await take(ended);
      await end(ended, SUCCESS);
      await take(largeEnded);
      await end(largeEnded, largeSuccess);
      clock.time += 10 * DAY_MS;
      const [recent, largeRecent] = [await put({ tenant }), await put({ tenant }, large)];
      await take(recent);
      await end(recent, SUCCESS);
      await take(largeRecent);
      await end(largeRecent, largeSuccess);
      const { bodyParts: t } = store.read.tables;
      const parts = async () => {
        const rows = await store.read.db.select({ id: t.invocation_id }).from(t).where(eq(t.tenant, tenant));
        return rows.map(({ id }) => id).sort();
      };

      await cleanUp(store, clock, { body_days: 5, history_days: 0 }, silentLog);
      const without = await findInvocation(store.read, tenant, ended.id);
      for (const kind of ["request", "response"] as const)
        expect(await capturedBody(store.read, without, kind)).toBeNull();
      const kept = await findInvocation(store.read, tenant, recent.id);
      expect((await capturedBody(store.read, kept, "response"))?.toString()).toBe("world");
      const stays = [largeOwed, largeOwed, ...Array.from({ length: 4 }, () => largeRecent)].map(({ id }) => id);
      expect(await parts()).toEqual(stays.sort());
      const largeKept = await findInvocation(store.read, tenant, largeRecent.id);
      for (const kind of ["request", "response"] as const)
        expect((await capturedBody(store.read, largeKept, kind))?.length).toBe(700_000);

      await cleanUp(store, clock, { body_days: 5, history_days: 5 }, silentLog);
      expect(findInvocation(store.read, tenant, ended.id)).rejects.toThrow("no such invocation");
      expect((await take(owed))?.body.byteLength).toBe(5);
      expect((await take(largeOwed))?.body.byteLength).toBe(700_000);
      clock.time += 10 * DAY_MS;
      await cleanUp(store, clock, { body_days: 0, history_days: 5 }, silentLog);
      expect(await parts()).toEqual([largeOwed.id, largeOwed.id]);
    });

    test("totals of models that are in no record go with the clean-up, exact while calls go on", async () => {
      const tenant = crypto.randomUUID();
      const { invocationCounts: t } = store.read.tables;
      const models = async () => {
        const rows = await store.read.db
          .selectDistinct({ model: t.value })
          .from(t)
          .where(and(eq(t.tenant, tenant), eq(t.dimension, "model")));
        return rows.map((row) => row.model).sort();
      };
      const call = async (model: string) => {
        const key = await put({ tenant, model });
        await take(key);
        await end(key, SUCCESS);
      };
      const names = Array.from({ length: 450 }, (_, index) => `model-${index}`);
      await Promise.all([...names, ...names.slice(0, 50)].map(call));
      clock.time += 3 * DAY_MS;
      const clean = async () => {
        await cleanUp(store, clock, { body_days: 1, history_days: 2 }, silentLog);
        await joinTotals(store);
      };
      const again = names.slice(0, 40);
      await Promise.all([clean(), ...again.map(call), clean()]);
      await clean();
      expect(await models()).toEqual([...again].sort());
      for (const model of names) {
        expect(await counted(store.read, tenant, "model", model)).toBe(again.includes(model) ? 1 : 0);
      }
    });

    test("totals become one row each, however many values a tenant has named", async () => {
      const tenant = crypto.randomUUID();
      const { invocationCounts: t } = store.read.tables;
      const named = (value: string, shard: number, count: number) => {
        return { tenant, dimension: "model" as const, value, shard, count };
      };
      const values = Array.from({ length: 1_300 }, (_, i) => `${i % 2 === 0 ? "M" : "é"}${i}`);
      const rows = values.flatMap((value, i) => [named(value, 0, i % 3), ...(i % 3 === 1 ? [named(value, 9, 4)] : [])]);
      for (let at = 0; at < rows.length; at += 500) {
        await store.write(({ db }) => db.insert(t).values(rows.slice(at, at + 500)));
      }
      await joinTotals(store);
      const joined = await store.read.db.select({ shard: t.shard, count: t.count }).from(t).where(eq(t.tenant, tenant));
      const expected = values.flatMap((_, i) => [[], [5], [2]][i % 3] ?? []);
      expect(joined.map(({ count }) => count).sort()).toEqual(expected.sort());
      expect(new Set(joined.map(({ shard }) => shard))).toEqual(new Set([0]));
    });

    test("the write of a paid call tells how large its body is", async () => {
      const told: (number | undefined)[] = [];
      const write: Store["write"] = (work, options) => {
        told.push(options?.bytes);
        return store.write(work, options);
      };
      const paid = accepted(clock.now(), {}, "x".repeat(1_000_000));
      await accept({ ...store, write }, paid, null, async () => {});
      expect(told).toEqual([1_000_000]);
    });

    test("a call that is counted while its model's empty total goes stays counted", async () => {
      // On SQLite works run one after another.
      if (!store.isShared) return;
      const tenant = crypto.randomUUID();
      const { invocationCounts: t } = store.read.tables;
      const place = { tenant, dimension: "model" as const, value: "m", shard: 0 };
      await store.write(({ db }) => db.insert(t).values({ ...place, count: 0 }));
      const isAwaited = async () => {
        const locks = store.read.db.select({ pid: sql`pid` }).from(sql`pg_locks`).where(sql`not granted`);
        return (await locks.execute()).length > 0;
      };
      let cleaning: Promise<void> | undefined;
      await store.write(async ({ db }) => {
        await db.update(t).set({ count: 1 }).where(eq(t.tenant, tenant));
        cleaning = joinTotals(store);
        while (!(await isAwaited()));
      });
      await cleaning;
      expect(await counted(store.read, tenant, "model", "m")).toBe(1);
    });
  });
}

afterAll(async () => {
  for (const { store, dir } of opened) {
    await store.close();
    rmSync(dir, { recursive: true, force: true });
  }
});

const anyEvent = fc.record({
  kind: fc.constantFrom("accept", "claim", "succeed", "fail", "abandon"),
  agent: fc.constantFrom("agt_1", "agt_2"),
  model: fc.constantFrom(null, "m"),
  pick: fc.nat(),
});

/** Compares each total with a count over the rows; a date bound makes the history count them. */
async function expectExactTotals(store: Store, tenant: string): Promise<void> {
  const dimensions: [CountDimension, string, string][] = [
    ["all", "", ""],
    ["agent", "agent_id", "agt_1"],
    ["agent", "agent_id", "agt_2"],
    ["model", "model", "m"],
    ["mode", "mode", "transactional"],
    ...INVOCATION_STATUSES.map((status): [CountDimension, string, string] => ["status", "status", status]),
    ...ERROR_CLASSES.map((error): [CountDimension, string, string] => ["error_class", "error_class", error]),
  ];
  for (const [dimension, parameter, value] of dimensions) {
    const query = new URLSearchParams({
      since: "2000-01-01T00:00:00Z",
      ...(parameter && { [parameter]: value }),
    });
    const rows = (await readHistory(store.read, tenant, query)).total;
    expect([dimension, value, await counted(store.read, tenant, dimension, value)]).toEqual([dimension, value, rows]);
  }
}

test("the states of a call only go forward, but for a claim that is given back", () => {
  const order = ["pending", "running", "succeeded", "failed"];
  const { release: back, ...forward } = INVOCATION_EVENTS;
  expect(back).toEqual({ from: "running", to: "pending" });
  for (const { from, to } of Object.values(forward)) {
    expect(order.indexOf(to)).toBeGreaterThan(order.indexOf(from));
    expect(["pending", "running"]).toContain(from);
  }
});
