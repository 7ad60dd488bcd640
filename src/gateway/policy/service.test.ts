import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { SQL } from "bun";
import fc from "fast-check";
import { type Place, places, postgresPlace } from "../../../test/support/stores/stores.ts";
import { atOnce } from "../../concurrency/steps.ts";
import type { Caller } from "../../core/caller.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import { type Log, silentLog } from "../../core/log.ts";
import { POLICY_ACTIONS, type PolicyAction } from "../../core/states.ts";
import type { Store } from "../../storage/store.ts";
import { findAgent } from "../agents/service.ts";
import { createPolicyCache } from "./cache.ts";
import { createDecisionLog, type DecisionRow, newestDecisions, removeOldDecisions } from "./decisions.ts";
import type { PolicyReplace, Rule } from "./document.ts";
import { compile, evaluate } from "./evaluate.ts";
import { createPolicyService, type PolicyCall, warningOf } from "./service.ts";

const clock = { time: 1_790_000_000_000, now: () => clock.time };
const AGENT = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
let serial = 0;

const document = (rules: Rule[] = [], changes: Partial<PolicyReplace> = {}): PolicyReplace => ({
  default: "allow",
  on_error: "warn",
  rules,
  ...changes,
});
const all = (action: PolicyAction): PolicyReplace => document([{ action, match: {} }]);

function caller() {
  const tenant = `tenant ${++serial}`;
  const call = (changes: Partial<PolicyCall> = {}): PolicyCall => ({
    ...{ tenant, user: "alice", agent_id: AGENT, protocol: "mcp" as const, mcp_tool: "read_file" },
    ...{ body_bytes: 10, ...changes },
  });
  return { tenant, me: { tenant, user: "alice", scopes: new Set<string>() }, call };
}

const faultOf = async (work: unknown) => {
  const error = await Promise.resolve(work).then(
    () => null,
    (thrown) => thrown,
  );
  expect(error).toBeInstanceOf(Fault);
  return error as Fault;
};

