// What loads are put on: a gateway with agents, and the floors beside it.
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { type Environment, temporaryRoot } from "../support/gateway/process.ts";
import type { BenchDatabase } from "./databases.ts";
import { postRequest, type Target } from "./measure.ts";

/** Whom the calls go to. */
export interface BenchUpstream extends AsyncDisposable {
  readonly url: string;
}

/** Answers at once. */
export function quickUpstream(onCall?: () => void): BenchUpstream {
  return upstream(() => {
    onCall?.();
    return Response.json({ answer: 42 });
  });
}

/** Never answers, so that all calls but the first ones wait for their turn. */
export function silentUpstream(): BenchUpstream {
  return upstream(() => new Promise<Response>(() => {}));
}

function upstream(fetch: () => Response | Promise<Response>): BenchUpstream {
  const server = Bun.serve({ port: 0, hostname: "127.0.0.1", idleTimeout: 0, fetch });
  return { url: server.url.href, [Symbol.asyncDispose]: () => server.stop(true) };
}

export interface GatewayTarget extends Target, AsyncDisposable {
  readonly gateway: Gateway;
  readonly database: BenchDatabase;
  /** How many calls of the tenant have this status, as the history says it. */
  total(status: "pending" | "running" | "succeeded"): Promise<number>;
}

interface GatewaySettings {
  readonly upstream: BenchUpstream;
  readonly env?: Environment;
  /** Calls that the tenant's history has from the start. */
  readonly stored?: number;
}

/** All calls wait behind the one that may run. */
export const HELD_BACK: Environment = { TOLLGATE_AGENT_CONCURRENCY: "1" };

export const TENANT = "bench";

/** A gateway with one tenant and one agent of it. */
export async function openGateway(
  database: BenchDatabase,
  { upstream, env = {}, stored = 0 }: GatewaySettings,
): Promise<GatewayTarget> {
  await using stack = new AsyncDisposableStack();
  const gateway = stack.use(await startGateway({ env: { ...database.env, ...env } }));
  if (stored > 0) {
    await gateway.stop();
    await database.fill(gateway.dataDir, { [TENANT]: stored, other: stored / 10 });
    await gateway.restart();
  }
  const token = await gateway.token({ tenant: TENANT, user: "bench" });
  const request = await agentRequest(gateway.url, token, upstream.url);
  const headers = { authorization: `Bearer ${token}` };
  stack.move();
  return {
    gateway,
    pid: gateway.pid,
    port: portOf(gateway.url),
    database,
    requests: [request],
    async total(status) {
      const response = await fetch(`${gateway.url}/v1/invocations?limit=1&status=${status}`, { headers });
      if (!response.ok) throw new Error(`the history answers ${response.status}`);
      return ((await response.json()) as { total: number }).total;
    },
    [Symbol.asyncDispose]: () => gateway[Symbol.asyncDispose](),
  };
}

/** Creates an agent, and gives the request that calls it. */
export async function agentRequest(url: string, token: string, upstreamUrl: string): Promise<string> {
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
  const body = JSON.stringify({ name: "bench", upstream_url: upstreamUrl });
  const response = await fetch(`${url}/v1/agents`, { method: "POST", headers, body });
  if (response.status !== 201) throw new Error(`an agent could not be created: ${await response.text()}`);
  const { id } = (await response.json()) as { id: string };
  return postRequest(portOf(url), `/v1/proxy/${id}`, [`Authorization: Bearer ${token}`]);
}

export interface FloorTarget extends Target, AsyncDisposable {
  /** How many calls have not ended. */
  left(): Promise<number>;
}

/** @param upstream with one, the calls are made */
export async function openFloor(database: BenchDatabase, upstream?: BenchUpstream): Promise<FloorTarget> {
  const dir = mkdtempSync(join(temporaryRoot(), "floor-"));
  const script = join(import.meta.dir, "floor.ts");
  const args = [database.url ?? dir, ...(upstream === undefined ? [] : [upstream.url])];
  // It ends with this process, however that ends.
  const command = ["setpriv", "--pdeathsig", "KILL", "--", process.execPath, script, ...args];
  const child = Bun.spawn(command, { stdout: "pipe", stderr: "inherit" });
  const end = async () => {
    child.kill("SIGKILL");
    await child.exited;
    rmSync(dir, { recursive: true });
  };
  const { value } = await child.stdout.getReader().read();
  const port = Number(new TextDecoder().decode(value));
  if (!(port > 0)) {
    await end();
    throw new Error("the floor did not start");
  }
  return {
    pid: child.pid,
    port,
    database,
    requests: [postRequest(port, "/")],
    left: async () => Number(await (await fetch(`http://127.0.0.1:${port}/`)).text()),
    [Symbol.asyncDispose]: end,
  };
}

export function portOf(url: string): number {
  return Number(new URL(url).port);
}
