// No secret comes out: not in a response, not in the log, and no managed plaintext in any byte of the database,
// whichever it is. What is searched for is everything that tests sent as a secret, in every form that it takes.
import { describe, expect, test } from "bun:test";
import { readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { SQL } from "bun";
import { type Contract, contract, type Json, MCP, READ_BODY, UNKNOWN_CREDENTIAL } from "./contract.ts";

const PLAIN = {
  bearer: "bearer-secret-4f1b9c7de2",
  rotated: "rotated-secret-91d07a3bb8",
  apiKey: "api-key-secret-c33f60a1d5",
  none: "none-secret-7be1120fd4",
  refused: "refused-secret-0c5d8e7a66",
  unsendable: "unsendable-secret-öa83f2ce1b",
  deleted: "deleted-secret-5d20b7e9c4",
};
const CALLER = { payment: "payment-secret-d80f13aa27", cookie: "cookie-secret-3a9e6b04c1" };
const REQUEST_BODY = "body-of-the-caller-6f00d1";

type Secrets = Readonly<Record<string, string | Buffer>>;

/** The forms in which a secret could lie somewhere: itself, hexadecimal, base64 at each of the three offsets. */
function formsOf(secret: string | Buffer): (string | Buffer)[] {
  const bytes = Buffer.from(secret);
  const shifted = [0, 1, 2].map((offset) => {
    const encoded = Buffer.concat([Buffer.alloc(offset), bytes]).toString("base64");
    // The first and last groups depend on the neighbours.
    return encoded.slice(offset === 0 ? 0 : 4, -4);
  });
  const written = typeof secret === "string" ? [encodeURIComponent(secret)] : [];
  return [bytes, bytes.toString("hex"), ...written, ...shifted];
}

/** Those of the secrets that are found, by their names. */
function found(haystack: Buffer, secrets: Secrets): string[] {
  return Object.entries(secrets)
    .filter(([, secret]) => formsOf(secret).some((form) => haystack.includes(form)))
    .map(([name]) => name);
}

async function databaseBytes(at: Contract): Promise<Buffer> {
  if (at.databaseUrl === undefined) return filesOf(at.gateway.dataDir);
  await using sql = new SQL(at.databaseUrl, { max: 1 });
  const tables: Json[] = await sql.unsafe(
    "select table_name from information_schema.tables where table_schema = 'public'",
  );
  const rows: string[] = [];
  for (const { table_name } of tables) {
    // bytea shows as hexadecimal digits, so it is put in the way of the plain search as well.
    for (const { row } of await sql.unsafe(`select row_to_json(t)::text as row from "${table_name}" t`)) {
      rows.push(
        row,
        ...[...row.matchAll(/\\\\x([0-9a-f]+)/g)].map(([, hex]) => Buffer.from(hex, "hex").toString("latin1")),
      );
    }
  }
  expect(tables.length).toBeGreaterThan(5);
  return Buffer.from(rows.join("\n"));
}

/** Every file: the database, its write-ahead log, its index, the master key. */
function filesOf(dir: string): Buffer {
  const paths = readdirSync(dir, { recursive: true }).map((name) => join(dir, String(name)));
  const files = paths.filter((path) => statSync(path).isFile());
  expect(files.map((path) => path.slice(dir.length + 1))).toContain("tollgate.db");
  return Buffer.concat(files.map((path) => readFileSync(path)));
}

contract(
  (at) => {
    describe("after credentials of every kind were made, used, rotated, refused and deleted", () => {
      test("no secret is in a response, in the log, or in the database", async () => {
        const tenant = at.tenant();
        const answers: string[] = [];
        const send: typeof tenant.send = async (...request) => {
          const answer = await tenant.send(...request);
          answers.push(JSON.stringify([...answer.headers]), answer.text);
          return answer;
        };
        const create = async (name: string, fields: object) =>
          (await send("POST", "/v1/credentials", { json: { name, source: "managed", ...fields } })).body;
        const route = at.upstream();
        const bearer = await create("bearer", { auth_type: "bearer", plaintext: PLAIN.bearer });
        const apiKey = await create("api key", { auth_type: "api_key", plaintext: PLAIN.apiKey });
        const none = await create("none", { auth_type: "none", plaintext: PLAIN.none });
        const unsendable = await create("unsendable", { auth_type: "bearer", plaintext: PLAIN.unsendable });
        const deleted = await create("deleted", { auth_type: "bearer", plaintext: PLAIN.deleted });
        await send("DELETE", `/v1/credentials/${deleted.id}`);

        const plaintext = PLAIN.refused;
        await create("bearer", { auth_type: "bearer", plaintext });
        await create("x", { auth_type: "basic", plaintext });
        await create("x", { auth_type: "bearer", plaintext: [plaintext] });
        await create("x", { auth_type: "bearer", plaintext: { [plaintext]: 1 } });
        await create("x", { auth_type: "bearer", source: "vault", plaintext, vault_ref: "a" });
        await create("x", { auth_type: "bearer", plaintext, surprise: 1 });
        await create("x", { auth_type: "bearer", source: plaintext });
        await send("PUT", `/v1/credentials/${UNKNOWN_CREDENTIAL}`, { json: { plaintext } });
        const headers = { "content-type": "application/json" };
        await send("POST", "/v1/credentials", { headers, body: `{"plaintext":"${plaintext}",}` });
        await send("POST", "/v1/credentials", {
          headers,
          body: `{"plaintext":"${plaintext}","plaintext":""}`,
        });
        await send("POST", "/v1/credentials", { headers: { "content-type": "text/plain" }, body: plaintext });

        const call = { jsonrpc: "2.0", id: 1, method: "tools/list" };
        for (const { id: credential_ref } of [bearer, apiKey, none, unsendable]) {
          for (const protocol of [{}, MCP]) {
            const agent = await tenant.agent({ upstream_url: route.url, credential_ref, ...protocol });
            const ended = await tenant.invoke(agent.id, {
              body: JSON.stringify({ ...call, params: { text: REQUEST_BODY } }),
              headers: { cookie: CALLER.cookie, "x-api-key": CALLER.payment },
            });
            answers.push(JSON.stringify([agent, ended]));
            await send("GET", `/v1/invocations/${ended.invocation_id}`, { scope: READ_BODY });
          }
        }
        // They did reach the upstream, so there was something to leak.
        const sent = route.seen.map(({ headers: seen }) => seen.get("authorization") ?? seen.get("x-api-key"));
        expect(sent).toContain(`Bearer ${PLAIN.bearer}`);
        expect(sent).toContain(PLAIN.apiKey);
        await send("PUT", `/v1/credentials/${bearer.id}`, { json: { plaintext: PLAIN.rotated } });
        for (const path of ["/v1/credentials", `/v1/credentials/${bearer.id}`, "/v1/agents", "/v1/invocations"])
          await send("GET", path);

        const token = await tenant.token();
        const inDatabase = { ...PLAIN, ...CALLER, token, signature: token.split(".")[2] ?? token };
        const masterKey = Buffer.from(at.masterKey, "base64");
        const all = { ...inDatabase, masterKey, masterKeyText: at.masterKey };

        expect(found(Buffer.from(answers.join("\n")), all)).toEqual([]);
        const log = Buffer.from(at.gateway.log());
        expect(found(log, { ...all, body: REQUEST_BODY })).toEqual([]);
        const database = await databaseBytes(at);
        expect(found(database, inDatabase)).toEqual([]);

        // The search finds what is there: the log names the tenant, the database the captured body.
        expect(found(log, { tenant: tenant.name })).toEqual(["tenant"]);
        expect(found(database, { body: REQUEST_BODY })).toEqual(["body"]);

        // What a clean stop writes, and what the next start logs, is searched too.
        await at.gateway.stop();
        expect(found(await databaseBytes(at), inDatabase)).toEqual([]);
        await at.gateway.restart();
        expect(found(Buffer.from(at.gateway.log()), all)).toEqual([]);
        const agent = await tenant.agent({ upstream_url: route.url, credential_ref: bearer.id });
        await tenant.invoke(agent.id);
        expect(route.seen.at(-1)?.headers.get("authorization")).toBe(`Bearer ${PLAIN.rotated}`);
      });
    });

    test("the files of the data directory are the owner's alone", () => {
      // On Postgres nothing is kept in files.
      if (at.databaseUrl !== undefined) return;
      const { dataDir } = at.gateway;
      expect((statSync(dataDir).mode & 0o777).toString(8)).toBe("700");
      for (const name of readdirSync(dataDir)) {
        expect([name, (statSync(join(dataDir, name)).mode & 0o777).toString(8)]).toEqual([name, "600"]);
      }
    });
  },
  { TOLLGATE_LOG_LEVEL: "debug" },
);
