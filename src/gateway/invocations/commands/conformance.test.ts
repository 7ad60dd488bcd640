// What the commands of a call promise, the same on every kind of store: alone, many at once, and when some of them fail.
import { expect, test } from "bun:test";
import { and, eq, inArray, lt, sql } from "drizzle-orm";
import fc from "fast-check";
import type { CountDimension, Tables } from "../../../../db/schema.ts";
import { accepted, counted, SUCCESS } from "../../../../test/support/stores/invocations.ts";
import { eachStore, useStore } from "../../../../test/support/stores/one-store.ts";
import type { Place } from "../../../../test/support/stores/stores.ts";
import { until } from "../../../../test/support/until.ts";
import type { CallEnd } from "../../../core/call.ts";
import { Fault } from "../../../core/fault.ts";
import { newId } from "../../../core/id.ts";
import { IDEMPOTENCY_HOURS } from "../../../kernel/limits.ts";
import { type Store, UniqueViolation } from "../../../storage/store.ts";
import { bodyPartsOf, PART_BYTES } from "../../../wire/body.ts";
import { REMOVED_PARTS_AT_ONCE, removeOrphanedParts, storePartCommand } from "../bodies.ts";
import { capturedBody, findInvocation } from "../history.ts";
import {
  type AcceptedCall,
  accept,
  claim,
  type Ending,
  endOpen,
  endPending,
  finish,
  type InvocationKey,
  type InvocationRow,
} from "../service.ts";
import { acceptInPartsCommand, SMALL_BODY_BYTES } from "./accept.ts";

const NOW = 1_790_000_000_000;
const KEY_MS = IDEMPOTENCY_HOURS * 3_600_000;
const MIB = 1024 * 1024;

const keyOf = ({ row: { tenant, id } }: AcceptedCall): InvocationKey => ({ tenant, id });
const call = (fields: Partial<InvocationRow> = {}) => accepted(NOW, fields);
const withBody = (body: Uint8Array, fields: Partial<InvocationRow> = {}): AcceptedCall => ({
  ...call({ req_size: body.byteLength, ...fields }),
  body,
});
const withKey = (
  key: string,
  body_sha256 = "s",
  asked_at = NOW,
  fields: Partial<InvocationRow> = {},
): AcceptedCall => ({
  ...call({ tenant: "keys", ...fields }),
  idempotency: { key, body_sha256, asked_at, latest: asked_at },
});
const take = (store: Store, key: InvocationKey, token = "token") =>
  claim(store, { key, owner: "rep_1", token, now: NOW + 1 });
const end = (store: Store, key: InvocationKey, ending: Ending = SUCCESS, token = "token") =>
  finish(store, { key, token, request_id: "req" }, ending, NOW + 2);
const times = <T>(n: number, make: (i: number) => T): T[] => Array.from({ length: n }, (_, i) => make(i));
const reasonOf = (promise: Promise<unknown>) =>
  promise.then(
    () => null,
    (error: unknown) => error,
  );

/** Of a length that divides no limit, so that a part in a wrong place shows. */
const PATTERN = Uint8Array.from({ length: 65_521 }, (_, i) => (i * 7 + (i >> 8)) % 256);

/** Bytes that no encoding of text would bring back. */
function bytes(length: number): Uint8Array {
  return Buffer.alloc(length, PATTERN);
}

const PAID: Partial<InvocationRow> = {
  payment_network: "base",
  payment_asset: "USDC",
  payment_amount: "340282366920938463463374607431768211455",
  payment_payer: `0x${"11".repeat(20)}`,
  settlement_status: "settled",
};

/** What a header or JSON can hold, and what the text of an array of Postgres or of SQL would trip over. */
const anyText = fc.oneof(
  fc.constantFrom(
    "",
    "NULL",
    "null",
    "{}",
    "{a,b}",
    '"',
    '\\"',
    "\\",
    "\\x00",
    "a,b",
    "'",
    "''; --",
    " ",
    "\t\r\n",
    "%_",
  ),
  fc.string({ unit: "grapheme", maxLength: 12 }).filter((text) => !text.includes("\0")),
  fc.string({ unit: fc.constantFrom(..."\\\"'{},NUL \t\n\r\u0001\u001f\u007f\u0085\u2028é😀"), maxLength: 12 }),
);

