// Pages of the web and the streaming path of mcp agents (MCP, streamable HTTP, security warning).
import { expect, test } from "bun:test";
import { startGateway } from "../support/gateway/gateway.ts";
import { startUpstream } from "../support/http/upstream.ts";

test("a page of another origin may not use an mcp agent, whatever host it names, and the gateway's own may", async () => {
  const upstream = startUpstream(() => Response.json({ jsonrpc: "2.0", id: 1, result: {} }));
  try {
    const env = { TOLLGATE_ALLOWED_ORIGINS: "https://app.example.com,http://dev.test:3000" };
    await using gateway = await startGateway({ env });
    const { port } = new URL(gateway.url);
    const headers = {
      authorization: `Bearer ${await gateway.token({ tenant: "acme", user: "alice" })}`,
      "content-type": "application/json",
    };
    const create = async (fields: object) => {
      const body = JSON.stringify({ name: crypto.randomUUID(), upstream_url: upstream.url, ...fields });
      const answer = await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers, body });
      return ((await answer.json()) as { id: string }).id;
    };
    const mcp = await create({ protocol: "mcp", mcp_transport: "streamable_http" });
    const http = await create({});
    const body = JSON.stringify({ jsonrpc: "2.0", id: 1, method: "ping" });
    const asked = async (id: string, method: string, more: Record<string, string>) => {
      const init = { method, headers: { ...headers, ...more }, ...(method === "POST" && { body }) };
      const answer = await fetch(`${gateway.url}/v1/proxy/${id}/stream`, init);
      await answer.body?.cancel();
      return answer.status;
    };
    const own = ["localhost", "127.0.0.1", "[::1]"].map((host) => `http://${host}:${port}`);
    for (const origin of [...own, "https://app.example.com", "http://dev.test:3000"]) {
      expect([origin, await asked(mcp, "POST", { origin })]).toEqual([origin, 200]);
    }
    expect(await asked(mcp, "POST", {})).toBe(200);
    const foreign = [
      "null",
      "https://evil.test",
      `http://evil.test:${port}`,
      "http://localhost:1",
      "https://app.example.com.evil.test",
    ];
    for (const origin of foreign) {
      for (const method of ["POST", "GET", "DELETE"]) {
        const more = { origin, host: `evil.test:${port}` };
        expect([origin, method, await asked(mcp, method, more)]).toEqual([origin, method, 403]);
      }
      expect([origin, await asked(http, "POST", { origin })]).toEqual([origin, 200]);
    }
  } finally {
    await upstream.stop();
  }
});
