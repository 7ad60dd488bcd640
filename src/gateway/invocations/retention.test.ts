// What is too old goes in steps with its totals, and what its payment, its receipt or its call still needs stays.
import { expect, test } from "bun:test";
import { and, count, eq, gte, isNotNull } from "drizzle-orm";
import { counted } from "../../../test/support/stores/invocations.ts";
import { longHistory } from "../../../test/support/stores/long-history.ts";
import { eachStore } from "../../../test/support/stores/one-store.ts";
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import { idFloor, idTime } from "../../core/id.ts";
import { silentLog } from "../../core/log.ts";
import { DAY_MS, HOUR_MS } from "../../core/time.ts";
import type { Store } from "../../storage/store.ts";
import { removeOldDecisions } from "../policy/decisions.ts";
import { cleanUp } from "./retention.ts";

const TENANTS = ["acme", "other", "third"];
/** Of each: several steps. */
const CALLS = 700;
const RECOUNTED = {
  agent: "agent_id",
  status: "status",
  mode: "mode",
  settlement: "settlement_status",
  error_class: "error_class",
  model: "model",
} as const;

async function expectExact({ read }: Store): Promise<void> {
  const { invocations: t } = read.tables;
  for (const tenant of TENANTS) {
    for (const [dimension, column] of Object.entries(RECOUNTED) as [keyof typeof RECOUNTED, "status"][]) {
      const rows = await read.db
        .select({ value: t[column], calls: count() })
        .from(t)
        .where(and(eq(t.tenant, tenant), isNotNull(t[column])))
        .groupBy(t[column]);
      for (const { value, calls } of rows) {
        expect([dimension, value, await counted(read, tenant, dimension, value)]).toEqual([dimension, value, calls]);
      }
    }
    expect(await counted(read, tenant, "all", "")).toBe(
      (await read.db.select({ id: t.id }).from(t).where(eq(t.tenant, tenant))).length,
    );
  }
}

eachStore((makePlace) => {
  test("what is too old goes in steps with its totals, but for what its payment, its receipt or its call needs", async () => {
    const place = await makePlace();
    const store = await place.open();
    const { endedInvocations: ended, invocationBodies: bodies, openInvocations: open } = store.read.tables;
    for (const tenant of TENANTS)
      for (const statement of longHistory(tenant, CALLS, 100)) await place.execute(statement);
    const callsOf = async (tenant: string) => {
      const rows = await store.read.db
        .select({ id: ended.id })
        .from(ended)
        .where(eq(ended.tenant, tenant))
        .orderBy(ended.id);
      return rows.map(({ id }) => id);
    };
    const ids = async (rows: PromiseLike<readonly { readonly id: string }[]>) =>
      (await rows).map(({ id }) => id).sort();
    const stored = () => ids(store.read.db.select({ id: ended.id }).from(ended));
    const withBodies = () => ids(store.read.db.select({ id: bodies.invocation_id }).from(bodies));
    await place.execute(
      `insert into invocation_bodies (tenant, invocation_id) select tenant, id from ended_invocations`,
    );
    await place.execute(
      `insert into invocation_bodies (tenant, invocation_id) select tenant, id from open_invocations`,
    );
    const [owed, unpaid] = [(await callsOf("acme"))[10] ?? "", (await callsOf("other"))[20] ?? ""];
    await place.execute(`insert into outbox (kind, tenant, invocation_id) values ('receipt', 'acme', '${owed}')`);
    await place.execute(`insert into payments (chain_id, token, payer, nonce, tenant, invocation_id, agent_id, caller, body_sha256,
      authorization_digest, x402_version, valid_before, attempts, asked_ms, next_attempt_at, settle_request, created_at, updated_at)
      values (1, 't', 'p', 'n', 'other', '${unpaid}', 'agt', 'ada', 's', 'd', 1, 1, 0, 0, 1, '{}', 1, 1)`);
    const before = idTime((await callsOf("acme"))[600] ?? "");
    const young = await ids(
      store.read.db
        .select({ id: ended.id })
        .from(ended)
        .where(gte(ended.id, idFloor("inv", before))),
    );
    const waiting = await ids(store.read.db.select({ id: open.id }).from(open));
    const clean = (days: { body_days: number; history_days: number }) =>
      cleanUp(store, { now: () => before + DAY_MS }, days, silentLog);

    await clean({ body_days: 0, history_days: 1 });
    expect(await stored()).toEqual([...young, owed, unpaid].sort());
    expect(await withBodies()).toEqual([...young, owed, unpaid, ...waiting].sort());
    await expectExact(store);
    await clean({ body_days: 1, history_days: 0 });
    expect(await withBodies()).toEqual([...young, ...waiting].sort());
    await store.close();
    place.remove();
  });

  test("decisions and keys go by their age", async () => {
    const place = await makePlace();
    const store = await place.open();
    const { policyDecisions, idempotencyKeys } = store.read.tables;
    const before = 480_000 * HOUR_MS;
    const decision = (tenant: string, time: number) =>
      `('${tenant}', '${idFloor("pdec", time)}-7000-8000-000000000000', 'agt', 'http', 'allow', 'default')`;
    const decisions = TENANTS.flatMap((tenant) => [decision(tenant, before - 1), decision(tenant, before)]);
    await place.execute(
      `insert into policy_decisions (tenant, id, agent_id, protocol, action, reason) values ${decisions.join()}`,
    );
    await removeOldDecisions(store, { now: () => before + DAY_MS }, 1);
    const kept = await store.read.db.select({ id: policyDecisions.id }).from(policyDecisions);
    expect(kept.map(({ id }) => idTime(id))).toEqual(TENANTS.map(() => before));

    const keys = Array.from(
      { length: 900 },
      (_, n) => `('acme', 'ada', 'agt', 'key ${n}', 's', 'inv', ${before - (n % 2)})`,
    );
    await place.execute(`insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at)
      values ${keys.join()}`);
    await cleanUp(store, { now: () => before + HOUR_MS }, { body_days: 0, history_days: 0 }, silentLog);
    const left = await store.read.db.select({ at: idempotencyKeys.expires_at }).from(idempotencyKeys);
    expect(left.map(({ at }) => at)).toEqual(left.map(() => before));
    expect(left).toHaveLength(450);
    await store.close();
    place.remove();
  });
});

test("to find that nothing of thousands of tenants is old enough holds up nobody", async () => {
  const place = sqlitePlace();
  const store = await place.open();
  const tenants = 2_000;
  await place.execute(`with recursive n (n) as (select 1 union all select n + 1 from n where n < ${tenants})
    insert into policy_decisions (tenant, id, agent_id, protocol, action, reason)
    select 'tenant ' || n, '${idFloor("pdec", 2_000 + DAY_MS)}-7000-8000-000000000000', 'agt', 'http', 'allow', 'default' from n`);
  let turns = 0;
  const counting = setInterval(() => void turns++, 1);
  await removeOldDecisions(store, { now: () => 1_000 + DAY_MS }, 1);
  clearInterval(counting);
  expect(turns).toBeGreaterThanOrEqual(tenants / 200 / 2);
  await store.close();
  place.remove();
});
