// What taking a block of calls promises, the same on every kind of store and for several replicas at once.
import { expect, test } from "bun:test";
import fc from "fast-check";
import { accepted, counted } from "../../../../test/support/stores/invocations.ts";
import { eachStore, useStore } from "../../../../test/support/stores/one-store.ts";
import type { Place } from "../../../../test/support/stores/stores.ts";
import type { Store } from "../../../storage/store.ts";
import { findInvocation } from "../history.ts";
import { type AcceptedCall, accept, endOpen, finish, holdsClaim, type InvocationRow } from "../service.ts";
import { SMALL_BODY_BYTES } from "./accept.ts";
import { type Taking, takeCommand, YOUNG_MS } from "./queue.ts";

const NOW = 1_790_000_000_000;
const times = <T>(n: number, make: (i: number) => T): T[] => Array.from({ length: n }, (_, i) => make(i));
const tokens = (n: number) => times(n, () => crypto.randomUUID());
const idOf = ({ row }: AcceptedCall) => row.id;

eachStore((makePlace, dialect) => {
  let place: Place;
  let store: Store;
  useStore(makePlace, (opened) => {
    ({ place, store } = opened);
  });
  let made = 0;
  /** An agent of its own for each test. */
  const newAgent = () => `agt_${dialect}_${++made}`;
  const take = (agent_id: string, places: number, more: Partial<Taking> = {}) =>
    store.execute(takeCommand, {
      ...{ tenant: "acme", agent_id, owner: "rep_1", tokens: tokens(places), now: NOW, after: "", leftOut: [] },
      ...more,
    });
  const put = async (fields: Partial<InvocationRow>, body?: Uint8Array): Promise<AcceptedCall> => {
    const one = accepted(NOW, fields);
    const call = body === undefined ? one : { ...one, body, row: { ...one.row, req_size: body.byteLength } };
    await accept(store, call);
    return call;
  };

  test("the oldest calls of an agent are taken whole, as many as there are tokens, each with one of its own", async () => {
    const agent_id = newAgent();
    const calls: AcceptedCall[] = [];
    for (let i = 0; i < 5; i++) calls.push(await put({ agent_id }, new TextEncoder().encode(`body ${i}`)));
    const running = await counted(store.read, "acme", "status", "running");
    const first = await take(agent_id, 3);
    expect(first.large).toBeNull();
    expect(first.taken.map(({ id, body }) => [id, new TextDecoder().decode(body)])).toEqual(
      calls.slice(0, 3).map((call, i) => [idOf(call), `body ${i}`]),
    );
    expect(first.taken.map(({ call }) => JSON.parse(call))).toEqual(calls.slice(0, 3).map(({ call }) => call));
    expect(new Set(first.taken.map(({ token }) => token)).size).toBe(3);
    for (const { id, token } of first.taken) {
      expect(await holdsClaim(store.read, { tenant: "acme", id }, token)).toBe(true);
    }
    expect(await counted(store.read, "acme", "status", "running")).toBe(running + 3);
    // What lies before is not looked at.
    expect(await take(agent_id, 10, { after: idOf(calls[4] as AcceptedCall) })).toEqual({ taken: [], large: null });
    const rest = await take(agent_id, 10, { after: first.taken[2]?.id ?? "" });
    expect(rest.taken.map(({ id }) => id)).toEqual(calls.slice(3).map(idOf));
    expect(await take(agent_id, 10)).toEqual({ taken: [], large: null });
    for (const { id, token } of [...first.taken, ...rest.taken]) {
      const own = { key: { tenant: "acme", id }, token, request_id: "r" };
      const ending = { status: "succeeded", error_class: null, upstream_status: 200, latency_ms: 1 } as const;
      const none = { resp_size: null, resp_sha256: null, response: null, response_truncated: false };
      expect(await finish(store, own, { ...ending, ...none, response_content_type: null }, NOW)).toBe(true);
    }
  });

  test("a block ends behind calls that are a lot to read, and tells the next one", async () => {
    const agent_id = newAgent();
    const calls: AcceptedCall[] = [];
    for (let i = 0; i < 40; i++) calls.push(await put({ agent_id }, new Uint8Array(SMALL_BODY_BYTES)));
    const { taken, large } = await take(agent_id, 40);
    expect(taken.map(({ id }) => id)).toEqual(calls.slice(0, taken.length).map(idOf));
    expect(taken.length).toBeGreaterThan(12);
    expect(taken.length).toBeLessThan(20);
    expect(large).toEqual({ id: idOf(calls[taken.length] as AcceptedCall), body_bytes: SMALL_BODY_BYTES });
  });

  test("a call with a large body is told of and not taken, and neither are those behind it", async () => {
    const agent_id = newAgent();
    const small = await put({ agent_id });
    const large = await put({ agent_id }, new Uint8Array(SMALL_BODY_BYTES + 1));
    for (const body of [undefined, new Uint8Array(SMALL_BODY_BYTES + 2)]) await put({ agent_id }, body);
    const next = { id: idOf(large), body_bytes: SMALL_BODY_BYTES + 1 };
    const block = await take(agent_id, 10);
    expect([block.taken.map(({ id }) => id), block.large]).toEqual([[idOf(small)], next]);
    expect(await take(agent_id, 1)).toEqual({ taken: [], large: next });
    expect((await findInvocation(store.read, "acme", next.id)).status).toBe("pending");
  });

  test("calls that are another's to make, or nobody's yet, are passed over", async () => {
    const agent_id = newAgent();
    await store.write(({ db, tables: { processes } }) =>
      db.insert(processes).values({ id: "rep_alive", kind: "gateway", lease_until: NOW }).onConflictDoNothing(),
    );
    const others = [
      await put({ agent_id, tenant: "rival" }),
      await put({ agent_id, mode: "streaming" }),
      await put({ agent_id, settlement_status: "pending" }),
      await put({ agent_id, accepted_by: "rep_alive" }),
    ];
    const refused = await put({ agent_id });
    await store.write(({ db, tables: { refusedCalls } }) =>
      db.insert(refusedCalls).values({ tenant: "acme", id: idOf(refused), claim: null, created_at: NOW }),
    );
    const leftOut = await put({ agent_id });
    const cancelled = await put({ agent_id });
    await endOpen(store, { tenant: "acme", id: idOf(cancelled) }, "cancelled", NOW);
    const own = [await put({ agent_id, accepted_by: "rep_1" }), await put({ agent_id, accepted_by: "rep_gone" })];
    const { taken } = await take(agent_id, 10, { leftOut: [idOf(leftOut), "inv_other"] });
    expect(taken.map(({ id }) => id)).toEqual(own.map(idOf));
    const later = await take(agent_id, 10, { now: NOW + YOUNG_MS + 1, leftOut: [idOf(leftOut)] });
    expect(later.taken.map(({ id }) => id)).toEqual([idOf(others[3] as AcceptedCall)]);
  });

  test("however many take from a backlog at once, each call is taken once, and the totals hold", async () => {
    // On SQLite one process has the database.
    const other = dialect === "sqlite" ? store : await place.open();
    const plan = fc.array(fc.record({ places: fc.integer({ min: 1, max: 9 }), agent: fc.nat(2) }), { maxLength: 24 });
    await fc.assert(
      fc.asyncProperty(plan, fc.nat(40), async (blocks, count) => {
        const tenant = `many_${crypto.randomUUID()}`;
        const agents = times(3, newAgent);
        const calls = times(count, (i) => accepted(NOW, { tenant, agent_id: agents[i % 3] as string }));
        await Promise.all(calls.map((call) => accept(store, call)));
        const taken = await Promise.all(
          blocks.map(({ places, agent }, at) =>
            (at % 2 === 0 ? store : other).execute(takeCommand, {
              ...{
                tenant,
                agent_id: agents[agent] as string,
                owner: `rep_${at % 2}`,
                now: NOW,
                after: "",
                leftOut: [],
              },
              tokens: tokens(places),
            }),
          ),
        );
        const ids = taken.flatMap((block) => block.taken.map(({ id }) => id));
        expect(new Set(ids).size).toBe(ids.length);
        for (const [at, block] of taken.entries()) {
          expect(block.taken.length).toBeLessThanOrEqual(blocks[at]?.places ?? 0);
          expect(block.taken.map(({ id }) => id)).toEqual(block.taken.map(({ id }) => id).toSorted());
        }
        const total = (status: string) => counted(store.read, tenant, "status", status);
        expect([await total("pending"), await total("running")]).toEqual([count - ids.length, ids.length]);
        // What others had locked is still there for the next.
        const rest = await Promise.all(
          agents.map((agent_id) =>
            store.execute(takeCommand, {
              ...{ tenant, agent_id, owner: "rep_0", tokens: tokens(50), now: NOW, after: "", leftOut: [] },
            }),
          ),
        );
        const all = [...ids, ...rest.flatMap((block) => block.taken.map(({ id }) => id))];
        expect(all.toSorted()).toEqual(calls.map(idOf).toSorted());
      }),
      { numRuns: 8 },
    );
    if (other !== store) await other.close();
  });
});
