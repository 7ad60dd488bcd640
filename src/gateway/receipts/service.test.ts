import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { eq, sql } from "drizzle-orm";
import { onlyMasterKey } from "../../../test/support/keys.ts";
import { accepted, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { places } from "../../../test/support/stores/stores.ts";
import { until } from "../../../test/support/until.ts";
import type { Caller } from "../../core/call.ts";
import { silentLog } from "../../core/log.ts";
import { newKey } from "../../keys/envelope.ts";
import { type Keyring, openKeyring } from "../../keys/keyring.ts";
import type { Store } from "../../storage/store.ts";
import { cleanUp } from "../invocations/retention.ts";
import {
  accept,
  claim,
  collectSettlement,
  endOpen,
  finish,
  type InvocationRow,
  refuseSettlement,
} from "../invocations/service.ts";
import { createReceiptChain, type ReceiptClaims, receiptKeys } from "./claims.ts";
import { createReceipts, type Receipts } from "./service.ts";
import { removeOldReceipts } from "./store.ts";

const DAY_MS = 86_400_000;
const AGENT = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
const clock = { time: 1_790_000_000_000, now: () => clock.time };
const sha256 = (text: string) => createHash("sha256").update(text).digest("hex");
const claimsOf = (jws: string): ReceiptClaims =>
  JSON.parse(Buffer.from(jws.split(".")[1] ?? "", "base64url").toString());

let serial = 0;

describe.each(Object.entries(places))("on %s", (dialect, makePlace) => {
  const masterKey = newKey();
  let place: Awaited<ReturnType<typeof makePlace>>;
  let store: Store;
  let keyring: Keyring;
  let receipts: Receipts;

  const serve = (on: Store, keys: Keyring, replica = "rep_1") =>
    createReceipts({
      ...{ store: on, clock, log: silentLog, replica, confirm: async () => false },
      signingKey: () => keys.signingKey("receipts"),
    });

  beforeAll(async () => {
    place = await makePlace();
    store = await place.open();
    keyring = await openKeyring(store, onlyMasterKey(masterKey), clock);
    receipts = serve(store, keyring);
  });

  afterAll(async () => {
    await store.close();
    place.remove();
  });

  type Key = { readonly tenant: string; readonly id: string };

  const newTenant = (): Caller => ({ tenant: `tenant-${++serial}`, user: "alice", scopes: new Set() });
  const put = async ({ tenant }: Caller, fields: Partial<InvocationRow> = {}): Promise<Key> => {
    const shared = { tenant, agent_id: AGENT, outbox: "receipt", req_sha256: sha256("hello") };
    const one = accepted(clock.now(), { ...shared, ...fields });
    await store.write((tx) => accept(tx, one));
    return { tenant, id: one.row.id };
  };
  const take = (key: Key) => store.write((tx) => claim(tx, { key, owner: "r", token: "t", now: clock.now() }));
  const end = async (key: Key, ending = SUCCESS) => {
    await take(key);
    const hashed = { ...ending, resp_sha256: sha256("world") };
    await store.write((tx) => finish(tx, { key, token: "t", request_id: "req" }, hashed, clock.now()));
    return key;
  };
  const call = async (caller: Caller, fields?: Partial<InvocationRow>) => end(await put(caller, fields));
  const cancel = (key: Key) => store.write((tx) => endOpen(tx, key, "cancelled", clock.now()));
  const all = async (caller: Caller) => receipts.page(caller, { limit: 100_000, offset: 0 });
  const breaks = async (lines: readonly string[], keys = keyring) => {
    const known = await receiptKeys(keys.publicJwks());
    if (known === null) throw new Error("no keys");
    const chain = createReceiptChain(known);
    const found = [];
    for (const line of lines) found.push(await chain.take(line));
    return found.filter((one) => one !== null);
  };
  const owed = async ({ tenant }: Caller) => {
    const { outbox: t } = store.read.tables;
    const [row] = await store.read.db
      .select({ count: sql`count(*)`.mapWith(Number) })
      .from(t)
      .where(eq(t.tenant, tenant));
    return row?.count;
  };

  test("an ended call has a receipt that says what it was, at once", async () => {
    const caller = newTenant();
    const { id } = await call(caller);
    const jws = await receipts.find(caller, id);
    const { kid } = keyring.signingKey("receipts");
    expect(JSON.parse(Buffer.from(jws.split(".")[0] ?? "", "base64url").toString())).toEqual({
      alg: "EdDSA",
      kid,
      typ: "receipt+jwt",
    });
    expect(claimsOf(jws)).toEqual({
      receipt_id: expect.stringMatching(/^rcpt_/),
      tenant: caller.tenant,
      agent_id: AGENT,
      invocation_id: id,
      caller: "alice",
      mode: "transactional",
      status: "succeeded",
      error_class: null,
      upstream_status: 200,
      created_at: new Date(clock.time).toISOString(),
      completed_at: new Date(clock.time).toISOString(),
      latency_ms: 5,
      req_size: 5,
      resp_size: 5,
      req_sha256: sha256("hello"),
      resp_sha256: sha256("world"),
      payment: null,
      settlement: null,
      previous: null,
    });
    expect(await breaks([jws])).toEqual([]);
  });

  test("each call that has ended has one receipt, whatever its end; one that has not ended or wants none has none", async () => {
    const caller = newTenant();
    const failure = { ...SUCCESS, status: "failed", error_class: "timeout", response: null } as const;
    const pending = await put(caller);
    const running = await put(caller);
    await take(running);
    const quiet = await call(caller, { outbox: null, req_sha256: null });
    const ids = [
      (await call(caller)).id,
      (await end(await put(caller), failure)).id,
      (await put(caller)).id,
      (await put(caller)).id,
    ];
    await cancel({ tenant: caller.tenant, id: ids[2] ?? "" });
    await take({ tenant: caller.tenant, id: ids[3] ?? "" });
    await cancel({ tenant: caller.tenant, id: ids[3] ?? "" });
    const lines = await all(caller);
    expect(lines.map((line) => claimsOf(line).invocation_id)).toEqual(ids);
    expect(lines.map((line) => claimsOf(line).error_class)).toEqual([null, "timeout", "cancelled", "cancelled"]);
    expect(await breaks(lines)).toEqual([]);
    for (const { id } of [pending, running, quiet]) {
      expect(receipts.find(caller, id)).rejects.toMatchObject({ kind: "not_found" });
    }
    expect(receipts.find(newTenant(), ids[0] ?? "")).rejects.toMatchObject({ kind: "not_found" });
    expect(receipts.find(caller, "inv_\0")).rejects.toMatchObject({ kind: "not_found" });
  });

  const PAID = {
    payment_network: "base",
    payment_asset: "USDC",
    payment_amount: "10000",
    payment_payer: `0x${"ab".repeat(20)}`,
    payment_nonce: `0x${"cd".repeat(32)}`,
    settlement_status: "pending",
    settlement: JSON.stringify({ attempts: 1 }),
  } as const;
  const COLLECTED = { tx_hash: `0x${"01".repeat(32)}`, settled_amount: "10000", operator_amount: "10000" };

  test("a receipt waits for the outcome of the payment, and says it", async () => {
    const caller = newTenant();
    const [declined, late, refusedLate, paid] = [
      await put(caller, PAID),
      await put(caller, PAID),
      await put(caller, PAID),
      await put(caller, PAID),
    ];
    await cancel(late);
    await cancel(refusedLate);
    expect(await all(caller)).toEqual([]);
    expect(receipts.find(caller, late.id)).rejects.toMatchObject({ kind: "not_found" });

    const settled = JSON.stringify({ attempts: 2, ...COLLECTED });
    const refused = JSON.stringify({ attempts: 1, reason: "declined" });
    await store.write((tx) => refuseSettlement(tx, declined, refused, clock.now()));
    await store.write((tx) => collectSettlement(tx, late, settled, clock.now()));
    await store.write((tx) => refuseSettlement(tx, refusedLate, refused, clock.now()));
    await store.write((tx) => collectSettlement(tx, paid, settled, clock.now()));
    await end(paid, { ...SUCCESS, status: "failed", error_class: "upstream_5xx" });

    const lines = await all(caller);
    const told = Object.fromEntries(lines.map(claimsOf).map(({ invocation_id: id, settlement }) => [id, settlement]));
    expect(told).toEqual({
      [declined.id]: { status: "settlement_failed", attempts: 1, reason: "declined" },
      [late.id]: { status: "settled_upstream_failed", attempts: 2, ...COLLECTED },
      [refusedLate.id]: { status: "settlement_failed", attempts: 1, reason: "declined" },
      [paid.id]: { status: "settled_upstream_failed", attempts: 2, ...COLLECTED },
    });
    for (const line of lines) {
      expect(claimsOf(line).payment).toEqual({
        network: "base",
        asset: "USDC",
        amount: "10000",
        payer: PAID.payment_payer,
        nonce: PAID.payment_nonce,
      });
    }
    expect(await breaks(lines)).toEqual([]);
    expect(await owed(caller)).toBe(0);
  });

  test("two replicas and many calls at once make one chain, with each call once", async () => {
    const other = await place.open();
    try {
      const twin = serve(other, await openKeyring(other, onlyMasterKey(masterKey), clock), "rep_2");
      receipts.start();
      twin.start();
      const caller = newTenant();
      const ids = Array.from({ length: 400 }, () => call(caller).then(({ id }) => id));
      const asked = ids.map(async (id, at) => (at % 2 === 0 ? receipts : twin).find(caller, await id));
      const seen = await Promise.all(asked);
      await Promise.all([twin.stop(), receipts.stop()]);
      const lines = await all(caller);
      expect(lines.length).toBe(400);
      expect(new Set(lines)).toEqual(new Set(seen));
      expect(lines.map((line) => claimsOf(line).invocation_id).sort()).toEqual((await Promise.all(ids)).sort());
      expect(await breaks(lines)).toEqual([]);
      expect(await owed(caller)).toBe(0);
    } finally {
      await other.close();
      receipts = serve(store, keyring);
    }
  });

  // SQLite has one process.
  if (dialect === "postgres")
    test("of two replicas one makes the receipts, and the other goes on when that has stopped", async () => {
      const signed = { one: 0, other: 0 };
      const counting = (name: keyof typeof signed) =>
        createReceipts({
          ...{ store, clock, log: silentLog, replica: `rep_${name}`, confirm: async () => false },
          signingKey() {
            signed[name]++;
            return keyring.signingKey("receipts");
          },
        });
      const [one, other] = [counting("one"), counting("other")];
      const made = async (caller: Caller) => {
        await call(caller);
        await until(async () => (await owed(caller)) === 0);
      };
      one.start();
      await made(newTenant());
      other.start();
      const caller = newTenant();
      for (let n = 0; n < 8; n++) await made(caller);
      expect(signed).toEqual({ one: expect.any(Number), other: 0 });
      const before = signed.one;
      await one.stop();
      await made(newTenant());
      expect({ ...signed, one: signed.one - before }).toEqual({ one: 0, other: 1 });
      await other.stop();
    });

  test("each tenant has a chain of receipts of its own, and its pages are parts of one export", async () => {
    const [one, two] = [newTenant(), newTenant()];
    for (let n = 0; n < 7; n++) {
      await call(one);
      await call(two);
    }
    const [lines, others] = [await all(one), await all(two)];
    expect([claimsOf(lines[0] ?? "").previous, claimsOf(others[0] ?? "").previous]).toEqual([null, null]);
    const pages = [];
    for (const offset of [0, 3, 6, 9]) pages.push(await receipts.page(one, { limit: 3, offset }));
    expect(pages.map((page) => page.length)).toEqual([3, 3, 1, 0]);
    expect(pages.flat()).toEqual(lines);
    expect(await receipts.page(one, { limit: 3, offset: Number.MAX_SAFE_INTEGER })).toEqual([]);
    expect(await breaks([...lines, ...others])).toHaveLength(7);
  });

  test("receipts that a process still owed when it ended are written at the next start", async () => {
    const caller = newTenant();
    const { id } = await call(caller);
    expect(await owed(caller)).toBe(1);
    const next = serve(store, keyring);
    next.start();
    await next.stop();
    expect(await owed(caller)).toBe(0);
    expect(claimsOf(await receipts.find(caller, id)).invocation_id).toBe(id);
  });

  test("tenants whose receipts can't be made hold up nobody behind them, however many they are", async () => {
    // The first by name, and as many as get their receipts made at once.
    const broken = { settlement_status: "settled", settlement: "{" } as const;
    const failing = Array.from({ length: 16 }, (_, n) => ({ ...newTenant(), tenant: `a-${serial}-${n}` }));
    for (const each of failing) await call(each, broken);
    const behind = newTenant();
    await call(behind);
    const next = serve(store, keyring);
    next.start();
    await next.stop();
    expect([await owed(behind), await owed(failing[0] ?? behind)]).toEqual([0, 1]);
    await place.execute("delete from outbox");
  });

  test("a new signing key goes on with the chain, and the old receipts still hold", async () => {
    const caller = newTenant();
    await call(caller);
    await all(caller);
    const first = keyring.signingKey("receipts").kid;
    await place.execute(`update signing_keys set retired_at = 1 where purpose = 'receipts'`);
    keyring = await openKeyring(store, onlyMasterKey(masterKey), clock);
    receipts = serve(store, keyring);
    await call(caller);
    const lines = await all(caller);
    expect(lines).toHaveLength(2);
    expect(keyring.signingKey("receipts").kid).not.toBe(first);
    expect(await breaks(lines)).toEqual([]);
  });

  test("clean-up takes the oldest receipts, and never the record of a call that is owed one", async () => {
    const caller = newTenant();
    await call(caller);
    await call(caller);
    await all(caller);
    clock.time += 3 * DAY_MS;
    await call(caller);
    await all(caller);
    const owing = await call(caller);
    clock.time += 3 * DAY_MS;
    await cleanUp(store, clock, { body_days: 1, history_days: 5 }, silentLog);
    expect(await removeOldReceipts(store, clock, 0)).toBe(0);
    await removeOldReceipts(store, clock, 5);
    const left = await all(caller);
    expect(left).toHaveLength(2);
    expect(claimsOf(left[1] ?? "").invocation_id).toBe(owing.id);
    expect(claimsOf(left[0] ?? "").previous).toMatch(/^[0-9a-f]{64}$/);
    expect(await breaks(left)).toEqual([]);
    clock.time += 20 * DAY_MS;
    await removeOldReceipts(store, clock, 5);
    await call(caller);
    expect(claimsOf((await all(caller))[0] ?? "").previous).toBe(sha256(left[1] ?? ""));

    const late = await call(caller);
    clock.time += 20 * DAY_MS;
    await cleanUp(store, clock, { body_days: 1, history_days: 5 }, silentLog);
    expect(claimsOf(await receipts.find(caller, late.id)).invocation_id).toBe(late.id);
  });
});
