import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { join } from "node:path";
import { longHistory } from "../../../test/support/stores/long-history.ts";
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import { BODIES, BODIES_OF_CALLS, ENDED_CALLS, IDEMPOTENCY_KEYS } from "../../gateway/invocations/retention.ts";
import { DECISIONS } from "../../gateway/policy/decisions.ts";

const TENANTS = ["acme", "other", "third"];
/** Of each: several steps. */
const CALLS = 700;
const RECOUNTED = ["agent_id", "status", "mode", "settlement_status", "error_class", "model"];

test("what is too old goes in steps with its totals, but for what its payment, its receipt or its call still needs", async () => {
  const place = sqlitePlace();
  const store = await place.open();
  using file = new Database(join(place.dir, "tollgate.db"));
  for (const tenant of TENANTS) for (const statement of longHistory(tenant, CALLS, 100)) file.run(statement);
  const idAt = (tenant: string, nth: number) =>
    file
      .prepare<{ id: string }, [string]>(
        `select id from ended_invocations where tenant = ? order by id limit 1 offset ${nth}`,
      )
      .get(tenant)?.id ?? "";
  const bodies = "insert into invocation_bodies (tenant, invocation_id, request) select tenant, id, zeroblob";
  file.run(`${bodies}(10) from ended_invocations`);
  file.run(`${bodies}(9000) from open_invocations`);
  // Each of them more than a step may remove.
  file.run(
    `update invocation_bodies set response = zeroblob(5000000) where invocation_id in ('${idAt("acme", 3)}', '${idAt("acme", 4)}')`,
  );
  const [owed, unpaid] = [idAt("acme", 10), idAt("other", 20)];
  file.run(
    `insert into receipts_due (tenant, invocation_id) values ('acme', '${owed}'), ('other', '${idAt("other", 690)}')`,
  );
  file.run(`insert into payments (chain_id, token, payer, nonce, tenant, invocation_id, agent_id, caller, body_sha256,
    authorization_digest, x402_version, valid_before, attempts, asked_ms, created_at, updated_at)
    values (1, 't', 'p', 'n', 'other', '${unpaid}', 'agt', 'ada', 's', 'd', 1, 1, 0, 0, 1, 1)`);
  // All that follow have this one's age at most.
  const floor = idAt("acme", 600);
  const before = ENDED_CALLS.timeAt(floor);
  const ids = (table: string, key: string) =>
    file
      .prepare<{ id: string }, []>(`select ${key} as id from ${table} order by 1`)
      .all()
      .map(({ id }) => id);
  const young = ids("ended_invocations", "id").filter((id) => id >= ENDED_CALLS.keyAt(before));
  const open = ids("open_invocations", "id");

  expect(await store.periods.drop(ENDED_CALLS, before)).toBe(0);
  expect(ids("ended_invocations", "id")).toEqual([...young, owed, unpaid].sort());
  for (const column of RECOUNTED) {
    const dimension = { agent_id: "agent", settlement_status: "settlement" }[column] ?? column;
    const kept = `select tenant, value, sum(count) as n from invocation_counts where dimension = '${dimension}'
      group by tenant, value having n <> 0 order by tenant, value`;
    const counted = `select tenant, ${column} as value, count(*) as n from invocations where ${column} is not null
      group by tenant, value order by tenant, value`;
    expect([column, file.prepare(kept).values()]).toEqual([column, file.prepare(counted).values()]);
  }

  await store.periods.drop(BODIES_OF_CALLS, before);
  expect(ids("invocation_bodies", "invocation_id")).toEqual([...young, owed, unpaid, ...open].sort());
  await store.periods.drop(BODIES, before);
  expect(ids("invocation_bodies", "invocation_id")).toEqual([...young, ...open].sort());
  const decision = (tenant: string, time: number) =>
    `insert into policy_decisions (tenant, id, agent_id, protocol, action, reason)
     values ('${tenant}', '${DECISIONS.keyAt(time)}-7000-8000-000000000000', 'agt', 'http', 'allow', 'default')`;
  for (const tenant of TENANTS) for (const time of [before - 1, before]) file.run(decision(tenant, time));
  expect(await store.periods.drop(DECISIONS, before)).toBe(0);
  expect(ids("policy_decisions", "id").map(DECISIONS.timeAt)).toEqual(TENANTS.map(() => before));
  const key = (slot: number, n: number) =>
    `insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at, slot)
     values ('acme', 'ada', 'agt', 'key ${n}', 's', 'inv', 1, ${slot})`;
  const hour = Number(IDEMPOTENCY_KEYS.keyAt(before));
  for (let n = 0; n < 450; n++) for (const slot of [5, hour - 1, hour]) file.run(key(slot, n));
  expect(await store.periods.drop(IDEMPOTENCY_KEYS, before)).toBe(0);
  expect(file.query("select slot, count(*) from idempotency_keys group by slot").values()).toEqual([[hour, 450]]);
  // Others are removed row by row.
  expect(await store.periods.drop({ ...BODIES, name: "receipts" }, before)).toBe(before);
  await store.close();
  place.remove();
});

test("to find that nothing of thousands of tenants is old enough holds up nobody", async () => {
  const place = sqlitePlace();
  const store = await place.open();
  const tenants = 2_000;
  await place.execute(`with recursive n (n) as (select 1 union all select n + 1 from n where n < ${tenants})
    insert into policy_decisions (tenant, id, agent_id, protocol, action, reason)
    select 'tenant ' || n, '${DECISIONS.keyAt(2_000)}-7000-8000-000000000000', 'agt', 'http', 'allow', 'default' from n`);
  let turns = 0;
  const counting = setInterval(() => void turns++, 1);
  await store.periods.drop(DECISIONS, 1_000);
  clearInterval(counting);
  expect(turns).toBeGreaterThanOrEqual(tenants / 200 / 2);
  await store.close();
  place.remove();
});
