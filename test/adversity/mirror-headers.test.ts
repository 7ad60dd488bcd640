// Headers that say again what an MCP message says are compared with its arguments on the event loop that serves
// everybody: how many there are, and how many arguments, must not hold up the others.
import { expect, setDefaultTimeout, test } from "bun:test";
import { startGateway } from "../support/gateway/gateway.ts";
import { computedPauses } from "../support/gateway/pauses.ts";
import { startUpstream } from "../support/http/upstream.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const CALLER = { tenant: "hostile", user: "mallory" };
/** Nearly as many as are taken, and as many as fit a request: the server takes 16 KiB of headers. */
const HEADERS = 30;
const HEADERS_FIT = 180;
/** Nearly as large as arguments are read. */
const ARGUMENTS_BYTES = 15_000;
/** No request may hold the event loop for more than 20 ms; the rest is for a slow machine. */
const COMPUTED_MS_MAX = 100;

function argumentsOf(depth: number): object {
  const flat: Record<string, number> = {};
  for (let index = 0; JSON.stringify(flat).length < ARGUMENTS_BYTES; index++) flat[index.toString(36)] = 1;
  let nested: object = flat;
  for (let level = 0; level < depth; level++) nested = { a: nested };
  return nested;
}

test.each(["", "/stream"])("one call with many Mcp-Param headers holds up nobody else (%p)", async (suffix) => {
  const upstream = startUpstream(() => Response.json({ jsonrpc: "2.0", id: 1, result: {} }));
  try {
    await using gateway = await startGateway({ env: { TOLLGATE_BLOCKED_MS: "20" } });
    const headers = {
      authorization: `Bearer ${await gateway.token(CALLER)}`,
      "content-type": "application/json",
    };
    const agent = {
      name: "mcp",
      upstream_url: upstream.url,
      protocol: "mcp",
      mcp_transport: "streamable_http",
    };
    const created = await fetch(`${gateway.url}/v1/agents`, {
      method: "POST",
      headers,
      body: JSON.stringify(agent),
    });
    const { id } = (await created.json()) as { id: string };
    const params = { name: "cheap", arguments: argumentsOf(55) };
    const body = JSON.stringify({ jsonrpc: "2.0", id: 1, method: "tools/call", params });
    const call = async (count: number) => {
      const mirrors = Object.fromEntries(Array.from({ length: count }, (_, index) => [`mcp-param-z${index}`, "1"]));
      const answer = await fetch(`${gateway.url}/v1/proxy/${id}${suffix}`, {
        method: "POST",
        headers: { ...headers, "mcp-protocol-version": "2026-07-28", ...mirrors },
        body,
      });
      await answer.text();
      expect(answer.status).toBe(count > HEADERS ? 400 : suffix === "" ? 202 : 200);
    };
    for (const count of [0, HEADERS, HEADERS_FIT]) await call(count);
    // What is left to tell is told at the end.
    await gateway.stop();
    expect(computedPauses(gateway.log(), COMPUTED_MS_MAX)).toEqual([]);
  } finally {
    await upstream.stop();
  }
});
