// The ends of many tenants on SQLite, whose calls stand beside the history for a while (storage/sqlite-recent.ts): nobody
// may see where they are.
import { expect, test } from "bun:test";
import { copyFileSync } from "node:fs";
import { join } from "node:path";
import fc from "fast-check";
import { accepted, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import { idTime } from "../../core/id.ts";
import { silentLog } from "../../core/log.ts";
import { openSqlite } from "../../storage/sqlite.ts";
import type { Store } from "../../storage/store.ts";
import { capturedBodies, capturedResponse, findInvocation, readHistory } from "./history.ts";
import { cleanUp } from "./retention.ts";
import { accept, claim, type Ending, finish, type InvocationRow } from "./service.ts";

const NOW = 1_790_000_000_000;
/** As storage/sqlite-recent.ts has it. */
const FORGOTTEN_AT_ONCE = 1_000;
/** So that groups of a few ends are spread, and most groups have something to move. */
const SIZES = { ofEachTenant: 1, callsLeast: 8, movedAtOnce: 3, sampled: 1 };

const FAILURE: Ending = { ...SUCCESS, status: "failed", error_class: "upstream_5xx", upstream_status: 503 };

const anyCall = fc.record({
  tenant: fc.constantFrom("a", "\uff41", "c", "\u{1F600}ä") as fc.Arbitrary<string>,
  agent_id: fc.constantFrom("agt_1", "agt_2"),
  mode: fc.constantFrom("transactional" as const, "streaming" as const),
  model: fc.constantFrom(null, "m", "M"),
  body_captured: fc.boolean(),
  emit_receipt: fc.boolean(),
  isOpen: fc.boolean(),
  isFailed: fc.boolean(),
  isPaid: fc.integer({ min: 0, max: 5 }).map((n) => n === 0),
  body: fc.constantFrom("", "hello", "x".repeat(3_000), "y".repeat(20_000)),
  ms: fc.integer({ min: 0, max: 3 }),
});
type AnyCall = typeof anyCall extends fc.Arbitrary<infer C> ? C : never;
const anyStep = fc.oneof(
  { weight: 8, arbitrary: fc.record({ calls: fc.array(anyCall, { minLength: 1, maxLength: 12 }) }) },
  {
    weight: 1,
    arbitrary: fc.constantFrom("settle" as const, "crash" as const, "clean up" as const, "restart" as const),
  },
);

interface Model {
  readonly row: InvocationRow;
  /** Null when the clean-up has removed the bodies. */
  readonly body: string | null;
}

/** Days later: what stays are open calls, and ended ones, without their bodies, that are owed a receipt. */
async function cleaned(store: Store, models: readonly Model[]): Promise<Model[]> {
  const clock = { now: () => NOW + 9 * 86_400_000 };
  await cleanUp(store, clock, { body_days: 5, history_days: 5 }, silentLog);
  return models.flatMap(({ row, body }) => {
    if (row.completed_at === null) return [{ row, body }];
    return row.emit_receipt ? [{ row, body: null }] : [];
  });
}

function recentOf({ read }: Store, tenants: readonly string[]): number {
  return tenants.reduce((sum, tenant) => sum + (read.recentCalls?.of(tenant).length ?? 0), 0);
}

async function make(store: Store, plan: AnyCall): Promise<Model> {
  const { tenant, agent_id, mode, model, body_captured, emit_receipt, isOpen, isFailed, isPaid, body, ms } = plan;
  const paid = isPaid ? ({ payment_nonce: crypto.randomUUID(), settlement_status: "settled" } as const) : {};
  const fields = { tenant, agent_id, mode, model, body_captured, emit_receipt, ...paid };
  const call = accepted(NOW + ms, fields, body);
  const key = { tenant, id: call.row.id };
  await accept(store, call);
  if (isOpen) return { row: call.row, body };
  await claim(store, { key, owner: "rep_1", token: "token", now: NOW, inHand: null });
  const ending = isFailed ? FAILURE : SUCCESS;
  expect(await finish(store, { key, token: "token", request_id: "r" }, ending, NOW + 9)).toBe(true);
  const settlement_status = isPaid && isFailed ? "settled_upstream_failed" : call.row.settlement_status;
  const { response, detail, ...ended } = ending;
  const row = { ...call.row, ...ended, settlement_status, claim: "token", updated_at: NOW + 9, completed_at: NOW + 9 };
  return { row, body };
}

const FILTERS: [string, string, keyof InvocationRow][] = [
  ["agent_id", "agt_1", "agent_id"],
  ["status", "succeeded", "status"],
  ["status", "pending", "status"],
  ["mode", "streaming", "mode"],
  ["error_class", "upstream_5xx", "error_class"],
  ["model", "m", "model"],
  ["settlement", "settled", "settlement_status"],
];
const ALL_TIME = { since: "2000-01-01T00:00:00Z" };
const SINCE = { since: new Date(NOW + 2).toISOString() };

const text = (bytes: Uint8Array | null) => (bytes === null ? undefined : Buffer.from(bytes).toString());

async function expectAll(store: Store, models: readonly Model[], places: readonly number[]): Promise<void> {
  for (const [tenant, own] of Map.groupBy(models, ({ row }) => row.tenant)) {
    const rows = own.map(({ row }) => row).sort((a, b) => (a.id < b.id ? 1 : -1));
    const questions = [
      [],
      ...FILTERS.map((filter) => [filter]),
      [FILTERS[0]!, FILTERS[1]!],
      [FILTERS[3]!, FILTERS[5]!],
    ];
    for (const filters of questions) {
      const matches = rows.filter((row) => filters.every(([, value, column]) => row[column] === value));
      for (const dates of [{}, ALL_TIME, SINCE]) {
        const within = dates === SINCE ? matches.filter(({ id }) => idTime(id) >= NOW + 2) : matches;
        for (const offset of places) {
          const named = filters.map(([name, value]) => [name, value]);
          const query = { ...Object.fromEntries(named), ...dates, limit: "3", offset: String(offset) };
          const page = await readHistory(store.read, tenant, new URLSearchParams(query));
          expect([query, page.total, page.rows]).toEqual([query, within.length, within.slice(offset, offset + 3)]);
        }
      }
    }
  }
  for (const { row, body } of models) {
    expect(await findInvocation(store.read, row.tenant, row.id)).toEqual(row);
    const bodies = await capturedBodies(store.read, row);
    const isShown = row.body_captured && body !== null;
    expect(text(bodies.request)).toBe(isShown ? body : undefined);
    const answer = isShown && row.completed_at !== null ? "world" : undefined;
    expect([text(bodies.response), text(await capturedResponse(store.read, row))]).toEqual([answer, answer]);
  }
}

test("whatever ends, moves on, is lost with the process or cleaned up, each call is seen once, where it belongs", async () => {
  let most = 0;
  await fc.assert(
    fc.asyncProperty(fc.array(anyStep, { minLength: 3, maxLength: 7 }), async (steps) => {
      const place = sqlitePlace();
      const path = join(place.dir, "tollgate.db");
      const open = () => openSqlite({ path, log: silentLog, clock: { now: () => NOW }, sizes: SIZES });
      const gone: Store[] = [];
      let store = await open();
      let models: Model[] = [];
      for (const [i, step] of steps.entries()) {
        if (typeof step === "object") models.push(...(await Promise.all(step.calls.map((call) => make(store, call)))));
        if (step === "settle") await store.settle();
        if (step === "clean up") models = await cleaned(store, models);
        if (step === "restart") await store.close();
        if (step === "crash") gone.push(store);
        if (step === "restart" || step === "crash") store = await open();
        const tenants = [...new Set(models.map(({ row }) => row.tenant))];
        most = Math.max(most, recentOf(store, tenants));
        await expectAll(store, models, [i % 3]);
      }
      for (const each of [...gone, store]) await each.close();
      place.remove();
    }),
    { numRuns: 5 },
  );
  expect(most).toBeGreaterThan(3);
}, 60_000);

test("calls are taken from their place among the recent ones when there are many of each tenant, and none is left behind", async () => {
  const place = sqlitePlace();
  const path = join(place.dir, "tollgate.db");
  const store = await openSqlite({ path, log: silentLog, clock: { now: () => NOW }, sizes: SIZES });
  const tenants = Array.from({ length: 20 }, (_, i) => `tenant-${i}`);
  const [plan] = fc.sample(anyCall, { numRuns: 1, seed: 1 });
  const some = { ...(plan as AnyCall), isOpen: false, isPaid: false, body: "hello" };
  const recent = () => recentOf(store, tenants);
  const models: Model[] = [];
  await Promise.all(
    tenants.map(async (tenant, i) => {
      // Not in step with each other, so that calls end in the very groups that begin to move others.
      for (let turn = 0; turn < i % 3; turn += 1) await store.write(async () => {});
      for (let round = 0; round < 20; round += 1) models.push(await make(store, { ...some, tenant }));
    }),
  );
  // Most of them have been moved on the way.
  expect(recent()).toBeLessThan(models.length / 2);
  await store.settle();
  expect(recent()).toBe(0);
  await expectAll(store, models, [0, 17]);
  await store.close();
  place.remove();
}, 30_000);

/** A call that ends among the recent ones. */
const planOf = (tenant: string): AnyCall => {
  const [plan] = fc.sample(anyCall, { numRuns: 1, seed: 1 });
  return { ...(plan as AnyCall), tenant, isOpen: false, isPaid: false, emit_receipt: false, body: "hello", ms: 0 };
};

async function openAt(path: string, sizes: typeof SIZES): Promise<Store> {
  return await openSqlite({ path, log: silentLog, clock: { now: () => NOW }, sizes });
}

test("tenants whose names stand in another order in the database than here keep their calls while they are moved", async () => {
  // The second is above the first by its UTF-16, and below it in the database; the last is above all that is one character.
  const tenants = ["a", "\u{1F600}", "\uff5e", "\u{10ffff}z"];
  const place = sqlitePlace();
  const path = join(place.dir, "tollgate.db");
  const sizes = { ...SIZES, callsLeast: 16, movedAtOnce: 3 };
  const gone = await openAt(path, sizes);
  const models: Model[] = [];
  for (const tenant of [...tenants, ...tenants, ...tenants, ...tenants]) models.push(await make(gone, planOf(tenant)));
  for (let step = 0; step < 8; step += 1) {
    await gone.write(async () => {});
    await expectAll(gone, models, [0]);
    // As a process that was killed here.
    const copy = `${path}-${step}`;
    for (const end of ["", "-wal"]) copyFileSync(`${path}${end}`, `${copy}${end}`);
    const store = await openAt(copy, sizes);
    await expectAll(store, models, [0]);
    await store.settle();
    await expectAll(store, models, [0]);
    await store.close();
  }
  await gone.close();
  place.remove();
}, 30_000);

test("a call that ends first of all, after a process was killed between two steps of a move, is not taken for one of those", async () => {
  const place = sqlitePlace();
  const path = join(place.dir, "tollgate.db");
  // As many as are forgotten at once.
  const sizes = { ...SIZES, callsLeast: 1_000, movedAtOnce: 1_000 };
  const gone = await openAt(path, sizes);
  const { row } = await make(gone, { ...planOf("b"), isOpen: true });
  const key = { tenant: "b", id: row.id };
  await claim(gone, { key, owner: "rep_1", token: "token", now: NOW, inHand: null });
  await Promise.all(Array.from({ length: 1_000 }, () => make(gone, planOf("a"))));
  for (let step = 0; step < 2; step += 1) await gone.write(async () => {});
  const store = await openAt(path, sizes);
  expect(await finish(store, { key, token: "token", request_id: "r" }, SUCCESS, NOW + 9)).toBe(true);
  expect(await findInvocation(store.read, "b", row.id)).toMatchObject({ status: "succeeded" });
  for (const each of [gone, store]) await each.close();
  place.remove();
}, 30_000);

test("pages are whole at once when another process has moved the recent calls, as none that only opens and closes does", async () => {
  const place = sqlitePlace();
  const path = join(place.dir, "tollgate.db");
  const sizes = { ...SIZES, callsLeast: 1_000 };
  const store = await openAt(path, sizes);
  const models: Model[] = [];
  for (let i = 0; i < 20; i += 1) models.push(await make(store, planOf("a")));
  await store.settle();
  for (let i = 0; i < 10; i += 1) models.push(await make(store, planOf("a")));
  const idle = await openAt(path, sizes);
  await idle.close();
  const other = await openAt(path, sizes);
  expect(recentOf(other, ["a"])).toBe(10);
  await other.settle();
  await other.close();
  const rows = models.map(({ row }) => row).sort((a, b) => (a.id < b.id ? 1 : -1));
  const page = await readHistory(store.read, "a", new URLSearchParams({ limit: "3", offset: "12" }));
  expect(page.rows).toEqual(rows.slice(12, 15));
  await store.close();
  place.remove();
}, 30_000);