describe.each(Object.entries(places))("on %s", (dialect, makePlace) => {
  let place: Place;
  let store: Store;
  beforeAll(async () => {
    place = await makePlace();
    store = await place.open();
  }, 30_000);
  afterAll(async () => {
    await store?.close();
    place?.remove();
  });

  const service = (changes: { now?: () => number; log?: Log } = {}) =>
    createPolicyService({ store, clock, log: silentLog, ...changes });
  const read = async (policy: ReturnType<typeof service>, me: Caller) => {
    const found = await policy.get(me);
    if (found === null) return null;
    const { compiled, ...fields } = found;
    return { ...fields, rules: JSON.parse(found.rules) };
  };
  const stored = (tenant: string) => newestDecisions(store.read, tenant, 1_000_000);

  /** The store, but nobody hears how the write of this number ended. */
  function losingAnswer(number: number): Store {
    let writes = 0;
    const write: Store["write"] = async (work) => {
      const value = await store.write(work);
      if (++writes === number) throw new Fault("unavailable", "the answer was lost");
      return value;
    };
    return { ...store, write };
  }

  /** While `work` runs, the table is not there: the rest of the store works on. */
  async function without(table: string, work: () => Promise<void>): Promise<void> {
    await place.execute(`alter table ${table} rename to ${table}_away`);
    try {
      await work();
    } finally {
      await place.execute(`alter table ${table}_away rename to ${table}`);
    }
  }

  describe("a policy", () => {
    test("is none for a tenant that put none, and its calls leave no decision", async () => {
      const { me, call, tenant } = caller();
      const policy = service();
      expect(await policy.get(me)).toBeNull();
      expect(await policy.judge(call())).toBeNull();
      expect(await policy.deniedTools(tenant, AGENT)).toBeNull();
      expect(await policy.newest(me, 10)).toEqual([]);
    });

    test("is replaced as a whole, with versions from 1, each tenant's its own", async () => {
      const [one, other] = [caller(), caller()];
      const policy = service();
      const rules: Rule[] = [{ action: "deny", match: { tools: ["a*"], agents: [], max_body_bytes: 5 } }];
      expect(await policy.put(one.me, document(rules))).toEqual({ version: 1, updated_at: clock.time });
      expect(await read(policy, one.me)).toEqual({ version: 1, updated_at: clock.time, ...document(rules) });
      clock.time += 5;
      const next = document([], { default: "deny", on_error: "allow" });
      expect(await policy.put(one.me, next)).toEqual({ version: 2, updated_at: clock.time });
      expect(await read(policy, one.me)).toEqual({ version: 2, updated_at: clock.time, ...next });
      expect(await policy.get(other.me)).toBeNull();
      expect((await policy.put(other.me, next)).version).toBe(1);
    });

    test("gets a version for each replacement at once, on several replicas too", async () => {
      const { me } = caller();
      const replicas = [service(), service()];
      const puts = Array.from({ length: 40 }, (_, at) => replicas[at % 2]?.put(me, all("allow")));
      const versions = (await Promise.all(puts)).map((put) => put?.version ?? 0);
      expect(versions.sort((a, b) => a - b)).toEqual(Array.from({ length: 40 }, (_, at) => at + 1));
    });
  });

  describe("a policy that was put", () => {
    test("is in force at once on its replica, and on another one within the time that it is remembered", async () => {
      const { me, call } = caller();
      let time = 0;
      const [here, there] = [service({ now: () => time }), service({ now: () => time })];
      expect(await there.judge(call())).toBeNull();
      await here.put(me, all("deny"));
      expect((await here.judge(call()))?.action).toBe("deny");
      time = 999;
      expect(await there.judge(call())).toBeNull();
      time = 1000;
      expect((await there.judge(call()))?.action).toBe("deny");
      await here.put(me, all("warn"));
      expect((await here.judge(call()))?.action).toBe("warn");
      time = 2000;
      expect((await there.judge(call()))?.action).toBe("warn");
    });

    test("is in force on another replica also when nobody heard that it was put", async () => {
      const { me, call } = caller();
      const policy = createPolicyService({ store: losingAnswer(2), clock, log: silentLog });
      await policy.put(me, all("allow"));
      expect((await faultOf(policy.put(me, all("deny")))).kind).toBe("unavailable");
      expect((await policy.judge(call()))?.action).toBe("deny");
    });

    test("is the newer one of two that were put at once, whichever is told first", async () => {
      const { tenant } = caller();
      const remembered = createPolicyCache({ store, log: silentLog });
      for (const version of [2, 1]) {
        const policy = { ...all("deny"), rules: "[]", updated_at: 0 };
        remembered.took(tenant, { ...policy, version, compiled: atOnce(compile(all("deny"))) }, []);
      }
      expect(await remembered.find(tenant)).toMatchObject({ policy: { version: 2 } });
    });

    test("is not remembered as it was read while it changed", async () => {
      const { me, tenant } = caller();
      const here = createPolicyCache({ store, log: silentLog });
      const there = service();
      const underWay = here.find(tenant);
      here.forget(tenant);
      await underWay;
      await there.put(me, all("deny"));
      expect(await here.find(tenant)).toMatchObject({ policy: { version: 1 } });
    });

    test("judges also who waits for a read that another has begun", async () => {
      const { tenant } = caller();
      const remembered = createPolicyCache({ store, log: silentLog });
      const both = [remembered.find(tenant), remembered.find(tenant)];
      const policy = { ...all("deny"), rules: "[]", updated_at: 0 };
      remembered.took(tenant, { ...policy, version: 1, compiled: atOnce(compile(all("deny"))) }, []);
      const [, joined] = await Promise.all(both);
      expect(joined).toMatchObject({ policy: { version: 1 } });
    });

    test("gives every decision by some version, and never by an older one than was acknowledged", async () => {
      const { me, tenant, call } = caller();
      const replicas = [service(), service()];
      // Version n has n rules that match nothing, then one whose action only fits with its place.
      const fitting = (place: number) => POLICY_ACTIONS[place % 3] ?? "deny";
      const nothing: Rule = { action: "deny", match: { agents: ["agt_none"] } };
      const newer = (version: number) =>
        document([...Array<Rule>(version).fill(nothing), { action: fitting(version + 1), match: {} }]);
      await replicas[0]?.put(me, newer(1));
      let last = 1;
      let judged = 0;
      const judge = async (replica = replicas[0]) => {
        for (; last < 30; judged++) {
          const least = last;
          const verdict = await replica?.judge(call());
          const at = verdict?.matched_rule ?? 0;
          expect(verdict?.action).toBe(fitting(at));
          if (replica === replicas[0]) expect(at - 1).toBeGreaterThanOrEqual(least);
          // Lets the timers of the databases run.
          await new Promise(setImmediate);
        }
      };
      const put = async () => {
        for (let version = 2; version <= 30; version++) {
          expect((await replicas[0]?.put(me, newer(version)))?.version).toBe(version);
          last = version;
        }
      };
      await Promise.all([put(), judge(), judge(), judge(replicas[1])]);
      for (const replica of replicas) await replica.close();
      const rows = await stored(tenant);
      expect(rows.length).toBe(judged);
      for (const { matched_rule, action, reason } of rows) {
        expect([action, reason]).toEqual([fitting(matched_rule ?? 0), `rule ${matched_rule}: ${action}`]);
      }
    });

    test("is in force as its document says, whatever it is", async () => {
      const { me, call } = caller();
      const policy = service();
      const action = fc.constantFrom(...POLICY_ACTIONS);
      const match = fc.record(
        { tools: fc.array(fc.constantFrom("read_*", "*", "write")), max_body_bytes: fc.integer({ min: 1 }) },
        { requiredKeys: [] },
      ) as fc.Arbitrary<Rule["match"]>;
      const any = fc.record({
        default: action,
        on_error: action,
        rules: fc.array(fc.record({ action, match })),
      });
      await fc.assert(
        fc.asyncProperty(any, async (given) => {
          await policy.put(me, given);
          const expected = evaluate(atOnce(compile(given)), { ...call(), rate: 1 });
          expect(await policy.judge(call())).toEqual(expected);
        }),
        { numRuns: 25 },
      );
    });
  });

  test("the observed rate counts every call of a caller to an agent, denied ones and those before the policy too", async () => {
    const { me, call } = caller();
    let time = 0;
    const policy = service({ now: () => time });
    for (let before = 0; before < 3; before++) await policy.judge(call());
    await policy.put(me, document([{ action: "deny", match: { rate_per_min: 4 } }]));
    time = 10;
    const actions = [];
    for (let after = 0; after < 3; after++) actions.push((await policy.judge(call()))?.action);
    expect(actions).toEqual(["allow", "deny", "deny"]);
    expect((await policy.judge(call({ user: "bob" })))?.action).toBe("allow");
    expect((await policy.judge(call({ agent_id: "agt_2" })))?.action).toBe("allow");
    time = 59_999;
    expect((await policy.judge(call()))?.action).toBe("deny");
    time = 60_010;
    // There the server has counted by its own time.
    if (dialect === "postgres") {
      for (const table of ["caller_rates", "caller_calls"])
        await place.execute(`update ${table} set at = at - 60000000`);
    }
    expect((await policy.judge(call()))?.action).toBe("allow");
  });

  describe("the decisions of a policy", () => {
    test("are one for every call that was judged, newest first, each of its own tenant", async () => {
      const [one, other] = [caller(), caller()];
      const policy = service();
      await policy.put(one.me, document([{ action: "warn", match: { tools: ["read_*"] } }]));
      await policy.judge(one.call());
      clock.time += 7;
      await policy.judge(one.call({ protocol: "http", mcp_tool: null, body_bytes: 99 }));
      const shared = { tenant: one.tenant, id: expect.stringMatching(/^pdec_/), agent_id: AGENT };
      expect(await policy.newest(one.me, 10)).toEqual([
        {
          ...{ ...shared, protocol: "http", mcp_tool: null },
          ...{ action: "allow", matched_rule: null, reason: "default: allow" },
        },
        {
          ...{ ...shared, protocol: "mcp", mcp_tool: "read_file" },
          ...{ action: "warn", matched_rule: 1, reason: "rule 1: warn" },
        },
      ]);
      expect((await policy.newest(one.me, 1)).map((row) => row.action)).toEqual(["allow"]);
      expect(await policy.newest(other.me, 10)).toEqual([]);
    });

    test("are durable for a deny when its call hears of it, and without the record the call is not answered", async () => {
      const { me, tenant, call } = caller();
      const policy = service();
      await policy.put(me, all("deny"));
      await policy.judge(call());
      expect((await stored(tenant)).map((row) => row.action)).toEqual(["deny"]);
      await without("policy_decisions", async () => {
        expect(await Promise.resolve(policy.judge(call())).catch(() => "failed")).toBe("failed");
      });
      expect(await stored(tenant)).toHaveLength(1);
    });

    test("hold up no allowed call while the store is away, and none of them is lost", async () => {
      const { me, tenant, call } = caller();
      const policy = service();
      await policy.put(me, all("allow"));
      await policy.judge(call());
      await without("policy_decisions", async () => {
        for (let n = 0; n < 50; n++) expect((await policy.judge(call()))?.action).toBe("allow");
      });
      expect(await policy.newest(me, 100)).toHaveLength(51);
      expect(await stored(tenant)).toHaveLength(51);
    });

    test("of a batch are one write for all that must be durable, however many messages it has", async () => {
      const { me, tenant, call } = caller();
      let writes = 0;
      const write: Store["write"] = (work) => {
        writes++;
        return store.write(work);
      };
      const policy = createPolicyService({ store: { ...store, write }, clock, log: silentLog });
      await policy.put(me, document([{ action: "deny", match: { tools: ["drop"] } }]));
      await policy.judge(call());
      await policy.newest(me, 1);
      writes = 0;
      const tools = Array.from({ length: 100 }, (_, at) => (at % 4 === 0 ? "read" : "drop"));
      const verdicts = await policy.judgeAll(tools.map((mcp_tool) => call({ mcp_tool })));
      expect(verdicts.map(({ action }) => action)).toEqual(tools.map((tool) => (tool === "drop" ? "deny" : "allow")));
      // One more for those that need not be durable.
      expect(writes).toBeLessThanOrEqual(2);
      expect((await stored(tenant)).filter(({ action }) => action === "deny")).toHaveLength(75);
      const newest = await policy.newest(me, 100);
      expect(newest.map(({ mcp_tool }) => mcp_tool).reverse()).toEqual(tools);
    });

    test("are there once when their commit was made and its answer was lost", async () => {
      const { me, tenant, call } = caller();
      await service().put(me, all("allow"));
      const policy = createPolicyService({ store: losingAnswer(1), clock, log: silentLog });
      await Promise.all([policy.judge(call()), policy.judge(call())]);
      await policy.close();
      expect(await stored(tenant)).toHaveLength(2);
    });

    test("are all written before a stop ends", async () => {
      const { me, tenant, call } = caller();
      const policy = service();
      await policy.put(me, all("warn"));
      const judged = Array.from({ length: 1000 }, () => policy.judge(call()));
      await Promise.all(judged);
      await policy.close();
      const rows = await stored(tenant);
      expect([rows.length, new Set(rows.map(({ id }) => id)).size]).toEqual([1000, 1000]);
    });

    test("make a call wait for its own record when the buffer is full, and a stop gives up in the end and says so", async () => {
      const { tenant } = caller();
      const errors: unknown[] = [];
      const log = { ...silentLog, error: (event: string, fields: unknown) => errors.push([event, fields]) };
      const decisions = createDecisionLog({ store, log, bufferedMax: 2 });
      const row = (): DecisionRow => ({
        ...{ tenant, id: newId("pdec", clock.now()), agent_id: AGENT, protocol: "http", mcp_tool: null },
        ...{ action: "allow", matched_rule: null, reason: "default: allow" },
      });
      await without("policy_decisions", async () => {
        await decisions.record(row());
        await decisions.record(row());
        expect(await Promise.resolve(decisions.record(row())).catch(() => "failed")).toBe("failed");
        await decisions.close(20);
      });
      expect(errors).toEqual([["policy_decisions_lost", { count: 2 }]]);
      expect(await stored(tenant)).toHaveLength(0);
      await decisions.record(row());
      expect(await stored(tenant)).toHaveLength(1);
    });

    test("are removed when they are old, of every tenant, and not when all are kept", async () => {
      const [one, other] = [caller(), caller()];
      const policy = service();
      for (const { me } of [one, other]) await policy.put(me, all("warn"));
      const start = clock.time;
      for (let n = 0; n < 300; n++) await policy.judge(one.call());
      await policy.judge(other.call());
      clock.time = start + 86_400_000;
      await policy.judge(one.call());
      await policy.newest(one.me, 1);
      const near = async () => [(await stored(one.tenant)).length, (await stored(other.tenant)).length];
      await removeOldDecisions(store, clock, 0);
      await removeOldDecisions(store, clock, 1);
      expect(await near()).toEqual([301, 1]);
      clock.time += 1;
      await removeOldDecisions(store, clock, 1);
      expect(await near()).toEqual([1, 0]);
    });
  });

  describe("on_error of a policy", () => {
    for (const action of POLICY_ACTIONS) {
      test(`decides with ${action} when the policy cannot be read any more, and no longer than that`, async () => {
        const { me, tenant, call } = caller();
        let time = 0;
        const policy = service({ now: () => time });
        await policy.put(me, document([{ action: "allow", match: {} }], { default: "deny", on_error: action }));
        await policy.judge(call());
        await without("policies", async () => {
          time = 999;
          expect((await policy.judge(call()))?.reason).toBe("rule 1: allow");
          time = 1000;
          const verdict = { action, matched_rule: null, reason: `on_error: ${action}` };
          expect(await policy.judge(call())).toEqual(verdict);
          expect((await policy.deniedTools(tenant, AGENT))?.("x")).toBe(action === "deny");
          expect((await policy.newest(me, 1))[0]).toMatchObject({ ...verdict, mcp_tool: "read_file" });
        });
        expect((await policy.judge(call()))?.reason).toBe("rule 1: allow");
      });

      test(`decides with ${action}, of the stored document, when its rules make no sense`, async () => {
        const { me, tenant, call } = caller();
        await service().put(me, document([], { on_error: action }));
        await place.execute(
          `update policies set version = 2, rules = '[{"action":"maybe","match":{}}]' where tenant = '${tenant}'`,
        );
        const policy = service();
        expect((await policy.judge(call()))?.reason).toBe(`on_error: ${action}`);
        await policy.put(me, all("allow"));
        expect((await policy.judge(call()))?.reason).toBe("rule 1: allow");
      });
    }

    test("is known as it was put last, though nobody has read it since, and kept when a put fails", async () => {
      const { me, call } = caller();
      let time = 0;
      const policy = service({ now: () => time });
      await policy.put(me, document([], { on_error: "allow" }));
      await policy.judge(call());
      await policy.put(me, document([], { on_error: "deny" }));
      await without("policies", async () => {
        time = 1000;
        expect((await policy.judge(call()))?.reason).toBe("on_error: deny");
        await policy.put(me, document([], { on_error: "allow" })).catch(() => {});
        expect((await policy.judge(call()))?.reason).toBe("on_error: deny");
      });
    });

    test("is not known of a policy that was never read, so no call passes", async () => {
      const { me, tenant, call } = caller();
      await service().put(me, all("allow"));
      const policy = service();
      await without("policies", async () => {
        for (const ask of [() => policy.judge(call()), () => policy.deniedTools(tenant, AGENT)]) {
          const { kind, retryAfterSeconds } = await faultOf(ask());
          expect([kind, retryAfterSeconds]).toEqual(["unavailable", 5]);
        }
      });
      expect((await policy.judge(call()))?.action).toBe("allow");
      expect(await policy.newest(me, 10)).toHaveLength(1);
    });
  });

  test("both databases were met", () => expect(store.dialect as string).toBe(dialect));
});

