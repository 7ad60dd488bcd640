import { describe, expect, test } from "bun:test";
import { type OpenPlace, useStore } from "../../../test/support/stores/one-store.ts";
import {
  AGENT,
  all,
  allJudged,
  caller,
  clock,
  document,
  judged,
  policiesOn,
} from "../../../test/support/stores/policies.ts";
import { newId } from "../../core/id.ts";
import { silentLog } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import { createDecisionLog, type DecisionRow, removeOldDecisions } from "./decisions.ts";
import { createPolicyService } from "./service.ts";

describe.each(["sqlite", "postgres"] as const)("on %s", (dialect) => {
  let opened: OpenPlace;
  let store: Store;
  useStore(dialect, (place) => {
    opened = place;
    store = place.store;
  });
  const { service, stored, losingAnswer, without } = policiesOn(() => opened);

  describe("the decisions of a policy", () => {
    test("are one for every call that was judged, newest first, each of its own tenant", async () => {
      const [one, other] = [caller(), caller()];
      const policy = service();
      await policy.put(one.me, document([{ action: "warn", match: { tools: ["read_*"] } }]));
      await judged(policy, one.call());
      clock.time += 7;
      await judged(policy, one.call({ protocol: "http", tools: [null], body_bytes: 99 }));
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
      await judged(policy, call());
      expect((await stored(tenant)).map((row) => row.action)).toEqual(["deny"]);
      await without("policy_decisions", async () => {
        expect(await judged(policy, call()).catch(() => "failed")).toBe("failed");
      });
      expect(await stored(tenant)).toHaveLength(1);
    });

    test("hold up no allowed call while the store is away, and none of them is lost", async () => {
      const { me, tenant, call } = caller();
      const policy = service();
      await policy.put(me, all("allow"));
      await judged(policy, call());
      await without("policy_decisions", async () => {
        for (let n = 0; n < 50; n++) expect((await judged(policy, call()))?.action).toBe("allow");
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
      await judged(policy, call());
      await policy.newest(me, 1);
      writes = 0;
      const tools = Array.from({ length: 100 }, (_, at) => (at % 4 === 0 ? "read" : "drop"));
      const verdicts = await allJudged(policy, call({ tools }));
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
      await Promise.all([judged(policy, call()), judged(policy, call())]);
      await policy.close();
      expect(await stored(tenant)).toHaveLength(2);
    });

    test("are all written before a stop ends", async () => {
      const { me, tenant, call } = caller();
      const policy = service();
      await policy.put(me, all("warn"));
      const each = Array.from({ length: 1000 }, () => judged(policy, call()));
      await Promise.all(each);
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
        await decisions.record([row()]);
        await decisions.record([row()]);
        expect(await decisions.record([row()]).catch(() => "failed")).toBe("failed");
        await decisions.close(20);
      });
      expect(errors).toEqual([["policy_decisions_lost", { count: 2 }]]);
      expect(await stored(tenant)).toHaveLength(0);
      await decisions.record([row()]);
      expect(await stored(tenant)).toHaveLength(1);
    });

    test("are removed when they are old, of every tenant, and not when all are kept", async () => {
      const [one, other] = [caller(), caller()];
      const policy = service();
      for (const { me } of [one, other]) await policy.put(me, all("warn"));
      const start = clock.time;
      for (let n = 0; n < 300; n++) await judged(policy, one.call());
      await judged(policy, other.call());
      clock.time = start + 86_400_000;
      await judged(policy, one.call());
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
  test("both databases were met", () => expect(store.isShared).toBe(dialect === "postgres"));
});
