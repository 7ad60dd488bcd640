// Agents and credentials of the versions before there were lists and totals, as they are after that migration.
import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { SQL } from "bun";
import { temporaryRoot } from "../../test/support/gateway/process.ts";
import { startPostgres } from "../../test/support/stores/postgres.ts";
import { clock } from "../../test/support/stores/stores.ts";
import { hostRules } from "../core/host.ts";
import { silentLog } from "../core/log.ts";
import type { AgentFilter } from "../gateway/agents/pages.ts";
import { createAgentService } from "../gateway/agents/service.ts";
import { openStore } from "./open.ts";
import type { Store } from "./store.ts";
import { totalOf } from "./totals.ts";

const OLDER = /^000[1-6]_/;
const ACME = { tenant: "acme", user: "ada", scopes: new Set<string>() };
const FILTER: AgentFilter = { status: null, protocol: null, tag: null, q: null, limit: 20, offset: 0 };

const agentId = (last: number) => `agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3${last}`;
const TAGS = JSON.stringify(["red", "red", 'a "b"/c', "Ä"], null, "\t");

function statements(dialect: "sqlite" | "postgres"): string[] {
  const dir = join(import.meta.dir, "../../db", dialect);
  const files = readdirSync(dir).filter((name) => OLDER.test(name));
  const [yes, no] = dialect === "sqlite" ? ["1", "0"] : ["true", "false"];
  const agent = (tenant: string, last: number, url: string, protocol: string, tags: string, deletedAt: string) =>
    `insert into agents (tenant, id, name, description, tags, metadata, upstream_url, suspended, rate_revision,
       emit_receipts, capture_body, protocol, created_by, created_at, updated_at, deleted_at, search_text)
     values ('${tenant}', '${agentId(last)}', 'agent ${last}', 'Öl', ${tags}, '{}', ${url}, ${no}, 0, ${no}, ${yes},
       '${protocol}', 'ada', 1, 2, ${deletedAt}, 'AGENT ${last}' || '\u0001' || 'ÖL')`;
  return [
    "create table schema_migrations (version integer not null primary key, applied_at bigint not null)",
    ...files.sort().map((name) => readFileSync(join(dir, name), "utf8")),
    "insert into schema_migrations values (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)",
    agent("acme", 1, "'https://example.com/'", "http", `'${TAGS}'`, "null"),
    agent("acme", 2, "null", "mcp", "'[]'", "null"),
    agent("acme", 3, "'https://example.com/'", "mcp", `'${TAGS}'`, "7"),
    agent("acme", 4, "'https://example.com/'", "http", "null", "null"),
    agent("rival", 5, "null", "http", "null", "null"),
    ...["acme", "acme", "rival"].map(
      (tenant, i) =>
        `insert into credentials (tenant, id, name, auth_type, source, vault_ref, version, created_at, updated_at)
         values ('${tenant}', 'cred_${i}', 'name ${i}', 'bearer', 'vault', 'a/b', 1, 1, 1)`,
    ),
  ];
}

async function check(store: Store): Promise<void> {
  const agents = createAgentService({ store, clock, rules: hostRules({ allow: [] }), agentsMax: 4 });
  const list = async (filter: Partial<AgentFilter>) => {
    const { rows, total } = await agents.list(ACME, { ...FILTER, ...filter });
    const found = (await Array.fromAsync(rows())).map(({ name }) => Number(name.slice(-1)));
    expect(total).toBe(found.length);
    return found;
  };
  expect(await list({})).toEqual([4, 2, 1]);
  expect(await list({ status: "active" })).toEqual([4, 1]);
  expect(await list({ status: "pending", protocol: "mcp" })).toEqual([2]);
  expect(await list({ status: "inactive" })).toEqual([3]);
  expect(await list({ tag: "red" })).toEqual([1]);
  expect(await list({ tag: 'a "b"/c', protocol: "http", status: "active" })).toEqual([1]);
  expect(await list({ tag: "Ä", status: "inactive" })).toEqual([3]);
  expect(await list({ q: "öl" })).toEqual([4, 2, 1]);
  expect(await list({ q: "öl", status: "inactive", tag: "red" })).toEqual([3]);
  expect(await totalOf(store.read, "acme", "credentials")).toBe(2);
  expect(await totalOf(store.read, "rival", "credentials")).toBe(1);

  // They go on as if they had been made since.
  await agents.patch(ACME, agentId(1), { tags: ["blue"], upstream_url: null });
  await agents.remove(ACME, agentId(4));
  expect(await list({ status: "pending" })).toEqual([2, 1]);
  expect(await list({ tag: "red" })).toEqual([]);
  expect(await list({ tag: "blue" })).toEqual([1]);
  expect(await list({ status: "inactive" })).toEqual([4, 3]);
  for (const name of ["new 6", "new 7"]) await agents.create(ACME, { name });
  await expect(agents.create(ACME, { name: "new 8" })).rejects.toMatchObject({ kind: "over_limit" });
}

test("on SQLite agents of older versions stand in their lists", async () => {
  const dir = mkdtempSync(join(temporaryRoot(), "migrate-"));
  const database = new Database(join(dir, "tollgate.db"));
  for (const statement of statements("sqlite")) database.run(statement);
  database.close();
  const store = await openStore({ databaseUrl: null, dataDir: dir, log: silentLog, clock });
  await check(store);
  await store.close();
  rmSync(dir, { recursive: true });
});

test("on Postgres agents of older versions stand in their lists", async () => {
  const url = await (await startPostgres()).freshDatabase();
  const client = new SQL(url, { max: 1 });
  for (const statement of statements("postgres")) await client.unsafe(statement);
  await client.close();
  const store = await openStore({ databaseUrl: url, dataDir: "/nowhere", log: silentLog, clock });
  await check(store);
  await store.close();
}, 30_000);