eachStore((makePlace, dialect) => {
  let place: Place;
  let store: Store;
  useStore(makePlace, (opened) => {
    ({ place, store } = opened);
  });
  const find = ({ tenant, id }: InvocationKey) => findInvocation(store.read, tenant, id);

  test("behind thousands of another tenant a call is accepted, claimed and ended with the next that are written", async () => {
    const own = call({ tenant: "neighbour" });
    const waiting = 6_000;
    const accepting: Promise<unknown>[] = [];
    let stored = 0;
    for (const step of [() => accept(store, own), () => take(store, keyOf(own)), () => end(store, keyOf(own))]) {
      const missing = times(waiting - (accepting.length - stored), () => call({ tenant: "hostile" }));
      accepting.push(...missing.map((each) => accept(store, each).then(() => stored++)));
      const before = stored;
      await step();
      // Several commits may be under way at once, and end before it. In the order of arrival it would come after all.
      expect(stored - before).toBeLessThan(0.9 * waiting);
    }
    expect(await find(keyOf(own))).toMatchObject({ status: "succeeded" });
    await Promise.all(accepting);
  });

  test("of many calls with one idempotency key one is stored, and all are told its ID, but for another body", async () => {
    const [same, others] = [times(40, () => withKey("k")), times(10, () => withKey("k", "other"))];
    const first = await accept(store, same[0]!);
    const settled = await Promise.allSettled([...same.slice(1), ...others].map((each) => accept(store, each)));
    expect(settled.slice(0, 39).map((each) => (each.status === "fulfilled" ? each.value : each.reason))).toEqual(
      times(39, () => first),
    );
    for (const each of settled.slice(39)) expect(each).toMatchObject({ reason: { kind: "conflict" } });
    expect(await take(store, keyOf(same[0]!))).not.toBeNull();
    for (const lost of [...same.slice(1), ...others])
      expect(await reasonOf(find(keyOf(lost)))).toMatchObject({ kind: "not_found" });

    const raced = await Promise.all(times(40, () => withKey("raced")).map((each) => accept(store, each)));
    expect(new Set(raced).size).toBe(1);
  });

  test("a large call that is stored once more, since the earlier one in its way has gone, is to be sent again", async () => {
    const earlier = withKey("gone");
    await accept(store, earlier);
    const large = { ...withKey("gone"), body: new Uint8Array(1_300_000) };
    expect(await accept(store, large)).toBe(earlier.row.id);
    await store.write(async ({ db, tables: { idempotencyKeys: t } }) => {
      await db.delete(t).where(eq(t.invocation_id, earlier.row.id));
    });
    // Its parts are still being removed.
    expect(await reasonOf(accept(store, large))).toMatchObject({ kind: "unavailable" });
    expect(await removeOrphanedParts(store, () => false, Number.MAX_SAFE_INTEGER)).toBe(1);
  });

  test("the same key of another caller, agent or tenant is another key", async () => {
    const fields = [{}, { caller: "bob" }, { agent_id: "agt_b" }, { tenant: "other" }];
    const calls = fields.map((own) => withKey("shared", "s", NOW, own));
    expect(await Promise.all(calls.map((each) => accept(store, each)))).toEqual(calls.map(({ row }) => row.id));
  });

  test("an expired key is taken over by exactly one of many, and by none a millisecond earlier", async () => {
    const old = withKey("expired");
    await accept(store, old);
    const early = times(5, () => withKey("expired", "s", NOW + KEY_MS - 1));
    expect(new Set(await Promise.all(early.map((each) => accept(store, each))))).toEqual(new Set([old.row.id]));
    const late = times(40, () => withKey("expired", "new body", NOW + KEY_MS));
    const ids = new Set(await Promise.all(late.map((each) => accept(store, each))));
    expect(ids.size).toBe(1);
    expect(ids).not.toContain(old.row.id);
  });

  test("a key that has expired for its caller is free, whoever is stored at the same time", async () => {
    await accept(store, withKey("alone"));
    const [earlier, later] = [withKey("neighbour", "s", NOW), withKey("alone", "new body", NOW + KEY_MS)];
    expect(await Promise.all([accept(store, earlier), accept(store, later)])).toEqual([earlier.row.id, later.row.id]);
  });

  test("bodies of every size come back byte for byte, and their first MiB stays when the call has ended", async () => {
    const { orphanedParts, bodyParts } = store.read.tables;
    for (const size of [0, 1, 8_191, 8_192, 8_193, PART_BYTES, PART_BYTES + 1, MIB, MIB + 1, 4 * MIB]) {
      const body = bytes(size);
      const [captured, forgotten] = [withBody(body), withBody(body, { body_captured: false })];
      for (const each of [captured, forgotten]) expect(await accept(store, each)).toBe(each.row.id);
      for (const each of [captured, forgotten]) {
        const taken = await take(store, keyOf(each));
        expect([size, taken !== null && Buffer.compare(Buffer.concat(bodyPartsOf(taken.body)), body)]).toEqual([
          size,
          0,
        ]);
        expect(
          await end(store, keyOf(each), {
            ...SUCCESS,
            resp_size: size,
            response: each === captured ? body.subarray(0, MIB) : null,
          }),
        ).toBe(true);
      }
      for (const kind of ["request", "response"] as const) {
        const part = await capturedBody(store.read, await find(keyOf(captured)), kind);
        expect([size, part !== null && Buffer.compare(part, body.subarray(0, MIB))]).toEqual([size, 0]);
      }
      const { invocationBodies: t } = store.read.tables;
      const left = await store.read.db
        .select({ id: t.invocation_id })
        .from(t)
        .where(eq(t.invocation_id, forgotten.row.id));
      expect(left).toEqual([]);
      expect(await removeOrphanedParts(store)).toBe(size > MIB ? 2 : 0);
      const parts = await store.read.db
        .select({ id: bodyParts.invocation_id, kind: bodyParts.kind, n: bodyParts.n })
        .from(bodyParts)
        .where(inArray(bodyParts.invocation_id, [captured.row.id, forgotten.row.id]));
      const expected = size > SMALL_BODY_BYTES ? Math.ceil(Math.min(size, MIB) / PART_BYTES) : 0;
      for (const kind of ["request", "response"]) {
        const own = parts.filter((part) => part.kind === kind);
        expect(own).toEqual(times(expected, (n) => ({ id: captured.row.id, kind, n }) as (typeof own)[number]));
      }
      expect(await store.read.db.select().from(orphanedParts)).toEqual([]);
    }
  });

  if (dialect === "postgres")
    test("of two replicas that remove one body, none removes the note of it while parts are left", async () => {
      const { bodyParts: t, orphanedParts: notes } = store.read.tables;
      const call = withBody(bytes(6 * PART_BYTES), { body_captured: false });
      await accept(store, call);
      expect(await take(store, keyOf(call))).not.toBeNull();
      await end(store, keyOf(call));
      const [begun, gone] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
      const other = await place.open();
      const removing = other.write(async ({ db }) => {
        await db.delete(t).where(and(eq(t.invocation_id, call.row.id), lt(t.n, REMOVED_PARTS_AT_ONCE)));
        begun.resolve();
        await gone.promise;
      });
      await begun.promise;
      const behind = removeOrphanedParts(store);
      const isWaiting = sql`datname = current_database() and wait_event_type = 'Lock'`;
      const waits = other.read.db.select({ n: sql`1` }).from(sql`pg_stat_activity`).where(isWaiting);
      await until(async () => (await waits).length > 0, 5_000).finally(gone.resolve);
      await Promise.all([removing, behind]);
      await other.close();
      const parts = await store.read.db.select({ n: t.n }).from(t).where(eq(t.invocation_id, call.row.id));
      expect(await store.read.db.select().from(notes)).toHaveLength(parts.length > 0 ? 1 : 0);
      await removeOrphanedParts(store);
      expect(await store.read.db.select().from(notes)).toEqual([]);
    });

  test("of a streamed call only the start is stored, which whoever resumes it does not need whole", async () => {
    const streamed = withBody(bytes(MIB), { mode: "streaming", req_size: 5 * MIB });
    await accept(store, streamed);
    expect((await take(store, keyOf(streamed)))?.body.byteLength).toBe(MIB);
    await end(store, keyOf(streamed));
    const request = await capturedBody(store.read, await find(keyOf(streamed)), "request");
    expect(request !== null && Buffer.compare(request, bytes(MIB))).toBe(0);
    expect(await removeOrphanedParts(store)).toBe(0);
  });

  test("the parts of a body that no call was accepted with are removed, and no call is accepted with them later", async () => {
    const { bodyParts, orphanedParts } = store.read.tables;
    const partsOfCall = async ({ row }: AcceptedCall) =>
      (await store.read.db.select({ n: bodyParts.n }).from(bodyParts).where(eq(bodyParts.invocation_id, row.id)))
        .length;
    const large = (key: string) => ({ ...withKey(key), body: bytes(3 * MIB) });
    const [first, second] = [large("large"), large("large")];
    expect(await accept(store, first)).toBe(first.row.id);
    // Another call has its key.
    expect(await accept(store, second)).toBe(first.row.id);
    const failing = withBody(bytes(2 * MIB));
    const failure = new Error("no");
    expect(await reasonOf(accept(store, failing, null, () => Promise.reject(failure)))).toBe(failure);
    // As after a kill: the parts are there, and nobody is about to accept the call.
    const [killed, late] = [withBody(bytes(2 * MIB)), withBody(bytes(2 * MIB))];
    for (const each of [killed, late]) {
      for (const n of [0, 1]) {
        const part = { key: keyOf(each), n, bytes: bytes(10), dueAt: store.clock.now() + 60_000 };
        expect(await store.execute(storePartCommand, part)).toBe(true);
      }
    }
    expect(await removeOrphanedParts(store)).toBeGreaterThanOrEqual(0);
    expect(await Promise.all([killed, late].map(partsOfCall))).toEqual([2, 2]);
    expect(await removeOrphanedParts(store, undefined, store.clock.now() + 1_200_000)).toBeGreaterThanOrEqual(2);
    for (const each of [second, failing, killed, late]) expect(await partsOfCall(each)).toBe(0);
    expect(await store.read.db.select().from(orphanedParts)).toEqual([]);
    const accepting = { row: late.row, call: "{}", body: late.body, idempotency: null, claim: null };
    const refused = await store.execute(acceptInPartsCommand, accepting).catch((error) => error);
    expect(refused === false || (refused instanceof Fault && refused.kind === "unavailable")).toBe(true);
    expect(await reasonOf(find(keyOf(late)))).toMatchObject({ kind: "not_found" });
    const next = { key: keyOf(late), n: 2, bytes: bytes(10), dueAt: store.clock.now() };
    expect(await store.execute(storePartCommand, next)).toBe(false);
    expect(await partsOfCall(first)).toBe((3 * MIB) / PART_BYTES);
  });

  test("any text comes back as it was, to the claimer, in the history and to the listeners", async () => {
    const own = await place.open();
    const told = new Map<string, CallEnd>();
    own.onCallEnded((each) => told.set(each.invocation_id, each));
    const fields = fc.record({ text: anyText, other: fc.option(anyText), header: anyText });
    await fc.assert(
      fc.asyncProperty(fc.array(fields, { minLength: 1, maxLength: 20 }), async (all) => {
        await Promise.all(
          all.map(async ({ text, other, header }) => {
            const plain = call({
              caller: text,
              model: other,
              mcp_method: other,
              mcp_tool: text,
              agent_id: `agt ${text}`,
            });
            const one = { ...plain, call: { ...plain.call, headers: [["x", header]] } } as AcceptedCall;
            await accept(own, one);
            const key = keyOf(one);
            expect((await take(own, key, `t ${text}`))?.call).toEqual(one.call);
            const ending = { ...SUCCESS, response_content_type: other, resp_sha256: text };
            expect(await end(own, key, ending, `t ${text}`)).toBe(true);
            const row = await findInvocation(own.read, key.tenant, key.id);
            expect(row).toMatchObject({
              ...{ caller: text, model: other, mcp_method: other, mcp_tool: text, agent_id: `agt ${text}` },
              ...{ response_content_type: other, resp_sha256: text, claim: `t ${text}` },
            });
            const seen = { caller: text, model: other, mcp_method: other, agent_id: `agt ${text}` };
            expect(told.get(key.id)).toMatchObject({ ...seen, response_content_type: other });
          }),
        );
      }),
      { numRuns: 15 },
    );
    await own.close();
  });

  test("a text with U+0000 harms nobody else", async () => {
    const [before, poisoned, after] = [call(), call({ model: "a\0b" }), call()];
    const [one, failed, two] = await Promise.allSettled([before, poisoned, after].map((each) => accept(store, each)));
    expect([one, two]).toMatchObject([{ value: before.row.id }, { value: after.row.id }]);
    if (dialect === "sqlite") expect((await find(keyOf(poisoned))).model).toBe("a\0b");
    else expect(failed).toMatchObject({ reason: { kind: "invalid_request" } });
  });

  test("a call that is accepted twice fails alone, and leaves the first as it was", async () => {
    const first = call({ model: "first" });
    await accept(store, first);
    const calls = times(200, () => call());
    const again = { ...withKey("of a failed call"), row: { ...first.row, model: "second" } };
    calls[77] = again;
    const ids = await Promise.allSettled(calls.map((each) => accept(store, each)));
    ids.forEach((each, i) => {
      if (i === 77) expect(each.status === "rejected" && each.reason).toBeInstanceOf(UniqueViolation);
      else expect(each).toEqual({ status: "fulfilled", value: calls[i]!.row.id });
    });
    expect((await find(keyOf(first))).model).toBe("first");
    for (const each of calls) expect((await find(keyOf(each))).status).toBe("pending");
    // What failed has taken no key.
    const next = withKey("of a failed call", "s", NOW, { tenant: first.row.tenant });
    expect(await accept(store, next)).toBe(next.row.id);
  });

  test("an accept with a claim is running, of that claim alone", async () => {
    const one = call();
    await accept(store, one, { owner: "rep_9", token: "mine" });
    expect(await find(keyOf(one))).toMatchObject({ status: "running", owner: "rep_9", claim: "mine" });
    expect(await take(store, keyOf(one), "other")).toBeNull();
    expect(await take(store, keyOf(one), "mine")).not.toBeNull();
  });

  test("a call is claimed by one of many, which may ask again, and by none of another tenant", async () => {
    const calls = times(20, () => withBody(bytes(9_000)));
    await Promise.all(calls.map((each) => accept(store, each)));
    expect(await Promise.all(calls.map(({ row }) => take(store, { tenant: "other", id: row.id })))).toEqual(
      times(20, () => null),
    );
    const claims = calls.flatMap((each) => times(5, (i) => ({ key: keyOf(each), token: `token ${i}` })));
    const taken = await Promise.all(claims.map(({ key, token }) => take(store, key, token)));
    for (const each of calls) {
      const own = claims.flatMap(({ key, token }, i) => (key.id === each.row.id && taken[i] !== null ? [token] : []));
      expect(own).toHaveLength(1);
      expect((await find(keyOf(each))).claim).toBe(own[0]!);
      const again = await Promise.all([take(store, keyOf(each), own[0]), take(store, keyOf(each), own[0])]);
      expect(again.map((one) => one?.body.byteLength)).toEqual([9_000, 9_000]);
    }
  });

  test("each claimer gets its own call", async () => {
    const calls = times(60, (i) => withBody(bytes(i * 300)));
    await Promise.all(calls.map((each) => accept(store, each)));
    const taken = await Promise.all(calls.toReversed().map((each) => take(store, keyOf(each))));
    expect(taken.toReversed().map((each) => each?.body.byteLength)).toEqual(calls.map(({ body }) => body.byteLength));
  });

  test("a call that was refused, or whose payment is open, or that has ended, is claimed by nobody", async () => {
    const [refused, unpaid, ended, free] = [call(), call({ ...PAID, settlement_status: "pending" }), call(), call()];
    const all = [refused, unpaid, ended, free];
    await Promise.all(all.map((each) => accept(store, each)));
    await store.write(({ db, tables }) =>
      db.insert(tables.refusedCalls).values({ ...keyOf(refused), claim: null, created_at: NOW }),
    );
    expect(await endPending(store, keyOf(ended), null, NOW)).toBe(true);
    const taken = await Promise.all(all.map((each) => take(store, keyOf(each))));
    expect(taken.map((each) => each !== null)).toEqual([false, false, false, true]);
    expect((await find(keyOf(unpaid))).status).toBe("pending");
  });

  test("every field of an ended call comes back, and its listeners are told the same", async () => {
    const own = await place.open();
    const told: CallEnd[] = [];
    own.onCallEnded((each) => told.push(each));
    const fields: Partial<InvocationRow> = {
      ...{ ...PAID, payment_nonce: `0x${"22".repeat(32)}`, settlement: '{"a":1}', mode: "streaming", model: "m" },
      ...{ mcp_method: "tools/call", mcp_tool: "t", req_size: 4_294_967_297, req_sha256: "in", accepted_by: "rep_0" },
      ...{ outbox: "receipt" },
    };
    const one = call(fields);
    await accept(own, one);
    await take(own, keyOf(one));
    const ending: Ending = {
      ...{ status: "failed", error_class: "upstream_5xx", error_detail: "connection_reset", upstream_status: 502 },
      ...{ latency_ms: 12, ttft_ms: 3, resp_size: 4_294_967_298, resp_sha256: "out", response: bytes(5) },
      ...{ response_truncated: true, response_content_type: "text/plain", detail: "why" },
    };
    expect(await end(own, keyOf(one), ending)).toBe(true);
    const { response, detail, ...recorded } = ending;
    const lost = "settled_upstream_failed";
    const row = await find(keyOf(one));
    expect(row).toEqual({
      ...{ ...one.row, ...fields, ...recorded, ttft_ms: 3, settlement_status: lost, owner: null, claim: "token" },
      ...{ outbox: null, updated_at: NOW + 2, completed_at: NOW + 2 },
    });
    const { agent_id, caller, mode, model, mcp_method, req_size } = row;
    const { resp_sha256, error_detail = null, ...said } = recorded;
    expect(told).toEqual([
      {
        ...{ tenant: one.row.tenant, invocation_id: one.row.id, agent_id, caller, mode, model, mcp_method, req_size },
        ...{ ...said, error_detail, ttft_ms: 3, request_id: "req", accepted_at: NOW, ended_at: NOW + 2, detail: "why" },
        payment: { network: "base", asset: "USDC", amount: PAID.payment_amount!, settlement_status: lost },
      },
    ]);
    await own.close();
  });

  test("a failed call that was paid for says both, is owed its receipt once, and frees its credential", async () => {
    const tenant = "paid";
    const one = call({ ...PAID, tenant, payment_nonce: "0x01", outbox: "receipt" });
    const open = call({ ...PAID, tenant, payment_nonce: "0x02", outbox: "receipt", settlement_status: "pending" });
    const calls = [one, open];
    await Promise.all(calls.map((each) => accept(store, each)));
    await store.write(async ({ db, tables }) => {
      for (const { row } of calls) await db.insert(tables.payments).values(payment(row));
    });
    expect(await Promise.all(calls.map((each) => endOpen(store, keyOf(each), "internal", NOW)))).toEqual([true, true]);
    expect(await endOpen(store, keyOf(one), "cancelled", NOW)).toBe(false);
    const { outbox: due, payments } = store.read.tables;
    const owed = await store.read.db.select({ id: due.invocation_id }).from(due).where(eq(due.tenant, tenant));
    expect(owed).toEqual([{ id: one.row.id }]);
    const left = await store.read.db.select({ ref: payments.call_credential_ref }).from(payments);
    expect(left).toEqual([{ ref: null }, { ref: null }]);
    const totals = await Promise.all(
      (["settled", "settled_upstream_failed", "pending"] as const).map((value) =>
        counted(store.read, tenant, "settlement", value),
      ),
    );
    expect(totals).toEqual([0, 1, 1]);
  });

  test("an end by another token changes nothing, and of the ends of one call at once one counts", async () => {
    const own = await place.open();
    const told: string[] = [];
    own.onCallEnded(({ invocation_id }) => told.push(invocation_id));
    const calls = times(15, () => call({ tenant: "ends" }));
    await Promise.all(calls.map((each) => accept(store, each, { owner: "rep_1", token: "token" })));
    expect(await Promise.all(calls.map((each) => end(own, keyOf(each), SUCCESS, "other")))).toEqual(
      times(15, () => false),
    );
    const foreign = calls.map(({ row }) => end(own, { tenant: "else", id: row.id }));
    expect(await Promise.all(foreign)).toEqual(times(15, () => false));
    for (const each of calls) expect((await find(keyOf(each))).status).toBe("running");
    expect(told).toEqual([]);
    const stores = [own, store, own, own];
    const ends = await Promise.all(stores.map((by) => Promise.all(calls.map((each) => end(by, keyOf(each))))));
    for (const i of calls.keys()) expect(ends.filter((each) => each[i])).toHaveLength(1);
    expect(await counted(store.read, "ends", "all", "")).toBe(15);
    const byOwn = calls.filter((_, i) => !ends[1]![i]).map(({ row }) => row.id);
    expect(told.toSorted()).toEqual(byOwn.toSorted());
    await own.close();
  });

  test("listeners are told of an end once it can be read, and before its caller", async () => {
    const own = await place.open();
    const [calls, looks, answered] = [
      times(30, () => call()),
      new Map<string, Promise<InvocationRow>>(),
      new Set<string>(),
    ];
    const early: string[] = [];
    own.onCallEnded(({ tenant, invocation_id: id }) => {
      if (answered.has(id)) early.push(id);
      looks.set(id, findInvocation(store.read, tenant, id));
    });
    await Promise.all(calls.map((each) => accept(own, each, { owner: "rep_1", token: "token" })));
    await Promise.all(calls.map((each) => end(own, keyOf(each)).then(() => answered.add(each.row.id))));
    for (const each of calls) expect((await looks.get(each.row.id))?.status).toBe("succeeded");
    expect(early).toEqual([]);
    await own.close();
  });

  test("commands within a write are stored with it, and undone with it", async () => {
    const own = await place.open();
    const told: string[] = [];
    own.onCallEnded(({ invocation_id }) => told.push(invocation_id));
    const all = async (one: AcceptedCall, fails: boolean) =>
      own.write(async (tx) => {
        await accept(tx, one);
        await claim(tx, { key: keyOf(one), owner: "rep_1", token: "token", now: NOW });
        await finish(tx, { key: keyOf(one), token: "token", request_id: "req" }, SUCCESS, NOW);
        await tx.db.insert(tx.tables.processes).values({ id: one.row.id, kind: "gateway", lease_until: 0 });
        if (fails) throw new Fault("conflict", "no");
      });
    const [kept, undone] = [
      withKey("of a write", "s", NOW, { tenant: "w" }),
      withKey("undone", "s", NOW, { tenant: "w" }),
    ];
    const neighbour = call({ tenant: "w" });
    await Promise.allSettled([all(kept, false), all(undone, true), accept(own, neighbour)]);
    expect(told).toEqual([kept.row.id]);
    expect(await reasonOf(find(keyOf(undone)))).toMatchObject({ kind: "not_found" });
    expect((await find(keyOf(kept))).status).toBe("succeeded");
    expect((await find(keyOf(neighbour))).status).toBe("pending");
    expect(await counted(store.read, "w", "status", "succeeded")).toBe(1);
    const again = withKey("undone", "s", NOW, { tenant: "w" });
    expect(await accept(own, again)).toBe(again.row.id);
    await own.close();
  });

  test("after any commands at once the calls and totals are as a model says, and each call is seen once throughout", async () => {
    const reader = await place.open();
    await fc.assert(
      fc.asyncProperty(fc.array(anyCall, { minLength: 1, maxLength: 30 }), async (plans) => {
        const tenant = crypto.randomUUID();
        const calls = plans.map(({ agent, model, paid }) =>
          call({ tenant, agent_id: agent, model, ...(paid && { ...PAID, payment_nonce: newId("inv", NOW) }) }),
        );
        await Promise.all(calls.map((each) => accept(store, each)));
        let isDone = false;
        const watching = (async () => {
          const { invocations: t } = reader.read.tables;
          while (!isDone) {
            // A read on SQLite lets nothing else run.
            await new Promise(setImmediate);
            const rows = await reader.read.db.select({ id: t.id }).from(t).where(eq(t.tenant, tenant));
            expect(rows.map(({ id }) => id).toSorted()).toEqual(calls.map(({ row }) => row.id).toSorted());
          }
        })();
        const ends = await Promise.all(
          plans.map(({ steps }, i) => Promise.all(steps.map((step) => perform(store, keyOf(calls[i]!), step)))),
        );
        isDone = true;
        await watching;
        await expectModel(store, tenant, plans, ends);
      }),
      { numRuns: 20 },
    );
    await reader.close();
  });
});

