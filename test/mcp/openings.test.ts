// Servers that never answer `initialize`: what the gateway opens for a call ends with it, however often a tenant asks for
// more, and a server that answers the next one is well.
import { afterEach, expect, test } from "bun:test";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { type SlowServer, startSlowServer } from "../support/mcp/slow-opening.ts";
import { until } from "../support/until.ts";

const ROUNDS = 40;

let stack = new AsyncDisposableStack();

afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

async function agentOf(server: SlowServer) {
  stack.defer(server.stop);
  const gateway: Gateway = stack.use(await startGateway());
  const token = await gateway.token({ tenant: "acme", user: "alice" });
  const send = async (method: string, path: string, body?: object, more: Record<string, string> = {}) => {
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json", ...more };
    const init = { method, headers, ...(body !== undefined && { body: JSON.stringify(body) }) };
    const answer = await fetch(`${gateway.url}${path}`, init);
    return { status: answer.status, body: (await answer.json()) as Record<string, string> };
  };
  const fields = { name: "slow", upstream_url: server.url, protocol: "mcp", mcp_transport: "streamable_http" };
  const path = (await send("POST", "/v1/agents", fields)).body["id"] ?? "";
  const call = async (more: Record<string, string> = {}) => {
    const { body } = await send("POST", `/v1/proxy/${path}`, { jsonrpc: "2.0", id: 1, method: "tools/list" }, more);
    return `/v1/proxy/${path}/invocations/${body["invocation_id"]}`;
  };
  const offer = (version: string) => send("PATCH", `/v1/agents/${path}`, { mcp_protocol_version: version });
  const cancel = (invocation: string) => send("POST", `${invocation}/cancel`);
  return { send, call, offer, cancel };
}

test("nothing stays open for calls that were cancelled, whatever version each of them offered", async () => {
  const server = await startSlowServer((method) => method === "initialize");
  const { call, offer, cancel } = await agentOf(server);
  for (let round = 1; round <= ROUNDS; round++) {
    expect((await offer(`v${round}`)).status).toBe(200);
    const invocation = await call();
    await until(() => server.seen("initialize") === round);
    expect((await cancel(invocation)).status).toBe(200);
  }
  await until(() => server.waiting("initialize").now === 0);
});

test("a call is served after one that was cancelled while the server left its session waiting", async () => {
  const server = await startSlowServer((method, count) => method === "initialize" && count === 1);
  const { send, call, cancel } = await agentOf(server);
  const first = await call();
  await until(() => server.seen("initialize") === 1);
  await cancel(first);
  for (let at = 0; at < 3; at++) {
    const invocation = await call({ prefer: "wait=10" });
    expect((await send("GET", invocation)).body).toMatchObject({ status: "succeeded", upstream_status: 200 });
  }
  expect(server.seen("initialize")).toBe(2);
});
