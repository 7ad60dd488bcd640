// How Postgres finds the rows of commands. The plan that a connection makes of a statement stays, so it must be right
// from the first call on, before anything has been measured, and however many calls there are later.
import { expect, test } from "bun:test";
import { columns } from "../../../../db/columns.ts";
import { defineSchema } from "../../../../db/schema.ts";
import { accepted, SUCCESS } from "../../../../test/support/stores/invocations.ts";
import { missingPostgres, startPostgres } from "../../../../test/support/stores/postgres.ts";
import { clock, postgresPlace } from "../../../../test/support/stores/stores.ts";
import { silentLog } from "../../../core/log.ts";
import { BEGIN_COMMANDS, BEGIN_LOOK_UP, postgresClient, postgresQueries } from "../../../storage/postgres/pool.ts";
import type { Command, Store } from "../../../storage/store.ts";
import { createReaper } from "../../streaming/reaper.ts";
import { compareOnce, createClaims } from "../../upstream/ownership.ts";
import { storePartCommand } from "../bodies.ts";
import { accept } from "../service.ts";
import { acceptCommand, acceptInPartsCommand, acceptPlainCommand } from "./accept.ts";
import { endCommand } from "./end.ts";
import { takeCommand, waitingAgents } from "./queue.ts";

const [OPEN, ENDED] = [20_000, 60_000];
const OF_ALL = "tenant, id, agent_id, caller, mode, status, body_captured, outbox, updated_at";
const OPEN_ID = "'inv_01a0c44f-' || lpad(to_hex(i), 4, '0') || '-7000-8000-000000000000'";
const MANY = [
  `insert into open_invocations (${OF_ALL}, call, request) select 'acme', ${OPEN_ID}, 'agt_' || i % 100, 'ada',
    'transactional', 'pending', true, null, i, '{}', '\\x00' from generate_series(1, ${OPEN}) i`,
  `insert into ended_invocations (${OF_ALL}, completed_at, response_truncated) select 'acme', 'inv_e' || i, 'agt_' || i % 100,
    'ada', 'transactional', 'succeeded', true, null, i, i, false from generate_series(1, ${ENDED}) i`,
  `insert into invocation_bodies (tenant, invocation_id, request) select 'acme', 'inv_e' || i, '\\x00'
    from generate_series(1, ${ENDED}) i`,
  `insert into body_parts (invocation_id, tenant, kind, n, bytes) select 'inv_e' || i, 'acme', 'request', 0, '\\x00'
    from generate_series(1, ${ENDED}) i`,
  `insert into orphaned_parts (invocation_id, tenant, kind, first, due_at) select ${OPEN_ID}, 'acme', 'request', 0, 1
    from generate_series(1, ${OPEN}) i`,
  `insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at)
    select 'acme', 'ada', 'agt', i, 's', ${OPEN_ID}, i from generate_series(1, ${OPEN}) i`,
  `insert into payments (chain_id, token, payer, nonce, tenant, invocation_id, agent_id, caller, body_sha256,
    authorization_digest, x402_version, valid_before, call_credential_ref, attempts, created_at, updated_at)
    select 1, 't', 'p', i, 'acme', ${OPEN_ID}, 'agt', 'ada', 's', 'd', 1, 1, 'crd', 0, 1, 1
    from generate_series(1, ${OPEN}) i`,
  `insert into refused_calls (tenant, id, created_at) select 'acme', 'inv_r' || i, 1 from generate_series(1, ${OPEN}) i`,
];

function inputs(count: number) {
  const now = 1_790_000_000_000;
  const calls = Array.from({ length: count }, (_, i) => ({
    ...accepted(now, { payment_nonce: "0x", outbox: "receipt" }),
    call: "{}",
    idempotency: { key: `${i}`, body_sha256: "s", asked_at: now, latest: now },
    claim: null,
  }));
  const keys = calls.map(({ row: { tenant, id } }) => ({ tenant, id }));
  const ends = keys.map((key) => ({ key, from: "running", token: "t", ending: SUCCESS, at: now }) as const);
  return [
    [acceptPlainCommand, calls.map((call) => ({ ...call, row: accepted(now).row }))],
    [acceptCommand, calls],
    [acceptInPartsCommand, calls],
    [storePartCommand, keys.map((key, i) => ({ key, n: i % 2, bytes: new Uint8Array(1), dueAt: now }))],
    [endCommand, ends.map((end) => ({ ...end, request_id: null, detail: null }))],
  ] as [Command<unknown, unknown>, unknown[]][];
}