/** What is read of the table meanwhile gets no answer. */
async function whileLocked(place: { readonly url: string }, table: string, work: () => Promise<void>) {
  const other = new SQL(place.url, { max: 1 });
  const locked = Promise.withResolvers<void>();
  const release = Promise.withResolvers<void>();
  const holding = other.begin(async (tx) => {
    await tx.unsafe(`lock table ${table} in access exclusive mode`);
    locked.resolve();
    await release.promise;
  });
  await locked.promise;
  try {
    await work();
  } finally {
    release.resolve();
    await holding;
    await other.close();
  }
}

test("a store that does not answer is as good as one that fails", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  const { me, call } = caller();
  let time = 0;
  const policy = createPolicyService({ store, clock, log: silentLog, now: () => time });
  await policy.put(me, document([], { on_error: "warn" }));
  expect((await policy.judge(call()))?.reason).toBe("default: allow");
  await whileLocked(place, "policies", async () => {
    time = 1000;
    const started = performance.now();
    expect((await policy.judge(call()))?.reason).toBe("on_error: warn");
    // The store itself gives up after nine seconds.
    expect(performance.now() - started).toBeLessThan(8_000);
  });
  expect((await policy.judge(call()))?.reason).toBe("default: allow");
  await policy.close();
  await store.close();
}, 30_000);

