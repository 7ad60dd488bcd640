// The official conformance suite against a server, and against the same server as an agent behind the gateway: who
// uses the agent's streaming path as an MCP server misses nothing.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { freePort } from "../support/free-ports.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { type BearerShim, startBearerShim } from "../support/http/bearer-shim.ts";
import { runConformance } from "../support/mcp/conformance.ts";
import { type ConformanceServer, startConformanceServer } from "../support/mcp/conformance-server.ts";

const CHECKS = 47;
const TEST_MS_MAX = 60_000;

let server: ConformanceServer;
let gateway: Gateway;
let shim: BearerShim;
beforeAll(async () => {
  server = startConformanceServer();
  const port = freePort();
  // Where its callers reach it, as with any proxy before it.
  gateway = await startGateway({
    env: { TOLLGATE_PUBLIC_URL: `http://127.0.0.1:${port}`, TOLLGATE_ALLOWED_ORIGINS: `http://localhost:${port}` },
  });
  const token = await gateway.token({ tenant: "acme", user: "suite" });
  const created = await fetch(`${gateway.url}/v1/agents`, {
    method: "POST",
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
    body: JSON.stringify({
      name: "fixture",
      upstream_url: server.url,
      protocol: "mcp",
      mcp_transport: "streamable_http",
    }),
  });
  const { id } = (await created.json()) as { id: string };
  shim = startBearerShim(`${gateway.url}/v1/proxy/${id}/stream`, token, port);
});
afterAll(async () => {
  await shim?.stop();
  await gateway?.[Symbol.asyncDispose]();
  await server?.stop();
});

test(
  "every check that holds directly holds through the gateway",
  async () => {
    const direct = await runConformance(server.url);
    expect(direct.missed).toEqual([]);
    expect(direct.passed).toHaveLength(CHECKS);

    const through = await runConformance(shim.url);
    expect(through.missed).toEqual([]);
    expect(through.passed.toSorted()).toEqual(direct.passed.toSorted());
  },
  TEST_MS_MAX,
);