/** A value as SQL would say it. */
function literal(value: unknown): string {
  if (value === null) return "null";
  if (value instanceof Uint8Array) return `'\\x${Buffer.from(value).toString("hex")}'`;
  if (Array.isArray(value))
    return `'{${value
      .map((each) => JSON.stringify(each))
      .join()
      .replaceAll("'", "''")}}'`;
  return typeof value === "string" ? `'${value.replaceAll("'", "''")}'` : String(value);
}

/** Every look at a table that reads more of it than the rows that are asked for. */
function wholeTables(plan: string): string[] {
  const lines = plan.split("\n");
  const whole = lines.filter((line) => /Seq Scan on/.test(line));
  // An index without the call's ID among its conditions is read in long pieces, or from one end to the other.
  const scans = lines.flatMap((line, at) => (/Index (Only )?Scan using|Bitmap Index Scan on/.test(line) ? [at] : []));
  const free = scans.filter((at) => !/Index Cond: .*\b(invocation_)?id( = |(, kind)?\) >= )/.test(lines[at + 1] ?? ""));
  return [...whole, ...free.map((at) => lines[at] ?? "")];
}

interface PlanNode {
  readonly "Node Type": string;
  readonly "Actual Rows": number;
  readonly "Actual Loops": number;
  readonly "Rows Removed by Filter"?: number;
  readonly "Rows Removed by Join Filter"?: number;
  readonly Plans?: readonly PlanNode[];
}

/** The most rows that any step of a plan has looked at, all its rounds together. */
function mostRows(node: PlanNode): number {
  const { "Rows Removed by Filter": filtered = 0, "Rows Removed by Join Filter": unjoined = 0 } = node;
  const own = (node["Actual Rows"] + filtered + unjoined) * node["Actual Loops"];
  return Math.max(own, ...(node.Plans ?? []).map(mostRows));
}

/** How many totals a call may count in. */
const TOTALS_OF_A_CALL = 7;

