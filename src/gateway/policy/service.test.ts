import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { type OpenPlace, useStore } from "../../../test/support/stores/one-store.ts";
import {
  AGENT,
  all,
  caller,
  clock,
  document,
  faultOf,
  judged,
  policiesOn,
} from "../../../test/support/stores/policies.ts";
import { newId } from "../../core/id.ts";
import { silentLog } from "../../core/log.ts";
import { POLICY_ACTIONS } from "../../core/states.ts";
import type { Store } from "../../storage/store.ts";
import type { Rule } from "./document.ts";
import { compile, evaluate } from "./evaluate.ts";
import { createPolicyCache, createPolicyService } from "./service.ts";

describe.each(["sqlite", "postgres"] as const)("on %s", (dialect) => {
  let opened: OpenPlace;
  let store: Store;
  useStore(dialect, (place) => {
    opened = place;
    store = place.store;
  });
  const { service, read, stored, losingAnswer, without } = policiesOn(() => opened);

  describe("a policy", () => {
    test("is none for a tenant that put none, and its calls leave no decision", async () => {
      const { me, call, tenant } = caller();
      const policy = service();
      expect(await policy.get(me)).toBeNull();
      expect(await judged(policy, call())).toBeNull();
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
      expect(await judged(there, call())).toBeNull();
      await here.put(me, all("deny"));
      expect((await judged(here, call()))?.action).toBe("deny");
      time = 999;
      expect(await judged(there, call())).toBeNull();
      time = 1000;
      expect((await judged(there, call()))?.action).toBe("deny");
      await here.put(me, all("warn"));
      expect((await judged(here, call()))?.action).toBe("warn");
      time = 2000;
      expect((await judged(there, call()))?.action).toBe("warn");
    });

    test("is in force on another replica also when nobody heard that it was put", async () => {
      const { me, call } = caller();
      const policy = createPolicyService({ store: losingAnswer(2), clock, log: silentLog });
      await policy.put(me, all("allow"));
      expect((await faultOf(policy.put(me, all("deny")))).kind).toBe("unavailable");
      expect((await judged(policy, call()))?.action).toBe("deny");
    });

    test("is the newer one of two that were put at once, whichever is told first", async () => {
      const { tenant } = caller();
      const remembered = createPolicyCache({ store, log: silentLog });
      for (const version of [2, 1]) {
        const policy = { ...all("deny"), rules: "[]", updated_at: 0 };
        remembered.replaced(tenant, { ...policy, version, compiled: await compile(all("deny"), "t") }, []);
      }
      expect(await remembered.inForce(tenant)).toMatchObject({ version: 2 });
    });

    test("is not remembered as it was read while it changed", async () => {
      const { me, tenant } = caller();
      const here = createPolicyCache({ store, log: silentLog });
      const there = service();
      const underWay = here.inForce(tenant);
      await new Promise(setImmediate);
      here.forget(tenant);
      await underWay;
      await there.put(me, all("deny"));
      expect(await here.inForce(tenant)).toMatchObject({ version: 1 });
    });

    test("judges also who waits for a read that another has begun", async () => {
      const { tenant } = caller();
      const remembered = createPolicyCache({ store, log: silentLog });
      // Before the reads begin, since it may take turns of the event loop, in which they would end.
      const compiled = await compile(all("deny"), "t");
      const both = [remembered.inForce(tenant), remembered.inForce(tenant)];
      remembered.replaced(tenant, { ...all("deny"), rules: "[]", updated_at: 0, version: 1, compiled }, []);
      const [, joined] = await Promise.all(both);
      expect(joined).toMatchObject({ version: 1 });
    });

    test("gives every decision by some version, and never by an older one than was acknowledged", async () => {
      const { me, tenant, call } = caller();
      const replicas = [service(), service()];
      // Version n has n rules that match nothing, then one whose action only fits with its place.
      const fitting = (place: number) => POLICY_ACTIONS[place % 3] ?? "deny";
      const nothing: Rule = { action: "deny", match: { agents: [newId("agt", 0)] } };
      const newer = (version: number) =>
        document([...Array<Rule>(version).fill(nothing), { action: fitting(version + 1), match: {} }]);
      await replicas[0]?.put(me, newer(1));
      let last = 1;
      let count = 0;
      const judge = async (replica = replicas[0]) => {
        for (; last < 30; count++) {
          const least = last;
          const verdict = replica && (await judged(replica, call()));
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
      expect(rows.length).toBe(count);
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
          const expected = evaluate(await compile(given, "t"), { ...call(), mcp_tool: "read_file", rate: 1 });
          expect(await judged(policy, call())).toEqual(expected);
        }),
        { numRuns: 25 },
      );
    });
  });

  test("the observed rate counts every call of a caller to an agent, denied ones and those before the policy too", async () => {
    const { me, call } = caller();
    let time = 0;
    const policy = service({ now: () => time });
    for (let before = 0; before < 3; before++) await judged(policy, call());
    await policy.put(me, document([{ action: "deny", match: { rate_per_min: 4 } }]));
    time = 10;
    const actions = [];
    for (let after = 0; after < 3; after++) actions.push((await judged(policy, call()))?.action);
    expect(actions).toEqual(["allow", "deny", "deny"]);
    expect((await judged(policy, call({ user: "bob" })))?.action).toBe("allow");
    expect((await judged(policy, call({ agent_id: "agt_2" })))?.action).toBe("allow");
    time = 59_999;
    expect((await judged(policy, call()))?.action).toBe("deny");
    time = 60_010;
    // There the server has counted by its own time.
    if (dialect === "postgres") {
      for (const table of ["caller_rates", "caller_calls"])
        await opened.place.execute(`update ${table} set at = at - 60000000`);
    }
    expect((await judged(policy, call()))?.action).toBe("allow");
  });

  describe("on_error of a policy", () => {
    for (const action of POLICY_ACTIONS) {
      test(`decides with ${action} when the policy cannot be read any more, and no longer than that`, async () => {
        const { me, tenant, call } = caller();
        let time = 0;
        const policy = service({ now: () => time });
        await policy.put(me, document([{ action: "allow", match: {} }], { default: "deny", on_error: action }));
        await judged(policy, call());
        await without("policies", async () => {
          time = 999;
          expect((await judged(policy, call()))?.reason).toBe("rule 1: allow");
          time = 1000;
          const verdict = { action, matched_rule: null, reason: `on_error: ${action}` };
          expect(await judged(policy, call())).toEqual(verdict);
          expect((await policy.deniedTools(tenant, AGENT))?.("x")).toBe(action === "deny");
          expect((await policy.newest(me, 1))[0]).toMatchObject({ ...verdict, mcp_tool: "read_file" });
        });
        expect((await judged(policy, call()))?.reason).toBe("rule 1: allow");
      });

      test(`decides with ${action}, of the stored document, when its rules make no sense`, async () => {
        const { me, tenant, call } = caller();
        await service().put(me, document([], { on_error: action }));
        await opened.place.execute(
          `update policies set version = 2, rules = '[{"action":"maybe","match":{}}]' where tenant = '${tenant}'`,
        );
        const policy = service();
        expect((await judged(policy, call()))?.reason).toBe(`on_error: ${action}`);
        await policy.put(me, all("allow"));
        expect((await judged(policy, call()))?.reason).toBe("rule 1: allow");
      });
    }

    test("is known as it was put last, though nobody has read it since, and kept when a put fails", async () => {
      const { me, call } = caller();
      let time = 0;
      const policy = service({ now: () => time });
      await policy.put(me, document([], { on_error: "allow" }));
      await judged(policy, call());
      await policy.put(me, document([], { on_error: "deny" }));
      await without("policies", async () => {
        time = 1000;
        expect((await judged(policy, call()))?.reason).toBe("on_error: deny");
        await policy.put(me, document([], { on_error: "allow" })).catch(() => {});
        expect((await judged(policy, call()))?.reason).toBe("on_error: deny");
      });
    });

    test("is not known of a policy that was never read, so no call passes", async () => {
      const { me, tenant, call } = caller();
      await service().put(me, all("allow"));
      const policy = service();
      await without("policies", async () => {
        for (const ask of [() => judged(policy, call()), () => policy.deniedTools(tenant, AGENT)]) {
          const { kind, retryAfterSeconds } = await faultOf(ask());
          expect([kind, retryAfterSeconds]).toEqual(["unavailable", 5]);
        }
      });
      expect((await judged(policy, call()))?.action).toBe("allow");
      expect(await policy.newest(me, 10)).toHaveLength(1);
    });
  });

  test("both databases were met", () => expect(store.isShared).toBe(dialect === "postgres"));
});
