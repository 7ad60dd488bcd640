// Sessions of real MCP servers, as unmodified clients use them, through gateways that come and go: a session is its
// user's on every replica and after every restart, and nobody else's.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { PayingTenant } from "../support/chain/paying.ts";
import type { Gateway } from "../support/gateway/gateway.ts";
import { openReplicas, type Replicas } from "../support/gateway/replicas.ts";
import { type ConformanceServer, startConformanceServer } from "../support/mcp/conformance-server.ts";
import { CLIENTS, type Endpoint, type McpClient, type OpenClient } from "../support/mcp/mcp-clients.ts";
import { type McpServer, startMcpServer } from "../support/mcp/mcp-servers.ts";

let replicas: Replicas;
let gateways: readonly [Gateway, Gateway];
let tenant: PayingTenant;
let fixture: ConformanceServer;
const servers = new Map<string, McpServer>();

beforeAll(async () => {
  fixture = startConformanceServer();
  replicas = await openReplicas();
  gateways = [await replicas.start(), await replicas.start()];
  tenant = await replicas.tenant(gateways[0]);
  for (const name of ["everything", "stateful", "json", "stateless"] as const) {
    servers.set(name, await startMcpServer(name));
  }
});

afterAll(async () => {
  await Promise.all([...servers.values()].map((server) => server.stop()));
  await replicas?.[Symbol.asyncDispose]();
  await fixture?.stop();
});

/** The agent at whichever gateway `current` gives, for this user. */
async function endpoint(upstreamUrl: string, current: () => Gateway, user: string): Promise<Endpoint> {
  const id = await tenant.agent({
    protocol: "mcp",
    mcp_transport: "streamable_http",
    upstream_url: upstreamUrl,
  });
  return as({ url: `http://gateway.test/v1/proxy/${id}/stream`, token: "" }, current, user);
}

async function as({ url }: Endpoint, current: () => Gateway, user: string): Promise<Endpoint> {
  return {
    url,
    // The local issuer's key is in the database that both share.
    token: await gateways[0].token({ tenant: tenant.name, user }),
    fetch: (input, init) => fetch(String(input).replace("http://gateway.test", current().url), init),
  };
}

const using = async (open: OpenClient, to: Endpoint, work: (client: McpClient) => Promise<void>) => {
  const client = await open(to);
  try {
    await work(client);
  } finally {
    await client.close();
  }
};

/** What the gateway says to each method with the session of somebody's client. */
async function statuses(to: Endpoint, session: string, headers: Record<string, string> = {}) {
  const found: number[] = [];
  for (const method of ["POST", "GET", "DELETE"]) {
    const response = await to.fetch?.(to.url, {
      method,
      headers: {
        authorization: `Bearer ${to.token}`,
        accept: "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-session-id": session,
        ...headers,
      },
      ...(method === "POST" && { body: JSON.stringify({ jsonrpc: "2.0", id: 1, method: "tools/list" }) }),
    });
    await response?.body?.cancel();
    found.push(response?.status ?? 0);
  }
  return found;
}

describe.each(Object.entries(CLIENTS))("%s", (_client, open) => {
  test.each([
    ["everything", "echo", { message: "hello" }],
    ["stateful", "greet", { name: "Ann" }],
    ["json", "greet", { name: "Ann" }],
  ])("keeps its session of the server %s on another replica and after a restart", async (name, tool, given) => {
    let current: Gateway = gateways[0];
    const to = await endpoint(servers.get(name)?.url ?? "", () => current, "alice");
    await using(open, to, async (client) => {
      const { sessionId = "none" } = client;
      const call = async () => expect(JSON.stringify(await client.call(tool, given))).toContain("content");
      const bob = await as(to, () => current, "bob");
      await call();
      for (const next of [gateways[1], gateways[0]]) {
        current = next;
        await call();
        expect(await statuses(bob, sessionId)).toEqual([404, 404, 404]);
      }
      await gateways[0].kill9();
      await gateways[0].restart();
      // Nobody is the first to use it any more.
      expect(await statuses(bob, sessionId)).toEqual([404, 404, 404]);
      await call();
      expect(client.sessionId).toBe(sessionId);
      // That one takes no DELETE.
      if (name === "json") return;
      await client.terminate();
      expect((await statuses(to, sessionId))[0]).toBeOneOf([400, 404]);
    });
  });

  test("needs no session of a server that has none", async () => {
    const to = await endpoint(servers.get("stateless")?.url ?? "", () => gateways[0], "alice");
    await using(open, to, async (client) => {
      expect(client.sessionId).toBeUndefined();
      expect(await client.tools()).not.toBeEmpty();
    });
  });

  test("comes back for a stream at another replica, where nobody else can", async () => {
    let current: Gateway = gateways[0];
    const to = await endpoint(fixture.url, () => current, "alice");
    const resumed = Promise.withResolvers<string>();
    const moving: Endpoint = {
      ...to,
      async fetch(input, init) {
        const headers = new Headers(init?.headers);
        const last = headers.get("last-event-id");
        if (last !== null) {
          current = gateways[1];
          resumed.resolve(last);
        }
        return (to.fetch ?? fetch)(input, init);
      },
    };
    await using(open, moving, async (client) => {
      expect(JSON.stringify(await client.call("test_reconnection"))).toContain("on the stream that was resumed");
      const last = await resumed.promise;
      const bob = await as(to, () => current, "bob");
      expect(await statuses(bob, client.sessionId ?? "", { "last-event-id": last })).toEqual([404, 404, 404]);
      // One's own session is no way to the events of another, for a server that keeps them by session.
      const count = fixture.arrived.length;
      const response = await bob.fetch?.(bob.url, {
        headers: { authorization: `Bearer ${bob.token}`, accept: "text/event-stream", "last-event-id": last },
      });
      expect([response?.status, fixture.arrived.length]).toEqual([404, count]);
    });
  });
});

test("the deployment has one name in Via, on every replica and after a restart", async () => {
  let current: Gateway = gateways[0];
  const to = await endpoint(fixture.url, () => current, "alice");
  const count = fixture.arrived.length;
  const ping = async () => {
    const response = await to.fetch?.(to.url, {
      method: "POST",
      headers: { authorization: `Bearer ${to.token}`, "content-type": "application/json" },
      body: JSON.stringify({ jsonrpc: "2.0", id: 1, method: "ping" }),
    });
    await response?.body?.cancel();
  };
  await ping();
  current = gateways[1];
  await ping();
  await gateways[1].stop();
  await gateways[1].restart();
  await ping();
  const names = fixture.arrived.slice(count).map(({ headers }) => headers.get("via"));
  expect(names).toHaveLength(3);
  expect(new Set(names).size).toBe(1);
  expect(names[0]).toMatch(/^1\.1 tollgate-[0-9a-f]{16}$/);
});
