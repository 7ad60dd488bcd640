// Large bodies stand in the database in parts. What is accepted is sent and shown byte for byte, also after a kill in the
// middle of it, and no part stays that belongs to no call.
import { Database as SqliteFile } from "bun:sqlite";
import { expect, setDefaultTimeout, test } from "bun:test";
import { createHash } from "node:crypto";
import { join } from "node:path";
import { postgresClient } from "../../src/storage/postgres/pool.ts";
import { type Database, eachDatabase, type Gateway, startGateway } from "../support/gateway/gateway.ts";
import type { Environment } from "../support/gateway/process.ts";
import { startUpstream } from "../support/http/upstream.ts";

setDefaultTimeout(120_000);

const MIB = 1024 * 1024;
const PART = MIB / 2;
const WAIT_MS_MAX = 60_000;

/** Around the lengths that matter, in every mixture. */
const SIZES = [8_193, PART, PART + 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 7, 8 * MIB + 1];

const sha256 = (bytes: Uint8Array) => createHash("sha256").update(bytes).digest("hex");
/** Of a length that divides no part, so that a part in a wrong place shows. */
const bytesOf = (size: number, seed: number) =>
  Buffer.alloc(
    size,
    Uint8Array.from({ length: 65_521 }, (_, i) => (i * (2 * seed + 1) + (i >> 8)) % 256),
  );

/** Runs SQL beside a gateway, on its own database. */
async function databaseOf(gateway: Gateway, { DATABASE_URL: url }: Environment) {
  if (url === undefined) {
    const file = new SqliteFile(join(gateway.dataDir, "tollgate.db"));
    file.run("pragma busy_timeout = 5000");
    return { rows: async (text: string) => file.query(text).values(), [Symbol.asyncDispose]: async () => file.close() };
  }
  const client = postgresClient(url);
  return {
    rows: async (text: string): Promise<unknown[][]> => client.unsafe(text).values(),
    [Symbol.asyncDispose]: () => client.close(),
  };
}

async function startWith(database: Database, env: Environment = {}) {
  const own = await database.fresh();
  const gateway = await startGateway({ env: { ...own, ...env } });
  return { gateway, sql: await databaseOf(gateway, own) };
}

async function clientOf(gateway: Gateway) {
  const token = await gateway.token({ tenant: "acme", user: "alice", scope: "invocations:read_body" });
  const headers = { authorization: `Bearer ${token}` };
  const get = async (path: string) => (await fetch(`${gateway.url}${path}`, { headers })).json() as Promise<never>;
  return {
    get,
    async agent(fields: object): Promise<string> {
      const body = JSON.stringify(fields);
      const type = { "content-type": "application/json" };
      const made = await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers: { ...headers, ...type }, body });
      return ((await made.json()) as { id: string }).id;
    },
    call: (path: string, body: Uint8Array, more: Record<string, string> = {}) =>
      fetch(`${gateway.url}/v1/proxy/${path}`, { method: "POST", headers: { ...headers, ...more }, body }),
    async ended(agent: string, id: string): Promise<{ status: string; error_class: string | null }> {
      for (const deadline = performance.now() + WAIT_MS_MAX; performance.now() < deadline; await Bun.sleep(50)) {
        const poll: { status: string; error_class: string | null } = await get(`/v1/proxy/${agent}/invocations/${id}`);
        if (poll.status === "succeeded" || poll.status === "failed") return poll;
      }
      throw new Error(`${id} has not ended`);
    },
  };
}

async function until(what: string, isSo: () => Promise<boolean>, pauseMs = 50): Promise<void> {
  for (const deadline = performance.now() + WAIT_MS_MAX; !(await isSo()); await Bun.sleep(pauseMs)) {
    if (performance.now() > deadline) throw new Error(`in vain: ${what}`);
  }
}