type Step = "claim" | "succeed" | "fail" | "cancel" | "withdraw";
interface Plan {
  readonly agent: string;
  readonly model: string | null;
  readonly paid: boolean;
  readonly steps: readonly Step[];
}

const anyCall: fc.Arbitrary<Plan> = fc.record({
  agent: fc.constantFrom("agt_1", "agt_2"),
  model: fc.constantFrom(null, "m", "n"),
  paid: fc.boolean(),
  steps: fc.array(fc.constantFrom<Step>("claim", "succeed", "fail", "cancel", "withdraw"), { maxLength: 5 }),
});

/** The state that the step ended the call with; null when it did not. */
async function perform(store: Store, key: InvocationKey, step: Step): Promise<string | null> {
  if (step === "claim") return take(store, key).then(() => null);
  if (step === "cancel") return (await endOpen(store, key, "cancelled", NOW)) ? "failed cancelled" : null;
  if (step === "withdraw") return (await endPending(store, key, "cancelled", NOW)) ? "failed cancelled" : null;
  if (step === "succeed") return (await end(store, key)) ? "succeeded null" : null;
  const failure: Ending = { ...SUCCESS, status: "failed", error_class: "upstream_5xx" };
  return (await end(store, key, failure)) ? "failed upstream_5xx" : null;
}

