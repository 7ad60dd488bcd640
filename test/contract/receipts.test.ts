// The contract of trust receipts: what one says for every kind of end, where it is read, the export, and the
// command that checks it. Signatures are checked by a library of its own, against the published keys.
import { describe, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { mkdtempSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { compactVerify, createLocalJWKSet, decodeProtectedHeader } from "jose";
import { temporaryRoot } from "../support/gateway/process.ts";
import {
  contract,
  expectError,
  expectNoBody,
  expectShape,
  is,
  type Json,
  MCP,
  READ_BODY,
  type Tenant,
  UNKNOWN_INVOCATION,
} from "./contract.ts";

const MIB = 1024 * 1024;
const sha256 = (data: string | Uint8Array) => createHash("sha256").update(data).digest("hex");
const HASH = /^[0-9a-f]{64}$/;
const RECEIPTS = { emit_receipts: true };

const CLAIMS = {
  receipt_id: is.id("rcpt"),
  tenant: is.text,
  agent_id: is.id("agt"),
  invocation_id: is.id("inv"),
  caller: is.text,
  mode: is.oneOf("transactional", "streaming"),
  status: is.oneOf("succeeded", "failed"),
  error_class: is.orNull(is.text),
  upstream_status: is.orNull(is.integer),
  created_at: is.dateTime,
  completed_at: is.dateTime,
  latency_ms: is.orNull(is.integer),
  req_size: is.integer,
  resp_size: is.orNull(is.integer),
  req_sha256: is.text,
  resp_sha256: is.orNull(is.text),
  payment: is.nothing,
  settlement: is.nothing,
  previous: is.orNull(is.text),
};

contract((at) => {
  const jwks = async () => (await (await fetch(`${at.gateway.url}/.well-known/jwks.json`)).json()) as Json;

  async function claimsOf(jws: string): Promise<Json> {
    const { payload } = await compactVerify(jws, createLocalJWKSet(await jwks()), { algorithms: ["EdDSA"] });
    return JSON.parse(new TextDecoder().decode(payload));
  }

  async function receiptOf(tenant: Tenant, invocation: string): Promise<Json> {
    const { status, body } = await tenant.send("GET", `/v1/invocations/${invocation}/receipt`);
    expect(status).toBe(200);
    expectShape(body, { receipt: is.text });
    return claimsOf(body.receipt);
  }

  async function exported(tenant: Tenant): Promise<string[]> {
    const { status, headers, text } = await tenant.send("GET", "/v1/receipts?limit=100");
    expect([status, headers.get("content-type")]).toEqual([200, "application/jsonl"]);
    return text.split("\n").slice(0, -1);
  }

  function verify(text: string, ...keys: readonly string[]) {
    const file = join(mkdtempSync(join(temporaryRoot(), "receipts-")), "receipts.jsonl");
    writeFileSync(file, text);
    const where = keys.length > 0 ? keys : ["--jwks", `${at.gateway.url}/.well-known/jwks.json`];
    return at.gateway.run("receipt", "verify", file, ...where);
  }

  describe("a receipt", () => {
    test("says what the call was and how it ended, as soon as it has ended", async () => {
      const tenant = at.tenant();
      const route = at.upstream(() => Response.json({ hello: "world" }, { status: 201 }));
      const agent = await tenant.agent({ upstream_url: route.url, ...RECEIPTS });
      const view = await tenant.invoke(agent.id, { body: "question", user: "bob" });
      const claims = await receiptOf(tenant, view.invocation_id);
      expectShape(claims, CLAIMS);
      const body = Buffer.from(view.response_body_b64, "base64");
      expect(claims).toMatchObject({
        tenant: tenant.name,
        agent_id: agent.id,
        invocation_id: view.invocation_id,
        caller: "bob",
        mode: "transactional",
        status: "succeeded",
        error_class: null,
        upstream_status: 201,
        created_at: view.created_at,
        completed_at: view.completed_at,
        latency_ms: view.latency_ms,
        req_size: 8,
        resp_size: body.length,
        req_sha256: sha256("question"),
        resp_sha256: sha256(body),
        previous: null,
      });
      const { body: again } = await tenant.send("GET", `/v1/invocations/${view.invocation_id}/receipt`);
      expect(await exported(tenant)).toEqual([again.receipt]);
      const header = decodeProtectedHeader(again.receipt);
      expect(header).toEqual({ alg: "EdDSA", kid: expect.any(String), typ: "receipt+jwt" });
      expect((await jwks()).keys.map((key: Json) => key.kid)).toContain(header.kid);
    });

    test("is there for every end of a call, and what did not come is null", async () => {
      const tenant = at.tenant();
      const answers = at.upstream(() => new Response("no", { status: 404 }));
      const hangs = at.upstream(() => new Promise<Response>(() => {}));
      const agent = (upstream_url: string) => tenant.agent({ upstream_url, ...RECEIPTS });
      const [refusing, blocked, slow] = [
        await agent(answers.url),
        await agent("http://metadata.invalid/"),
        await agent(hangs.url),
      ];
      const refused = await tenant.invoke(refusing.id);
      const lost = await tenant.invoke(blocked.id);
      const cancelled = await tenant.call(slow.id);
      await hangs.arrival();
      expect((await tenant.send("POST", `/v1/proxy/${slow.id}/invocations/${cancelled}/cancel`)).status).toBe(200);
      expect(await receiptOf(tenant, refused.invocation_id)).toMatchObject({
        status: "failed",
        error_class: "upstream_4xx",
        upstream_status: 404,
        resp_size: 2,
        resp_sha256: sha256("no"),
      });
      const nothing = { upstream_status: null, resp_size: null, resp_sha256: null };
      expect(await receiptOf(tenant, lost.invocation_id)).toMatchObject({
        error_class: "upstream_5xx",
        ...nothing,
      });
      expect(await receiptOf(tenant, cancelled)).toMatchObject({ error_class: "cancelled", ...nothing });
    });

    test("hashes whole bodies, as decoded, captured or not", async () => {
      const tenant = at.tenant();
      const large = Buffer.alloc(3 * MIB, "large ");
      const big = at.upstream(() => new Response(large));
      const packed = at.upstream(() => new Response(gzipSync(large), { headers: { "content-encoding": "gzip" } }));
      const bodiless = at.upstream(() => new Response());
      for (const capture_body of [true, false]) {
        for (const { url } of [big, packed]) {
          const agent = await tenant.agent({ upstream_url: url, capture_body, ...RECEIPTS });
          const view = await tenant.invoke(agent.id, { body: new Uint8Array(large) });
          expect(view.response_truncated).toBe(capture_body);
          expect(await receiptOf(tenant, view.invocation_id)).toMatchObject({
            req_size: large.length,
            resp_size: large.length,
            req_sha256: sha256(large),
            resp_sha256: sha256(large),
          });
        }
        const agent = await tenant.agent({ upstream_url: bodiless.url, capture_body, ...RECEIPTS });
        const { invocation_id } = await tenant.invoke(agent.id, { body: "" });
        expect(await receiptOf(tenant, invocation_id)).toMatchObject({
          req_sha256: sha256(""),
          resp_sha256: sha256(""),
        });
      }
    });

    test("is of a call whose agent had emit_receipts when it was accepted", async () => {
      const tenant = at.tenant();
      const gate = Promise.withResolvers<void>();
      const route = at.upstream(async () => {
        await gate.promise;
        return new Response("late");
      });
      const { id } = await tenant.agent({ upstream_url: route.url });
      const without = await tenant.call(id);
      await route.arrival(1);
      await tenant.patch(id, RECEIPTS);
      const withOne = await tenant.call(id);
      await route.arrival(2);
      const receipt = (invocation: string) => tenant.send("GET", `/v1/invocations/${invocation}/receipt`);
      expectError(await receipt(withOne), 404, "emit_receipts of its agent counts once the call has ended");
      await tenant.patch(id, { emit_receipts: false });
      gate.resolve();
      await tenant.ended(id, without);
      await tenant.ended(id, withOne);
      expectError(await receipt(without), 404, "emit_receipts of its agent is off");
      expect(await receiptOf(tenant, withOne)).toMatchObject({ invocation_id: withOne, previous: null });
    });

    test("is nowhere for an unknown or malformed ID, another tenant, or without a token", async () => {
      const tenant = at.tenant();
      const agent = await tenant.agent({ upstream_url: at.upstream().url, ...RECEIPTS });
      const { invocation_id } = await tenant.invoke(agent.id);
      for (const id of [UNKNOWN_INVOCATION, agent.id, "inv_", "x%00", `${invocation_id}x`]) {
        expectError(await tenant.send("GET", `/v1/invocations/${id}/receipt`), 404);
      }
      const path = `/v1/invocations/${invocation_id}/receipt`;
      expectError(await at.tenant().send("GET", path), 404);
      expectError(await tenant.send("POST", path), 405);
      const headers = { authorization: "Bearer x" };
      expectNoBody(await tenant.send("GET", path, { headers }), 401);
      expectNoBody(await tenant.send("GET", "/v1/receipts", { headers }), 401);
    });
  });

  describe("the receipt of an mcp call", () => {
    /** A server with a session whose answers are `size` bytes of text long. */
    const server = (size: number, stream: boolean) =>
      at.upstream(({ method, body }) => {
        if (method !== "POST") return new Response(null, { status: 200 });
        const message = JSON.parse(new TextDecoder().decode(body));
        const session = { "mcp-session-id": "s1" };
        if (message.method === "initialize") {
          const result = {
            protocolVersion: "2025-06-18",
            capabilities: {},
            serverInfo: { name: "s", version: "1" },
          };
          return Response.json({ jsonrpc: "2.0", id: message.id, result }, { headers: session });
        }
        if (message.id === undefined) return new Response(null, { status: 202 });
        const answer = JSON.stringify({ jsonrpc: "2.0", id: message.id, result: { text: "x".repeat(size) } });
        if (!stream) return new Response(answer, { headers: { "content-type": "application/json" } });
        const events = `: hello\n\nevent: message\ndata: ${answer}\n\n`;
        return new Response(events, { headers: { "content-type": "text/event-stream" } });
      });

    test.each([
      ["a short answer", 10, false],
      ["an answer that is longer than what is captured", 2 * MIB, false],
      ["an event stream", 10, true],
      ["a long event stream", 2 * MIB, true],
    ])("has the hash of %s as its caller gets it", async (_, size, stream) => {
      const tenant = at.tenant();
      const id = "an id of the caller's own";
      const expected = JSON.stringify({ jsonrpc: "2.0", id, result: { text: "x".repeat(size) } });
      for (const capture_body of [true, false]) {
        const { url: upstream_url } = server(size, stream);
        const agent = await tenant.agent({ ...MCP, upstream_url, capture_body, ...RECEIPTS });
        const call = { jsonrpc: "2.0", id, method: "tools/call", params: { name: "t", arguments: {} } };
        const view = await tenant.invoke(agent.id, { json: call });
        expect(view.status).toBe("succeeded");
        const claims = await receiptOf(tenant, view.invocation_id);
        expect(claims.resp_sha256).toBe(sha256(expected));
        if (!capture_body || size > MIB) continue;
        expect(sha256(Buffer.from(view.response_body_b64, "base64"))).toBe(claims.resp_sha256);
      }
    });
  });

  describe("the export", () => {
    async function withCalls(count: number) {
      const tenant = at.tenant();
      const agent = await tenant.agent({ upstream_url: at.upstream().url, ...RECEIPTS });
      const calls = Array.from({ length: count }, (_, n) => tenant.invoke(agent.id, { json: { n } }));
      const ids = (await Promise.all(calls)).map((view) => view.invocation_id);
      return { tenant, ids };
    }

    test("is one chain with each call once, oldest first, in pages", async () => {
      const { tenant, ids } = await withCalls(25);
      const lines = await exported(tenant);
      const claims = await Promise.all(lines.map(claimsOf));
      expect(claims.map(({ invocation_id }) => invocation_id).sort()).toEqual(ids.sort());
      expect(claims.map(({ previous }) => previous)).toEqual([null, ...lines.slice(0, -1).map(sha256)]);
      const page = async (query: string) => (await tenant.send("GET", `/v1/receipts${query}`)).text;
      const joined = (part: string[]) => part.map((line) => `${line}\n`).join("");
      expect(await page("")).toBe(joined(lines.slice(0, 20)));
      expect(await page("?offset=20")).toBe(joined(lines.slice(20)));
      expect(await page("?limit=3&offset=5")).toBe(joined(lines.slice(5, 8)));
      expect(await page("?limit=0")).toBe(joined(lines.slice(0, 1)));
      expect(await page("?limit=1000&offset=-5")).toBe(joined(lines));
      expect(await page("?offset=25")).toBe("");
      expect(await page(`?offset=${Number.MAX_SAFE_INTEGER}`)).toBe("");
      for (const query of ["limit=x", "offset=1.5", "limit="]) {
        expectError(await tenant.send("GET", `/v1/receipts?${query}`), 400, query.split("=")[0]);
      }
      expectError(await tenant.send("POST", "/v1/receipts"), 405);
      expect((await at.tenant().send("GET", "/v1/receipts")).text).toBe("");
      // Any token of the tenant's reads it, and a body is nowhere in it.
      expect((await tenant.send("GET", "/v1/receipts", { scope: READ_BODY, user: "eve" })).status).toBe(200);
    });

    test("is what receipt verify takes, and any change of it shows", async () => {
      const { tenant } = await withCalls(6);
      const lines = await exported(tenant);
      const text = (part: readonly string[]) => part.map((line) => `${line}\n`).join("");
      const whole = await verify(text(lines));
      expect(whole).toMatchObject({ code: 0, stderr: "" });
      expect(whole.stdout).toContain("6 receipts are valid");
      expect((await verify(lines[3] ?? "")).code).toBe(0);

      const file = join(mkdtempSync(join(temporaryRoot(), "jwks-")), "jwks.json");
      writeFileSync(file, JSON.stringify(await jwks()));
      expect((await verify(text(lines), "--jwks", file)).code).toBe(0);

      const [first = "", second = ""] = lines;
      const changed = `${first.slice(0, 100)}${first[100] === "A" ? "B" : "A"}${first.slice(101)}`;
      const broken: [string, string][] = [
        [text(lines.toSpliced(2, 1)), "line 3"],
        [text([second, first]), "line 2"],
        [text([...lines, first]), "line 7"],
        [text([changed, second]), "line 1"],
        ["", "there are no receipts"],
      ];
      for (const [content, names] of broken) {
        const found = await verify(content);
        expect([found.code, found.stdout]).toEqual([1, ""]);
        expect(found.stderr).toContain(names);
      }
      expect((await verify(text(lines), "--jwks", "/nowhere/jwks.json")).code).toBe(2);
      expect((await at.gateway.run("receipt", "verify", "--jwks", file)).code).toBe(2);
      expect((await at.gateway.run("receipt", "verify", "/nowhere/x", "--jwks", file)).code).toBe(2);
      expect((await verify(text(lines), "--keys", file)).code).toBe(2);
    });
  });

  test("hashes are in nothing but the receipt", async () => {
    const tenant = at.tenant();
    const agent = await tenant.agent({ upstream_url: at.upstream().url, ...RECEIPTS });
    const view = await tenant.invoke(agent.id);
    const shown = JSON.stringify([view, await tenant.detail(view.invocation_id)]);
    expect(shown).not.toContain("sha256");
    expect((await receiptOf(tenant, view.invocation_id)).req_sha256).toMatch(HASH);
  });
});
