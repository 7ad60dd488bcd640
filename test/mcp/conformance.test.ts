// The official conformance suite against a server, and against the same server as an agent behind the gateway: who
// uses the agent's streaming path as an MCP server misses nothing.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { type BearerShim, startBearerShim } from "../support/http/bearer-shim.ts";
import { runConformance } from "../support/mcp/conformance.ts";
import { type ConformanceServer, startConformanceServer } from "../support/mcp/conformance-server.ts";

/**
 * A server on loopback that asks for no token has to look at the Host header, or every web page could use it. The
 * gateway asks for a token, serves whatever name leads to it, and tells its upstreams nothing of that name.
 */
const NOT_THE_GATEWAYS = "dns-rebinding-protection: localhost-host-rebinding-rejected";
const CHECKS = 47;
const TEST_MS_MAX = 60_000;

let server: ConformanceServer;
let gateway: Gateway;
let shim: BearerShim;
beforeAll(async () => {
  server = startConformanceServer();
  gateway = await startGateway();
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
  shim = startBearerShim(`${gateway.url}/v1/proxy/${id}/stream`, token);
});
afterAll(async () => {
  await shim?.stop();
  await gateway?.[Symbol.asyncDispose]();
  await server?.stop();
});

test(
  "at most one check fewer holds through the gateway than directly",
  async () => {
    const direct = await runConformance(server.url);
    expect(direct.missed).toEqual([]);
    expect(direct.passed).toHaveLength(CHECKS);

    const through = await runConformance(shim.url);
    expect(through.missed.filter((check) => !check.startsWith(NOT_THE_GATEWAYS))).toEqual([]);
    expect(direct.passed.filter((check) => !through.passed.includes(check))).toBeOneOf([[], [NOT_THE_GATEWAYS]]);
  },
  TEST_MS_MAX,
);
