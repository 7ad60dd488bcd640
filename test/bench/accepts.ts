// Calls without a payment: what the machine can do at least (the floor) and what the gateway does, measured one
// right after the other.
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { temporaryRoot } from "../support/gateway/process.ts";
import type { LoadResult } from "./load.ts";
import { figure, perSecond, say } from "./report.ts";

const CONNECTIONS = 128;
const BODY = JSON.stringify({ question: "what is the answer?", context: "x".repeat(200) });

async function load(port: number, request: string, seconds: number): Promise<LoadResult> {
  const generator = join(import.meta.dir, "load.ts");
  const encoded = Buffer.from(request).toString("base64");
  const args = [process.execPath, generator, String(port), String(CONNECTIONS), String(seconds * 1000), encoded];
  const child = Bun.spawn(args, { stdout: "pipe", stderr: "inherit" });
  return JSON.parse(await child.stdout.text()) as LoadResult;
}

function postRequest(path: string, port: number, headers: readonly string[] = []): string {
  const all = [
    `Host: 127.0.0.1:${port}`,
    "Content-Type: application/json",
    `Content-Length: ${BODY.length}`,
    ...headers,
  ];
  return `POST ${path} HTTP/1.1\r\n${all.join("\r\n")}\r\n\r\n${BODY}`;
}

function rate({ answers, seconds }: LoadResult): number {
  return perSecond({ count: answers, seconds });
}

function show(name: string, result: LoadResult): void {
  const statuses = Object.entries(result.by_status).map(([status, count]) => `${status}: ${count}`);
  const { p50_ms, p99_ms } = result;
  figure(name, rate(result), `p50 ${p50_ms} ms  p99 ${p99_ms} ms  (${statuses.join(", ")})`);
}

async function floor(seconds: number): Promise<LoadResult> {
  const dir = mkdtempSync(join(temporaryRoot(), "floor-"));
  const script = join(import.meta.dir, "floor.ts");
  // It ends with this process, however that ends.
  const command = ["setpriv", "--pdeathsig", "KILL", "--", process.execPath, script, dir];
  const child = Bun.spawn(command, { stdout: "pipe", stderr: "inherit" });
  try {
    const { value } = await child.stdout.getReader().read();
    const port = Number(new TextDecoder().decode(value));
    return await load(port, postRequest("/", port), seconds);
  } finally {
    child.kill();
    await child.exited;
    rmSync(dir, { recursive: true });
  }
}

interface Target {
  readonly gateway: Gateway;
  readonly token: string;
  readonly request: string;
  readonly port: number;
}

async function prepare(gateway: Gateway, upstream: string): Promise<Target> {
  const token = await gateway.token({ tenant: "bench", user: "bench" });
  const response = await fetch(`${gateway.url}/v1/agents`, {
    method: "POST",
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
    body: JSON.stringify({ name: "bench", upstream_url: upstream }),
  });
  const { id } = (await response.json()) as { id: string };
  const port = Number(new URL(gateway.url).port);
  const request = postRequest(`/v1/proxy/${id}`, port, [`Authorization: Bearer ${token}`]);
  return { gateway, token, request, port };
}

async function residentMb(pid: number): Promise<number> {
  const status = await Bun.file(`/proc/${pid}/status`).text();
  return Math.round(Number(/VmRSS:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1024);
}

async function total({ gateway, token }: Target, status: string): Promise<number> {
  const headers = { authorization: `Bearer ${token}` };
  const response = await fetch(`${gateway.url}/v1/invocations?limit=1&status=${status}`, { headers });
  return ((await response.json()) as { total: number }).total;
}

/** Accepts alone: the only upstream call that may run never ends, so all others stay pending. */
async function heldBack(base: LoadResult, seconds: number): Promise<void> {
  const upstream = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    idleTimeout: 0,
    fetch: () => new Promise<Response>(() => {}),
  });
  await using gateway = await startGateway({ env: { TOLLGATE_AGENT_CONCURRENCY: "1" } });
  const target = await prepare(gateway, upstream.url.href);
  const idle = await residentMb(gateway.pid);
  const result = await load(target.port, target.request, seconds);
  show("durable accepts, calls held back", result);
  const pending = await total(target, "pending");
  const share = Math.round((rate(result) / rate(base)) * 100);
  say(
    `  ${share} % of the floor; RSS ${idle} MB idle, ${await residentMb(gateway.pid)} MB with ${pending} calls pending`,
  );
  await upstream.stop(true);
}

/** The whole job: accepted, called, recorded. */
async function wholeJob(base: LoadResult, seconds: number): Promise<void> {
  const upstream = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => Response.json({ answer: 42 }) });
  await using gateway = await startGateway();
  const target = await prepare(gateway, upstream.url.href);
  const startedAt = performance.now();
  const result = await load(target.port, target.request, seconds);
  show("accepts while the calls are made", result);
  while ((await total(target, "pending")) + (await total(target, "running")) > 0) await Bun.sleep(100);
  const took = (performance.now() - startedAt) / 1000;
  const ended = await total(target, "succeeded");
  const whole = Math.round(ended / took);
  const share = Math.round((whole / rate(base)) * 100);
  say(
    `  ${ended} calls made and recorded, ${whole}/s (${share} % of the floor); RSS ${await residentMb(gateway.pid)} MB`,
  );
  await upstream.stop(true);
}

/** @param seconds of each of the three loads */
export async function accepts(seconds: number): Promise<void> {
  say(`calls: ${CONNECTIONS} connections, ${BODY.length} bytes, ${seconds} s each`);
  const base = await floor(seconds);
  show("floor: bare Bun.serve, group commit", base);
  await heldBack(base, seconds);
  await wholeJob(base, seconds);
}
