// Every call tells its upstream, in `Via`, which deployment it came through, and a call that has passed this deployment
// before is refused when it comes too often: an agent that leads back to itself ends.
import { describe, expect, test } from "bun:test";
import { contract, expectError, type Json, MCP, type Seen, type Tenant, UNKNOWN_AGENT } from "./contract.ts";

const PSEUDONYM = /^tollgate-[0-9a-f]{16}$/;
const LIST = { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name: "a" } };

contract((at) => {
  const viaOf = ({ headers }: Seen) => headers.get("via") ?? "none";

  async function agentOf(fields: object = {}, handler?: (seen: Seen) => Response) {
    const route = at.upstream(handler);
    const tenant = at.tenant();
    const { id } = await tenant.agent({ upstream_url: route.url, ...fields });
    return { route, tenant, path: `/v1/proxy/${id}`, id: String(id) };
  }

  async function pseudonym(): Promise<string> {
    const { route, tenant, path } = await agentOf();
    await tenant.send("POST", path, { json: {} });
    const [version, name, ...rest] = viaOf(await route.arrival()).split(" ");
    expect([version, rest]).toEqual(["1.1", []]);
    expect(name).toMatch(PSEUDONYM);
    return name ?? "";
  }

  test("the pseudonym in Via is the same for all tenants and on both paths, behind what the caller's proxies said", async () => {
    const own = await pseudonym();
    const { route, tenant, path } = await agentOf(MCP);
    const headers = { via: "1.0 fred, 1.1 p.example.net (comment)", "mcp-protocol-version": "2026-07-28" };
    await tenant.send("POST", path, { json: LIST, headers });
    await route.arrival(1);
    await tenant.send("POST", `${path}/stream`, { json: LIST, headers });
    await tenant.send("GET", `${path}/stream`, { headers });
    await tenant.send("DELETE", `${path}/stream`, { headers });
    await route.arrival(4);
    expect(route.seen.map(viaOf)).toEqual(Array(4).fill(`${headers.via}, 1.1 ${own}`));
  });

  test("Via is in what is said on a session, too", async () => {
    const { route, tenant, id } = await agentOf(MCP, ({ body, headers }) => {
      const message: Json = JSON.parse(new TextDecoder().decode(body));
      if (message.method === "tools/call" && !headers.has("mcp-session-id")) {
        return new Response(null, { status: 400 });
      }
      const result = { protocolVersion: "2025-11-25", capabilities: {}, serverInfo: { name: "s" } };
      return Response.json({ jsonrpc: "2.0", id: message.id ?? null, result }, { headers: { "mcp-session-id": "s" } });
    });
    const own = await pseudonym();
    expect(await tenant.invoke(id, { json: LIST, headers: { via: "1.1 a" } })).toMatchObject({
      status: "succeeded",
    });
    expect(route.seen.length).toBe(4);
    expect(route.seen.map(viaOf)).toEqual(Array(4).fill(`1.1 a, 1.1 ${own}`));
  });

  describe.each([
    ["POST", ""],
    ["POST", "/stream"],
    ["GET", "/stream"],
    ["DELETE", "/stream"],
  ])("%s %s", (method, suffix) => {
    test("is refused when it has passed this deployment four times", async () => {
      const via = `1.1 ${await pseudonym()}`;
      const { route, tenant, path } = await agentOf(MCP);
      const send = (times: number, to = path) =>
        tenant.send(method, `${to}${suffix}`, {
          ...(method === "POST" && { json: LIST }),
          headers: {
            via: ["1.1 other", ...Array(times).fill(via)].join(", "),
            "mcp-protocol-version": "2026-07-28",
          },
        });
      expectError(await send(4), 422, "loop");
      expectError(await send(4, `/v1/proxy/${UNKNOWN_AGENT}`), 404);
      expect(route.seen).toEqual([]);
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
      expect([200, 202]).toContain((await send(3)).status);
      await route.arrival();
    });
  });

  describe("an agent that calls itself", () => {
    async function loop(suffix: string, fields: object = {}): Promise<{ tenant: Tenant; path: string }> {
      const tenant = at.tenant();
      const { id: credential_ref } = await tenant.credential({ plaintext: await tenant.token() });
      const { id } = await tenant.agent({ credential_ref, ...fields });
      const path = `/v1/proxy/${id}${suffix}`;
      await tenant.patch(id, { upstream_url: `${at.gateway.url}${path}` });
      return { tenant, path };
    }

    /** The tenant's invocations, when all of them have ended. */
    async function ended(tenant: Tenant, count: number): Promise<Json[]> {
      for (;;) {
        const { data } = (await tenant.send("GET", "/v1/invocations?limit=100")).body;
        expect(data.length).toBeLessThanOrEqual(count);
        if (data.length === count && data.every((row: Json) => row.completed_at !== null)) return data;
        await Bun.sleep(20);
      }
    }

    test("ends after four polled calls", async () => {
      const { tenant, path } = await loop("");
      expect((await tenant.send("POST", path, { json: {} })).status).toBe(202);
      const rows = await ended(tenant, 4);
      expect(rows.map(({ upstream_status }) => upstream_status)).toEqual([422, 202, 202, 202]);
    });

    test("ends after four streamed calls, and its caller sees why", async () => {
      const { tenant, path } = await loop("/stream");
      expectError(await tenant.send("POST", path, { json: {} }), 422, "loop");
      expect((await ended(tenant, 4)).map(({ upstream_status }) => upstream_status)).toEqual(Array(4).fill(422));
    });

    test("ends when it is listened to", async () => {
      const { tenant, path } = await loop("/stream", MCP);
      expectError(await tenant.send("GET", path, { headers: { accept: "text/event-stream" } }), 422, "loop");
    });
  });
});
