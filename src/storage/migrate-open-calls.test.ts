// Calls of the versions that kept all of them in one table, as they are after the migration that sets the open ones apart.
import { afterEach, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { SQL } from "bun";
import {
  AGENT,
  bodyOf,
  claimOf,
  idOf,
  isOpen,
  keyOf,
  manyOlderCalls,
  OLD_OWNER,
  OLDER_AT,
  OLDER_CALLS,
  type OlderCall,
  olderDatabase,
  olderSchema,
  responseOf,
  storedCallOf,
} from "../../test/support/stores/older-calls.ts";
import { contents, type OldPlace, olderPlaces, TABLES } from "../../test/support/stores/older-places.ts";
import { clock, type Place, sqlitePlace } from "../../test/support/stores/stores.ts";
import { newId } from "../core/id.ts";
import type { LogFields } from "../core/log.ts";
import { silentLog } from "../core/log.ts";
import { capturedBodies, findInvocation, readHistory } from "../gateway/invocations/history.ts";
import { findKey } from "../gateway/invocations/idempotency.ts";
import { abandon, claim, finish, holdsClaim, refuseSettlement } from "../gateway/invocations/service.ts";
import { partsOf } from "../wire/body.ts";
import { openStore } from "./open.ts";
import type { Store } from "./store.ts";

const opened: { place: Place; stores: Store[] } = { place: sqlitePlace(), stores: [] };
afterEach(async () => {
  for (const store of opened.stores.splice(0)) await store.close();
  opened.place.remove();
});

async function filled(dialect: keyof typeof olderPlaces, statements: readonly string[]): Promise<OldPlace> {
  const place = await olderPlaces[dialect]();
  opened.place.remove();
  opened.place = place;
  for (const statement of statements) await place.execute(statement);
  return place;
}

async function open(place: Place): Promise<Store> {
  const store = await place.open();
  opened.stores.push(store);
  return store;
}

const named = (name: string): OlderCall => {
  const found = OLDER_CALLS.find((older) => older.name === name);
  if (found === undefined) throw new Error(`no call ${name}`);
  return found;
};
const key = (older: OlderCall) => ({ tenant: older.tenant, id: idOf(older) });

/** What the record of a call is found by. */
const FILTERS = {
  status: ({ status }: OlderCall) => status,
  mode: ({ mode }: OlderCall) => mode,
  model: ({ model }: OlderCall) => model,
  error_class: ({ error_class }: OlderCall) => error_class,
  settlement: ({ settlement_status }: OlderCall) => settlement_status,
  agent_id: () => AGENT,
};
const ALL_TIME = "&since=1970-01-01T00:00:00Z";

async function page(store: Store, tenant: string, query: string) {
  const { rows, total } = await readHistory(store.read, tenant, new URLSearchParams(`limit=100&${query}`));
  return { ids: rows.map(({ id }) => id), total };
}

async function expectHistory(store: Store): Promise<void> {
  for (const tenant of ["acme", "rival"]) {
    const own = OLDER_CALLS.filter((older) => older.tenant === tenant);
    const expectPage = async (query: string, among: readonly OlderCall[]) => {
      const ids = among.map(idOf).sort().reverse();
      const wanted = { ids, total: ids.length };
      expect([query, await page(store, tenant, query)]).toEqual([query, wanted]);
      // As counted, beside the total that is kept.
      expect([query, await page(store, tenant, query + ALL_TIME)]).toEqual([query, wanted]);
    };
    await expectPage("", own);
    for (const [name, of] of Object.entries(FILTERS)) {
      for (const value of new Set(own.map(of))) {
        if (value === null) continue;
        await expectPage(
          `${name}=${value}`,
          own.filter((older) => of(older) === value),
        );
      }
    }
  }
}

/** As a poll and the detail show it. */
async function expectRecord(store: Store, older: OlderCall): Promise<void> {
  const row = await findInvocation(store.read, older.tenant, idOf(older));
  const { mode, status, model, error_class, settlement_status } = older;
  const isRunning = status === "running";
  expect(row).toMatchObject({ mode, status, model, error_class, settlement_status, agent_id: AGENT, caller: "ada" });
  expect(row).toMatchObject({ body_captured: older.captured, emit_receipt: older.receipt, updated_at: OLDER_AT });
  expect(row).toMatchObject({
    owner: isRunning ? OLD_OWNER : null,
    claim: isRunning ? claimOf(older) : null,
    completed_at: isOpen(older) ? null : OLDER_AT + 42,
    upstream_status: isOpen(older) ? null : 200,
    payment_nonce: settlement_status === null ? null : `nonce of ${older.name}`,
  });
  const shown = await capturedBodies(store.read, row);
  const request = older.captured ? bodyOf(older).subarray(0, 1_048_576) : null;
  const response = older.captured && !isOpen(older) ? responseOf(older) : null;
  const hex = (bytes: Uint8Array | null) => bytes && Buffer.from(bytes).toString("hex");
  expect([older.name, hex(shown.request), hex(shown.response)]).toEqual([older.name, hex(request), hex(response)]);
}

const ENDING = {
  status: "succeeded",
  error_class: null,
  upstream_status: 200,
  latency_ms: 5,
  resp_size: 5,
  resp_sha256: null,
  response: Buffer.from("world"),
  response_truncated: false,
  response_content_type: "text/plain",
} as const;

/** Every open call goes on from where it was, to an end that the history has. */
async function expectToGoOn(store: Store): Promise<void> {
  const now = clock.now();
  for (const older of OLDER_CALLS.filter(isOpen)) {
    const token = `new ${older.name}`;
    const taken = await claim(store, { key: key(older), owner: "rep_new", token, now, inHand: null });
    if (older.status === "running") {
      expect(taken).toBeNull();
      expect(await holdsClaim(store.read, key(older), claimOf(older))).toBe(true);
      expect(await abandon(store, key(older), "internal", now)).toBe(true);
    } else if (older.settlement_status === "pending" || !older.hasCall) {
      expect(taken).toBeNull();
    } else {
      expect(taken?.call as unknown).toEqual(storedCallOf(older));
      expect(Buffer.concat(partsOf(taken?.body ?? new Uint8Array())).equals(bodyOf(older))).toBe(true);
      expect(await finish(store, { key: key(older), token, request_id: "r" }, ENDING, now)).toBe(true);
      const row = await findInvocation(store.read, older.tenant, idOf(older));
      const shown = await capturedBodies(store.read, row);
      const [request, response] = older.captured ? [bodyOf(older).subarray(0, 1_048_576), ENDING.response] : [];
      expect(Buffer.from(shown.request ?? []).equals(request ?? Buffer.of())).toBe(true);
      expect(Buffer.from(shown.response ?? []).equals(response ?? Buffer.of())).toBe(true);
    }
  }
}

/** A program that is killed when it has done all of the migration and not yet committed it. */
async function killedMigration(place: OldPlace): Promise<void> {
  const options = { databaseUrl: place.databaseUrl, dataDir: place.dir };
  const program = `
    import { openStore } from ${JSON.stringify(join(import.meta.dir, "open.ts"))};
    import { silentLog as log } from ${JSON.stringify(join(import.meta.dir, "../core/log.ts"))};
    let versions = 0;
    const now = () => (++versions === 2 ? process.kill(process.pid, "SIGKILL") : 1);
    await openStore({ ...${JSON.stringify(options)}, log, clock: { now } });`;
  const child = Bun.spawn([process.execPath, "-e", program], { stdio: ["ignore", "ignore", "inherit"] });
  await child.exited;
  expect(child.signalCode).toBe("SIGKILL");
}

describe.each(["sqlite", "postgres"] as const)("on %s", (dialect) => {
  test("calls of an older version are each seen once, and the open ones go on", async () => {
    const place = await filled(dialect, olderDatabase(dialect));
    const store = await open(place);
    await expectHistory(store);
    for (const older of OLDER_CALLS) await expectRecord(store, older);
    await expectToGoOn(store);

    const stillOpen = OLDER_CALLS.filter(
      ({ settlement_status, ...older }) => isOpen(older as OlderCall) && settlement_status === "pending",
    );
    const rows = await place.rows("select id from open_invocations");
    expect(rows.map(({ id }) => String(id)).sort()).toEqual(stillOpen.map(idOf).sort());
    const dues = await place.rows("select invocation_id as id from receipts_due");
    const owed = [named("succeeded paid"), named("pending large")];
    expect(dues.map(({ id }) => String(id)).sort()).toEqual(owed.map(idOf).sort());
    const { total } = await page(store, "acme", "");
    expect(total).toBe(OLDER_CALLS.filter(({ tenant }) => tenant === "acme").length);
  }, 60_000);

  test("a payment of an older version that is declined frees its key, and no other", async () => {
    const store = await open(await filled(dialect, olderDatabase(dialect)));
    const declined = named("declined");
    await store.write((tx) => refuseSettlement(tx, key(declined), "{}", clock.now()));
    const row = await findInvocation(store.read, declined.tenant, idOf(declined));
    expect(row).toMatchObject({ status: "failed", settlement_status: "settlement_failed" });
    for (const older of OLDER_CALLS) {
      const owner = { tenant: older.tenant, caller: "ada", agent_id: AGENT };
      const known = await findKey(store, owner, { key: keyOf(older), asked_at: clock.now(), latest: clock.now() });
      expect(known?.invocation_id).toBe(older === declined ? undefined : idOf(older));
    }
  }, 60_000);

  test("a second start changes nothing", async () => {
    const place = await filled(dialect, olderDatabase(dialect));
    await (await place.open()).close();
    const first = await contents(place, TABLES.after);
    await (await place.open()).close();
    expect(await contents(place, TABLES.after)).toEqual(first);
  }, 60_000);

  test("a program that is killed at the migration leaves all as it was, and the next one does it", async () => {
    const place = await filled(dialect, olderDatabase(dialect));
    const before = await contents(place, TABLES.before);
    await killedMigration(place);
    expect(await contents(place, TABLES.before)).toEqual(before);
    const store = await open(place);
    await expectHistory(store);
    for (const older of OLDER_CALLS) await expectRecord(store, older);
  }, 60_000);

  test("an older program that still runs can store no call any more, where nobody would find it", async () => {
    const place = await filled(dialect, olderDatabase(dialect));
    await (await place.open()).close();
    const { id } = { id: idOf(named("pending")) };
    await expect(place.execute(`update invocations set status = 'running' where id = '${id}'`)).rejects.toThrow();
    await expect(place.execute(`delete from invocations where id = '${id}'`)).rejects.toThrow();
    const values = "'acme', 'inv_x', 'agt_a', 'ada', 'pending'";
    const insert = `insert into invocations (tenant, id, agent_id, caller, status) values (${values})`;
    await expect(place.execute(insert)).rejects.toThrow();
  }, 60_000);

  test("many calls are announced before they are moved, with the time that it will take", async () => {
    const counts = { ended: 50_000, open: 5_000 };
    const place = await filled(dialect, [...olderSchema(dialect), ...manyOlderCalls(dialect, counts)]);
    const events: [string, LogFields | undefined][] = [];
    const log = { ...silentLog, info: (event: string, fields?: LogFields) => void events.push([event, fields]) };
    const openWith = async () => {
      await (await openStore({ databaseUrl: place.databaseUrl, dataDir: place.dir, log, clock })).close();
      return events.splice(0).filter(([event]) => event.startsWith("migration_"));
    };
    const [started, ended, ...others] = await openWith();
    expect(started).toEqual(["migration_started", { version: 11, rows: 5_000, estimated_ms: expect.any(Number) }]);
    expect(started?.[1]?.["estimated_ms"]).toBeGreaterThan(100);
    expect(ended).toEqual(["migration_ended", { versions: [11], duration_ms: expect.any(Number) }]);
    expect(others).toEqual([]);
    const [sums] = await place.rows(`select
      (select count(*) from open_invocations) as open, (select count(*) from ended_invocations) as ended,
      (select sum(count) from invocation_counts where dimension = 'all') as total,
      (select sum(count) from invocation_counts where dimension = 'status' and value <> 'succeeded') as unended`);
    const numbers = Object.entries(sums ?? {}).map(([name, value]) => [name, Number(value)]);
    expect(Object.fromEntries(numbers)).toEqual({ ...counts, total: counts.ended + counts.open, unended: counts.open });
    expect(await openWith()).toEqual([]);
  }, 120_000);

  test("few calls are moved without a word", async () => {
    const place = await filled(dialect, olderDatabase(dialect));
    const events: string[] = [];
    const log = { ...silentLog, info: (event: string) => void events.push(event) };
    await (await openStore({ databaseUrl: place.databaseUrl, dataDir: place.dir, log, clock })).close();
    expect(events.filter((event) => event.startsWith("migration_"))).toEqual([]);
  }, 60_000);
});

test("on postgres a call that an older program is just storing is not left behind", async () => {
  const place = await filled("postgres", olderDatabase("postgres"));
  const late = { tenant: "acme", id: newId("inv", clock.now()) };
  await using older = new SQL(place.databaseUrl ?? "", { max: 1 });
  const transaction = await older.reserve();
  await transaction.unsafe("begin");
  await transaction.unsafe(
    `insert into invocations (tenant, id, agent_id, caller, mode, status, response_truncated, body_captured, emit_receipt,
       updated_at) values ('acme', '${late.id}', '${AGENT}', 'ada', 'transactional', 'pending', false, true, false, 1)`,
  );
  await transaction.unsafe(
    `insert into invocation_bodies (tenant, invocation_id, call, request) values ('acme', '${late.id}', '{}', 'late')`,
  );
  const opening = open(place);
  const isWaiting =
    "select 1 from pg_locks join pg_database d on d.oid = database and datname = current_database() where not granted";
  while ((await place.rows(isWaiting)).length === 0) await Bun.sleep(20);
  await transaction.unsafe("commit");
  transaction.release();
  const store = await opening;
  const taken = await claim(store, { key: late, owner: "rep_new", token: "late", now: clock.now(), inHand: null });
  expect(Buffer.concat(partsOf(taken?.body ?? new Uint8Array())).toString()).toBe("late");
}, 60_000);
