// The policy's hold on proxy calls: what is denied, what is warned of, where it stands in the order of checks, and
// that every evaluation is an audit row.
import { describe, expect, test } from "bun:test";
import { type Answer, contract, type Json, MCP, PRICING, type Tenant, unique } from "./contract.ts";

const rpc = (tool: string) => ({
  jsonrpc: "2.0",
  id: 1,
  method: "tools/call",
  params: { name: tool, arguments: {} },
});

contract((at) => {
  const upstream = () => at.upstream(() => Response.json({ ok: true }));

  async function tenantWith(document: Json): Promise<Tenant> {
    const tenant = at.tenant();
    expect((await tenant.send("PUT", "/v1/policy", { json: document })).status).toBe(200);
    return tenant;
  }

  const invoke = (tenant: Tenant, agent: string, json: unknown, headers = {}): Promise<Answer> =>
    tenant.send("POST", `/v1/proxy/${agent}`, { json, headers });

  const decisions = async (tenant: Tenant): Promise<Json[]> =>
    (await tenant.send("GET", "/v1/policy/decisions")).body.data;

  const total = async (tenant: Tenant): Promise<number> => (await tenant.send("GET", "/v1/invocations")).body.total;

  test("a tenant without a policy sees no change, and no decision is written", async () => {
    const tenant = at.tenant();
    const { id } = await tenant.agent({ upstream_url: upstream().url });
    const answer = await invoke(tenant, id, {});
    expect(answer.status).toBe(202);
    expect(answer.headers.has("x-service-policy-warning")).toBe(false);
    expect(await decisions(tenant)).toEqual([]);
  });

  test("a denied call is answered 403 with an Error, forwarded nowhere, and leaves no invocation and one decision", async () => {
    const tenant = await tenantWith({
      default: "allow",
      on_error: "deny",
      rules: [{ action: "deny", match: { max_body_bytes: 20 } }],
    });
    const route = upstream();
    const { id } = await tenant.agent({ upstream_url: route.url });
    const denied = await invoke(tenant, id, { text: "longer than the rule allows" });
    expect(denied.status).toBe(403);
    expect(Object.keys(denied.body)).toEqual(["error"]);
    expect(await total(tenant)).toBe(0);
    expect(route.seen).toEqual([]);
    expect(await decisions(tenant)).toMatchObject([
      { agent_id: id, protocol: "http", mcp_tool: null, action: "deny", matched_rule: 1 },
    ]);
    expect((await invoke(tenant, id, {})).status).toBe(202);
    expect(await decisions(tenant)).toMatchObject([{ action: "allow", matched_rule: null }, { action: "deny" }]);
  });

  test("a call with a warning is forwarded, and its answer carries the decision's reason", async () => {
    const tenant = await tenantWith({ default: "warn", on_error: "deny", rules: [] });
    const { id } = await tenant.agent({ upstream_url: upstream().url });
    const answer = await invoke(tenant, id, {});
    expect(answer.status).toBe(202);
    const [decision] = await decisions(tenant);
    expect(decision.action).toBe("warn");
    expect(answer.headers.get("x-service-policy-warning")).toBe(decision.reason);
    expect((await tenant.ended(id, answer.body.invocation_id)).status).toBe("succeeded");
  });

  test("a rule with tools judges the tools/call of an mcp agent and nothing else", async () => {
    const tenant = await tenantWith({
      default: "allow",
      on_error: "deny",
      rules: [{ action: "deny", match: { tools: ["delete_*"] } }],
    });
    const mcp = await tenant.agent({ upstream_url: upstream().url, ...MCP });
    const http = await tenant.agent({ upstream_url: upstream().url });
    expect((await invoke(tenant, mcp.id, rpc("delete_all"))).status).toBe(403);
    expect((await invoke(tenant, mcp.id, rpc("read_all"))).status).toBe(202);
    expect((await invoke(tenant, mcp.id, { jsonrpc: "2.0", id: 1, method: "tools/list" })).status).toBe(202);
    expect((await invoke(tenant, http.id, rpc("delete_all"))).status).toBe(202);
    const rows = await decisions(tenant);
    expect(rows.map((row) => [row.protocol, row.mcp_tool, row.action])).toEqual([
      ["http", null, "allow"],
      ["mcp", null, "allow"],
      ["mcp", "read_all", "allow"],
      ["mcp", "delete_all", "deny"],
    ]);
  });

  test.each(["application/json", "text/event-stream"])(
    "a list of tools in %s is private on each page to clients whose protocol knows of caches",
    async (type) => {
      const shown = { name: "read_all" };
      const pages: Record<string, object> = {
        "1": { tools: [{ name: "delete_all" }, shown], nextCursor: "2", ttlMs: 5, cacheScope: "public" },
        "2": { tools: [shown] },
      };
      const route = at.upstream(({ body }) => {
        const { id, params } = JSON.parse(new TextDecoder().decode(body));
        const text = JSON.stringify({ jsonrpc: "2.0", id, result: pages[params.cursor] });
        const [before, after] = type === "application/json" ? ["", ""] : ["data: ", "\n\n"];
        return new Response(before + text + after, { headers: { "content-type": type } });
      });
      const tenant = await tenantWith({
        default: "allow",
        on_error: "deny",
        rules: [{ action: "deny", match: { tools: ["delete_all"] } }],
      });
      const { id } = await tenant.agent({ upstream_url: route.url, ...MCP });
      const listed = async (cursor: string, headers: Record<string, string>, version?: string) => {
        const _meta = version === undefined ? {} : { "io.modelcontextprotocol/protocolVersion": version };
        const json = { jsonrpc: "2.0", id: 1, method: "tools/list", params: { cursor, _meta } };
        const { text } = await tenant.send("POST", `/v1/proxy/${id}/stream`, { json, headers });
        return JSON.parse(text.slice(text.indexOf("{"))).result;
      };
      const first = { tools: [shown], nextCursor: "2", ttlMs: 5 };
      const modern = "2026-07-28";
      for (const [headers, version] of [[{ "mcp-protocol-version": modern }], [{}, modern]] as const) {
        expect(await listed("1", headers, version)).toEqual({ ...first, cacheScope: "private" });
        expect(await listed("2", headers, version)).toEqual({ tools: [shown], cacheScope: "private" });
      }
      expect(await listed("1", { "mcp-protocol-version": "2025-11-25" })).toEqual({ ...first, cacheScope: "public" });
      expect(await listed("2", {})).toEqual({ tools: [shown] });
    },
  );

  describe("a list of tools from which a tool is denied", () => {
    const [JSON_TYPE, EVENTS] = ["application/json", "text/event-stream"];
    const listing = (tools: string) => `{"jsonrpc":"2.0","id":1,"result":{"tools":[${tools}]}}`;
    const secret = listing('{"name":"delete_all"}');
    const event = (text: string) => `data: ${text}\n\n`;

    async function listed(type: string, answer: string | Uint8Array<ArrayBuffer>) {
      const route = at.upstream(() => new Response(answer, { headers: { "content-type": type } }));
      const rules = [{ action: "deny", match: { tools: ["delete_*"] } }];
      const tenant = await tenantWith({ default: "allow", on_error: "deny", rules });
      const { id } = await tenant.agent({ upstream_url: route.url, ...MCP });
      const json = { jsonrpc: "2.0", id: 1, method: "tools/list" };
      return tenant.send("POST", `/v1/proxy/${id}/stream`, { json });
    }

    test.each<[string, string, string | Uint8Array<ArrayBuffer>]>([
      ["a name given twice", JSON_TYPE, listing('{"name":"delete_all","name":"ok"}')],
      ["a name given twice, in an event", EVENTS, event(listing('{"name":"ok","name":"delete_all"}'))],
      ["a name in another letter case", JSON_TYPE, listing('{"name":"ok","Name":"delete_all"}')],
      ["a name in another letter case, in an event", EVENTS, event(listing('{"name":"ok","Name":"delete_all"}'))],
      ["JSON behind a comment", `${JSON_TYPE}; charset=utf-8`, `/* x */${secret}`],
      ["JSON behind two byte order marks", JSON_TYPE, `\ufeff\ufeff${secret}`],
      ["JSON in UTF-16", JSON_TYPE, new Uint8Array(Buffer.from(`\ufeff${secret}`, "utf16le"))],
      ["an event stream of two types", `${EVENTS}, ${JSON_TYPE}`, event(secret)],
      ["JSON of two types", `${JSON_TYPE}, ${EVENTS}`, secret],
      ["an event stream of a like type", "text/event-streamx", event(secret)],
      ["an event stream as a parameter", `text/plain; type=${EVENTS}`, event(secret)],
      ["an event stream of a type of JSON", "application/json-rpc", event(secret)],
    ])("breaks off when clients could read it in more than one way: %s", async (_, type, answer) => {
      await expect(listed(type, answer)).rejects.toThrow();
    });

    test.each([
      ["JSON", JSON_TYPE, ` ${listing('{"name":"ok"},{"name":"delete_all"}')}`, ` ${listing('{"name":"ok"}')}`],
      ["JSON of a type of its own", "application/json-rpc", secret, listing("")],
      ["nothing", JSON_TYPE, "", ""],
      ["text", "text/plain", "no tools", "no tools"],
    ])("passes when all clients read the same: %s", async (_, type, answer, left) => {
      expect((await listed(type, answer)).text).toBe(left);
    });
  });

  test("the observed rate counts this call, denied ones too, per caller and agent", async () => {
    const tenant = await tenantWith({
      default: "allow",
      on_error: "deny",
      rules: [{ action: "deny", match: { rate_per_min: 2 } }],
    });
    const one = await tenant.agent({ upstream_url: upstream().url });
    const other = await tenant.agent({ upstream_url: upstream().url });
    const statuses: number[] = [];
    for (let call = 0; call < 4; call++) statuses.push((await invoke(tenant, one.id, {})).status);
    expect(statuses).toEqual([202, 202, 403, 403]);
    expect((await invoke(tenant, other.id, {})).status).toBe(202);
    const bob = await tenant.send("POST", `/v1/proxy/${one.id}`, { json: {}, user: "bob" });
    expect(bob.status).toBe(202);
  });

  describe("in the order of checks", () => {
    const DENY = { default: "deny", on_error: "deny", rules: [] };

    test("the policy comes after the form and before the payment", async () => {
      const tenant = await tenantWith(DENY);
      const mcp = await tenant.agent({ upstream_url: upstream().url, ...MCP, pricing: PRICING });
      expect((await invoke(tenant, mcp.id, { no: "rpc" })).status).toBe(400);
      expect(await decisions(tenant)).toEqual([]);
      expect((await invoke(tenant, mcp.id, rpc("x"))).status).toBe(403);
      expect((await invoke(tenant, mcp.id, rpc("x"), { "x-payment": "garbage" })).status).toBe(403);
    });

    test("a call that was accepted before is answered with its ID, whatever the policy says now", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: upstream().url });
      const headers = { "idempotency-key": unique("key") };
      const first = await invoke(tenant, id, {}, headers);
      expect((await tenant.send("PUT", "/v1/policy", { json: DENY })).status).toBe(200);
      const again = await invoke(tenant, id, {}, headers);
      expect([again.status, again.body]).toEqual([202, first.body]);
      expect((await invoke(tenant, id, {})).status).toBe(403);
    });
  });

  test("a policy of one tenant says nothing about another's calls", async () => {
    await tenantWith({ default: "deny", on_error: "deny", rules: [] });
    const other = at.tenant();
    const { id } = await other.agent({ upstream_url: upstream().url });
    expect((await invoke(other, id, {})).status).toBe(202);
  });
});
