// Several gateways on one port of one machine, on one Postgres: each answers some of the connections, one that stops loses
// no call, and nobody shares a port by accident.

import { expect, setDefaultTimeout, test } from "bun:test";
import { freePort } from "./support/free-ports.ts";
import { startGateway } from "./support/gateway/gateway.ts";
import { openReplicas } from "./support/gateway/replicas.ts";
import { startUpstream } from "./support/http/upstream.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const SHARED = { TOLLGATE_REUSE_PORT: "1" };
const CALLERS = 64;
const CALLS_BEFORE = 400;
const CALLS_AFTER = 100;

function requestsIn(log: string): number {
  return log.split('"event":"request"').length - 1;
}

test("gateways on one port both answer, and one that stops loses no call and resets no connection", async () => {
  await using replicas = await openReplicas();
  const made = new Map<string, number>();
  const upstream = startUpstream(async (request) => {
    const { call } = (await request.json()) as { call: string };
    made.set(call, (made.get(call) ?? 0) + 1);
    return Response.json({ call });
  });
  const port = freePort();
  const [stays, stops] = await Promise.all([
    replicas.start({ port, env: SHARED }),
    replicas.start({ port, env: SHARED }),
  ]);
  const tenant = await replicas.tenant(stays);
  const agent = await tenant.agent({ upstream_url: upstream.url });
  const accepted = new Map<string, string>();
  const refused: number[] = [];
  let calls = 0;
  let callsMax = Number.POSITIVE_INFINITY;
  const before = Promise.withResolvers<void>();

  /** Each call has a connection of its own, so each may come to either gateway. */
  async function call(name: string): Promise<void> {
    const headers = { ...tenant.headers, connection: "close" };
    const body = JSON.stringify({ call: name });
    const response = await fetch(`${stays.url}/v1/proxy/${agent}`, { method: "POST", headers, body });
    const { invocation_id } = (await response.json()) as { invocation_id?: string };
    if (response.status === 202 && invocation_id !== undefined) accepted.set(name, invocation_id);
    else refused.push(response.status);
  }
  async function callOn(): Promise<void> {
    while (calls < callsMax) {
      if (calls === CALLS_BEFORE) before.resolve();
      await call(`call ${calls++}`);
    }
  }

  const callers = Array.from({ length: CALLERS }, callOn);
  await Promise.race([before.promise, Promise.all(callers)]);
  await stops.stop();
  callsMax = calls + CALLS_AFTER;
  await Promise.all(callers);

  // A gateway that is about to stop may refuse a request, and says so. It breaks none off: then `call` would have thrown.
  expect(refused.filter((status) => status !== 503)).toEqual([]);
  for (const gateway of [stays, stops]) expect(requestsIn(gateway.log())).toBeGreaterThan(CALLERS);
  const ended = await Promise.all(
    accepted.values().map(async (id) => {
      for (;;) {
        const polled = await fetch(`${stays.url}/v1/invocations/${id}`, { headers: tenant.headers });
        const { status } = (await polled.json()) as { status: string };
        if (status !== "pending" && status !== "running") return status;
        await Bun.sleep(20);
      }
    }),
  );
  expect([...new Set(ended)]).toEqual(["succeeded"]);
  expect([...accepted.keys()].filter((name) => made.get(name) !== 1)).toEqual([]);
  expect(accepted.size).toBeGreaterThan(CALLS_BEFORE);
  await upstream.stop();
});

test("a gateway without the variable is refused a port that is shared, and says how to share it", async () => {
  await using replicas = await openReplicas();
  const port = freePort();
  await replicas.start({ port, env: SHARED });
  await expect(replicas.start({ port })).rejects.toThrow(
    `must be free to listen on: 127.0.0.1:${port} is already in use; choose another with --port, or stop the program that uses it; gateways of one user share a port when all of them have`,
  );
});

test("one with the variable is refused a port that somebody has alone", async () => {
  await using replicas = await openReplicas();
  const port = freePort();
  await replicas.start({ port });
  await expect(replicas.start({ port, env: SHARED })).rejects.toThrow("must be free to listen on");
});

test("on SQLite there is nothing to share", async () => {
  await expect(startGateway({ env: SHARED })).rejects.toThrow(
    "TOLLGATE_REUSE_PORT must be 0 without DATABASE_URL: only one gateway can use an SQLite database",
  );
});