for (const version of [18, 15] as const) {
  const missing = missingPostgres(version);
  const why = missing === null ? "" : `: not tried, since ${missing}`;
  test.skipIf(missing !== null)(
    `commands that are written together look at as many rows as they are, and are planned once, on Postgres ${version}${why}`,
    async () => {
      const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
      await (await place.open()).close();
      await using client = postgresClient(place.url);
      const count = 256;
      const run = async (each: number) => {
        await client.unsafe(BEGIN_COMMANDS);
        for (const [command, all] of inputs(each)) {
          const given = command.postgres.valuesOf(all).map(literal);
          const [row] = await client
            .unsafe(`explain (analyze, format json) execute one_${command.name} (${given})`)
            .values();
          const [{ Plan: plan, JIT: compiled = null }] = row[0];
          expect([command.name, compiled]).toEqual([command.name, null]);
          expect(mostRows(plan)).toBeLessThanOrEqual(each * TOTALS_OF_A_CALL);
        }
        await client.unsafe("commit");
      };
      for (const [command] of inputs(1)) await client.unsafe(`prepare one_${command.name} as ${command.postgres.text}`);
      // Postgres makes up its mind about a plan after five of them.
      for (let i = 0; i < 8; i++) await run(1);
      await run(count);
      const plans = await client
        .unsafe("select custom_plans from pg_prepared_statements where name like 'one_%'")
        .values();
      expect(plans.flat().map(Number)).toEqual(inputs(1).map(() => 0));
    },
  );

  test.skipIf(missing !== null)(
    `of a backlog only what is taken is read, and of each agent one call, on Postgres ${version}${why}`,
    async () => {
      const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
      await (await place.open()).close();
      await using client = postgresClient(place.url);
      const owner = "rep";
      const tokens = ["1", "2", "3", "4", "5"];
      const taking = {
        tenant: "acme",
        agent_id: "agt_7",
        owner,
        tokens,
        now: 1_790_000_000_000,
        after: "",
        leftOut: [],
      };
      const given = {
        take: takeCommand.postgres.valuesOf([taking]),
        agents: waitingAgents.postgres.valuesOf([{ replica: owner, now: taking.now, after: "agt_2", limit: 5 }]),
      };
      await client.unsafe(`prepare take as ${takeCommand.postgres.text}`);
      await client.unsafe(`prepare agents as ${waitingAgents.postgres.text}`);
      const expectFew = async (when: string) => {
        for (const [name, begin] of [
          ["take", BEGIN_COMMANDS],
          ["agents", BEGIN_LOOK_UP],
        ] as const) {
          await client.unsafe(begin);
          const values = given[name].map(literal);
          const [row] = await client.unsafe(`explain (analyze, format json) execute ${name} (${values})`).values();
          await client.unsafe("rollback");
          const few = mostRows(row[0][0].Plan) <= tokens.length * 2;
          expect([when, name, few]).toEqual([when, name, true]);
        }
      };
      await expectFew("empty");
      await client.unsafe("vacuum analyze");
      for (const statement of MANY) await client.unsafe(statement);
      await expectFew("full, with the statistics of an empty database");
      await client.unsafe("analyze");
      await expectFew("full");
    },
  );

  test.skipIf(missing !== null)(
    `taking a call writes down what it changes, and not the whole call again, on Postgres ${version}${why}`,
    async () => {
      const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
      const store = await place.open();
      const now = 1_790_000_000_000;
      const calls = Array.from({ length: 64 }, () => accepted(now, {}, "x".repeat(1_000)));
      for (const call of calls) await accept(store, call);
      await store.close();
      await using client = postgresClient(place.url);
      await client.unsafe(BEGIN_COMMANDS);
      const taking = {
        tenant: "acme",
        agent_id: calls[0]?.row.agent_id ?? "",
        owner: "rep",
        now,
        after: "",
        leftOut: [],
      };
      const given = takeCommand.postgres.valuesOf([{ ...taking, tokens: calls.map(() => crypto.randomUUID()) }]);
      await client.unsafe(`prepare one as ${takeCommand.postgres.text}`);
      const explain = `explain (analyze, wal, format json) execute one (${given.map(literal)})`;
      const [row] = await client.unsafe(explain).values();
      expect(row[0][0].Plan["WAL Bytes"] / calls.length).toBeLessThan(1_000);
    },
  );

  const name = `commands find their rows by key, empty or with ${OPEN + ENDED} calls, on Postgres ${version}`;
  test.skipIf(missing !== null)(
    `${name}${why}`,
    async () => {
      const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
      await (await place.open()).close();
      await using client = postgresClient(place.url);
      const named = [1, 256].flatMap((count) =>
        inputs(count).map(([command, all]) => ({ command, all, as: `${command.name}_${count}` })),
      );
      const expectKeys = async (when: string) => {
        await client.unsafe(BEGIN_COMMANDS);
        for (const { command, all, as } of named) {
          const given = command.postgres.valuesOf(all).map(literal);
          const rows = await client.unsafe(`explain (costs off) execute ${as} (${given})`).values();
          const plan = rows.flat().join("\n");
          // Accepting only inserts.
          if (![acceptCommand.name, acceptPlainCommand.name].includes(command.name))
            expect(plan).toContain("Index Scan");
          expect([when, as, wholeTables(plan)]).toEqual([when, as, []]);
        }
        await client.unsafe("rollback");
      };
      for (const { command, as } of named) await client.unsafe(`prepare ${as} as ${command.postgres.text}`);
      await expectKeys("empty");
      await client.unsafe("vacuum analyze");
      await expectKeys("empty and vacuumed");
      for (const statement of MANY) await client.unsafe(statement);
      await expectKeys("full, with the statistics of an empty database");
      await client.unsafe("analyze");
      await expectKeys("full");
    },
    120_000,
  );

  test.skipIf(missing !== null)(
    `what replicas look for all the time is read along its own index beside ${OPEN} queued calls, on Postgres ${version}${why}`,
    async () => {
      const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
      await (await place.open()).close();
      await using client = postgresClient(place.url);
      await client.unsafe(MANY[0] ?? "");
      await client.unsafe("analyze open_invocations");
      await client.unsafe("set plan_cache_mode = force_generic_plan");
      for (const [text, values] of await lookedFor()) {
        await client.unsafe(`prepare asked as ${text}`);
        const [row] = await client
          .unsafe(`explain (analyze, format json) execute asked (${values.map(literal)})`.replace(" ()", ""))
          .values();
        await client.unsafe("deallocate asked");
        expect(mostRows(row[0][0].Plan)).toBe(0);
      }
    },
  );
}

/** The statements, as the product writes them. */
async function lookedFor(): Promise<[string, unknown[]][]> {
  const asked: [string, unknown[]][] = [];
  const db = postgresQueries(async (text, values) => {
    asked.push([text, values]);
    return [];
  });
  const read = { db, tables: defineSchema(columns.postgres) };
  const store = { read } as unknown as Store;
  const unused = { clock, log: silentLog, stop() {}, released() {} };
  await compareOnce({ ...unused, store, replica: "rep_1", claims: createClaims() });
  await createReaper({ ...unused, store })();
  return asked;
}