type Sql = Awaited<ReturnType<typeof databaseOf>>;
const count = async (sql: Sql, text: string) => Number((await sql.rows(text))[0]?.[0]);
const ORPHANS = `select count(*) from body_parts p
  where not exists (select 1 from invocations i where i.tenant = p.tenant and i.id = p.invocation_id)`;
const ORPHANED = "select count(*) from orphaned_parts";

eachDatabase((database) => {
  test.concurrent("large bodies go through both ways byte for byte, and what is not shown of them goes", async () => {
    const [seen, answers] = [new Map<string, string>(), new Map<string, Uint8Array>()];
    const upstream = startUpstream(async (request) => {
      const id = request.headers.get("x-service-invocation-id") ?? "";
      const bytes = await request.bytes();
      seen.set(id, `${request.headers.get("content-length")} ${bytes.length} ${sha256(bytes)}`);
      const answer = bytesOf(SIZES[(SIZES.indexOf(bytes.length) + 3) % SIZES.length] ?? 0, seen.size);
      answers.set(id, answer);
      return new Response(answer);
    });
    const { gateway, sql } = await startWith(database);
    await using stack = new AsyncDisposableStack();
    for (const each of [gateway, sql]) stack.use(each);
    stack.defer(upstream.stop);
    const client = await clientOf(gateway);
    const shown = await client.agent({ name: "shown", upstream_url: upstream.url, emit_receipts: true });
    const hidden = await client.agent({ name: "hidden", upstream_url: upstream.url, capture_body: false });
    const hashes = new Map<string, string>();

    await Promise.all(
      SIZES.flatMap((size, n) => [
        (async () => {
          const body = bytesOf(size, n);
          const key = { "idempotency-key": `${size}`, prefer: "wait=60" };
          const accepted = await client.call(shown, body, key);
          const { invocation_id: id } = (await accepted.json()) as { invocation_id: string };
          expect((await client.ended(shown, id)).status).toBe("succeeded");
          const answer = answers.get(id) ?? new Uint8Array();
          expect(seen.get(id)).toBe(`${size} ${size} ${sha256(body)}`);
          const detail: Record<string, unknown> = await client.get(`/v1/invocations/${id}`);
          expect([detail["req_size"], detail["resp_size"]]).toEqual([size, answer.length]);
          for (const [field, whole] of [
            ["req_body", body],
            ["resp_body", answer],
          ] as const) {
            expect(sha256(Buffer.from(String(detail[field]), "base64"))).toBe(sha256(whole.subarray(0, MIB)));
          }
          const poll: Record<string, unknown> = await client.get(`/v1/proxy/${shown}/invocations/${id}`);
          expect(poll["response_body_b64"]).toBe(detail["resp_body"]);
          expect(poll["response_truncated"]).toBe(answer.length > MIB);
          hashes.set(id, `${sha256(body)} ${sha256(answer)}`);
          // The same call once more is the same call, and its body leaves nothing behind.
          const again = await client.call(shown, body, key);
          expect(((await again.json()) as { invocation_id: string }).invocation_id).toBe(id);
        })(),
        (async () => {
          const body = bytesOf(size, 100 + n);
          if (n % 2 === 0) {
            const streamed = await client.call(`${hidden}/stream`, body);
            const id = streamed.headers.get("x-service-invocation-id") ?? "";
            expect(sha256(await streamed.bytes())).toBe(sha256(answers.get(id) ?? new Uint8Array()));
            expect(seen.get(id)).toBe(`${size} ${size} ${sha256(body)}`);
            return;
          }
          const accepted = await client.call(hidden, body);
          const { invocation_id: id } = (await accepted.json()) as { invocation_id: string };
          expect((await client.ended(hidden, id)).status).toBe("succeeded");
          expect(seen.get(id)).toBe(`${size} ${size} ${sha256(body)}`);
        })(),
      ]),
    );

    await until("no part is orphaned any more", async () => (await count(sql, ORPHANED)) === 0);
    expect(await count(sql, ORPHANS)).toBe(0);
    const kept = "select count(*), max(n) from body_parts where invocation_id in (select id from invocations where";
    expect((await sql.rows(`${kept} agent_id = '${hidden}')`))[0]?.map(Number)).toEqual([0, 0]);
    const bodyPartsOf = (size: number) => Math.ceil(Math.min(size, MIB) / PART);
    const expected = [...answers].reduce(
      (sum, [id, { length }]) => sum + (hashes.has(id) ? bodyPartsOf(length) : 0),
      SIZES.reduce((sum, size) => sum + bodyPartsOf(size), 0),
    );
    expect((await sql.rows(`${kept} agent_id = '${shown}')`))[0]?.map(Number)).toEqual([expected, 1]);
    await until(
      "all receipts are there",
      async () => (await count(sql, "select count(*) from receipts")) === SIZES.length,
    );
    const receipts = await sql.rows("select invocation_id, jws from receipts");
    for (const [id, jws] of receipts) {
      const claims = JSON.parse(Buffer.from(String(jws).split(".")[1] ?? "", "base64url").toString());
      expect(`${claims.req_sha256} ${claims.resp_sha256}`).toBe(hashes.get(String(id)) ?? "");
    }
  });

  test.concurrent("killed while large bodies are being stored, it makes what it accepted and keeps nothing else", async () => {
    const seen = new Map<string, string>();
    const hold = Promise.withResolvers<void>();
    const begun = Promise.withResolvers<void>();
    const upstream = startUpstream(async (request) => {
      seen.set(request.headers.get("x-service-invocation-id") ?? "", sha256(await request.bytes()));
      begun.resolve();
      await hold.promise;
      return new Response("ok");
    });
    const { gateway, sql } = await startWith(database, { TOLLGATE_AGENT_CONCURRENCY: "1" });
    await using stack = new AsyncDisposableStack();
    for (const each of [gateway, sql]) stack.use(each);
    stack.defer(upstream.stop);
    const client = await clientOf(gateway);
    const agent = await client.agent({ name: "a", upstream_url: upstream.url });
    const accepted = new Map<string, string>();
    const send = async (body: Uint8Array) => {
      const response = await client.call(agent, body);
      if (response.status !== 202) throw new Error(`answered ${response.status}`);
      accepted.set(((await response.json()) as { invocation_id: string }).invocation_id, sha256(body));
    };
    await send(bytesOf(2 * MIB, 0));
    await begun.promise;
    for (const n of [1, 2]) await send(bytesOf(n * MIB + n, n));
    for (let kill = 0; kill < 2; kill++) {
      // Parts of some call are stored, and it is not accepted yet. A look may come too late for that, so others follow.
      const stored = kill === 0 ? 1 : 20;
      let under = 0;
      const sent: Promise<unknown>[] = [];
      const isBetween = async () => {
        for (; under < 2; under++) {
          const sending = send(bytesOf(32 * MIB, 3 + under + kill));
          sent.push(sending.catch(() => {}).then(() => under--));
        }
        return (await count(sql, ORPHANS)) >= stored;
      };
      await until("parts are stored", isBetween, 1);
      await gateway.kill9();
      await Promise.all(sent);
      hold.resolve();
      if (database.name === "postgres") {
        // As after the ten minutes for which the parts of a call that is about to be accepted are kept, and the lease.
        await sql.rows("delete from processes");
        await sql.rows("update orphaned_parts set due_at = 1 where due_at > 1");
      }
      await gateway.restart();
      const again = await clientOf(gateway);
      // The first one was being made, so it may have been seen, and is not made again.
      for (const [id, hash] of [...accepted].slice(1, 3)) {
        expect(await again.ended(agent, id)).toMatchObject({ status: "succeeded" });
        expect(seen.get(id)).toBe(hash);
      }
      for (const id of accepted.keys()) expect(await again.get(`/v1/invocations/${id}`)).toMatchObject({ id });
      await until("no part is orphaned any more", async () => (await count(sql, ORPHANED)) === 0);
      expect(await count(sql, ORPHANS)).toBe(0);
    }
  });
});
