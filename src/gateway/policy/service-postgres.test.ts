import { expect, test } from "bun:test";
import { SQL } from "bun";
import { AGENT, caller, clock, document, judged } from "../../../test/support/stores/policies.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import { findAgent } from "../agents/store.ts";
import type { Rule } from "./document.ts";
import { createPolicyService } from "./service.ts";

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
  expect((await judged(policy, call()))?.reason).toBe("default: allow");
  await whileLocked(place, "policies", async () => {
    time = 1000;
    const started = performance.now();
    expect((await judged(policy, call()))?.reason).toBe("on_error: warn");
    // The store itself gives up after nine seconds.
    expect(performance.now() - started).toBeLessThan(8_000);
  });
  expect((await judged(policy, call()))?.reason).toBe("default: allow");
  await policy.close();
  await store.close();
});

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
    expect((await judged(policy, call()))?.reason).toBe("rule 1: allow");
  });
  await Promise.all(waiting);
  await policy.close();
  await store.close();
});

test("a call that the server does not count is judged by on_error, and counted all the same", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  const { me, call } = caller();
  const policy = createPolicyService({ store, clock, log: silentLog });
  const reason = async () => (await judged(policy, call()))?.reason;
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
});