/** Each call is as the one step that ended it says, and every total is the count of those. */
async function expectModel(
  store: Store,
  tenant: string,
  plans: readonly Plan[],
  ends: (string | null)[][],
): Promise<void> {
  const expected = new Map<string, number>();
  const add = (dimension: string, value: string | null) => {
    if (value !== null) expected.set(`${dimension} ${value}`, (expected.get(`${dimension} ${value}`) ?? 0) + 1);
  };
  const states: string[] = [];
  plans.forEach(({ agent, model, paid, steps }, i) => {
    const [ended, ...more] = ends[i]!.filter((each): each is string => each !== null);
    expect(more).toEqual([]);
    if (steps.includes("cancel")) expect(ended).toBeDefined();
    const open = steps.includes("claim") ? "running" : "pending";
    const [status, error] = (ended ?? `${open} null`).split(" ") as [string, string];
    if (ended !== undefined) states.push(`${agent} ${model} ${ended} ${paid}`);
    add("all", "");
    add("agent", agent);
    add("mode", "transactional");
    add("status", status);
    add("model", model);
    add("error_class", error === "null" ? null : error);
    add("settlement", paid ? (status === "failed" ? "settled_upstream_failed" : "settled") : null);
  });
  const { endedInvocations: t, invocationCounts: c } = store.read.tables;
  const rows = await store.read.db.select().from(t).where(eq(t.tenant, tenant));
  const found = rows.map(
    (row) => `${row.agent_id} ${row.model} ${row.status} ${row.error_class} ${row.settlement_status !== null}`,
  );
  expect(found.toSorted()).toEqual(states.toSorted());
  const kept = await store.read.db
    .selectDistinct({ dimension: c.dimension, value: c.value })
    .from(c)
    .where(and(eq(c.tenant, tenant)));
  const totals = new Map<string, number>();
  for (const key of new Set([...expected.keys(), ...kept.map(({ dimension, value }) => `${dimension} ${value}`)])) {
    const [dimension, value] = key.split(" ") as [CountDimension, string];
    totals.set(key, await counted(store.read, tenant, dimension, value));
  }
  const left = [...totals].filter(([, count]) => count !== 0);
  expect(Object.fromEntries(left.toSorted())).toEqual(Object.fromEntries([...expected].toSorted()));
}

function payment({ tenant, id, agent_id, caller, payment_nonce }: InvocationRow): Tables["payments"]["$inferInsert"] {
  return {
    ...{
      chain_id: 1,
      token: "0x00",
      payer: "0x11",
      nonce: payment_nonce as `0x${string}`,
      tenant,
      invocation_id: id,
      agent_id,
      caller,
    },
    ...{ body_sha256: "s", authorization_digest: "d", x402_version: 2, valid_before: NOW },
    ...{ call_credential_ref: "crd_1", attempts: 0, unsent_attempts: 0, asked_ms: 0, created_at: NOW, updated_at: NOW },
  };
}