test("a policy is read, however many other reads wait for the database", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  const { me, call } = caller();
  let time = 0;
  const policy = createPolicyService({ store, clock, log: silentLog, now: () => time });
  await policy.put(me, document([{ action: "allow", match: {} }], { on_error: "warn" }));
  let waiting: Promise<unknown>[] = [];
  await whileLocked(place, "agents", async () => {
    waiting = Array.from({ length: 100 }, () => findAgent(store, me.tenant, AGENT));
    time = 2000;
    expect((await policy.judge(call()))?.reason).toBe("rule 1: allow");
  });
  await Promise.all(waiting);
  await policy.close();
  await store.close();
}, 30_000);

test("a verdict of a policy lets pass, warns or refuses", () => {
  const verdict = { matched_rule: 3, reason: "rule 3: x" };
  expect(warningOf(null)).toBeNull();
  expect(warningOf({ ...verdict, action: "allow" })).toBeNull();
  expect(warningOf({ ...verdict, action: "warn" })).toBe("rule 3: x");
  expect(() => warningOf({ ...verdict, action: "deny" })).toThrow("denied by policy (rule 3: x)");
});

test("a call that the server does not count is judged by on_error, and counted all the same", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  const { me, call } = caller();
  const policy = createPolicyService({ store, clock, log: silentLog });
  const reason = async () => (await policy.judge(call()))?.reason;
  const rules: Rule[] = [{ action: "deny", match: { rate_per_min: 3 } }];
  await place.execute("alter table caller_rates rename to gone");
  for (const on_error of ["warn", "deny"] as const) {
    await policy.put(me, document(rules, { on_error }));
    expect(await reason()).toBe(`on_error: ${on_error}`);
  }
  expect(await policy.newest(me, 10)).toHaveLength(2);
  await place.execute("alter table gone rename to caller_rates");
  expect([await reason(), await reason()]).toEqual(["default: allow", "rule 1: deny"]);
  await store.close();
}, 30_000);
