// Calls of mcp agents as a worker makes them, to servers of a test, and what they have asked for.

import { hostRules } from "../../../src/core/host.ts";
import { ResponseMemory, runCall } from "../../../src/gateway/executor/call.ts";
import type { Outcome, WorkerSettings } from "../../../src/gateway/executor/job.ts";
import { createMcp } from "../../../src/gateway/executor/mcp/call.ts";
import { createOutbound } from "../../../src/http/client/outbound.ts";
import type { Stoppable } from "../../../src/kernel/wait.ts";
import type { Recorded } from "../http/upstream.ts";
import { type JobParts, LOOPBACK, makeJob } from "../stores/jobs.ts";

const open: Array<{ stop(): Promise<void> }> = [];

/** For afterEach: stops what was kept. */
export async function stopKept(): Promise<void> {
  for (const part of open.splice(0).reverse()) await part.stop();
}

export function keep<T extends { stop(): Promise<void> }>(part: T): T {
  open.push(part);
  return part;
}

/** A caller with sessions of its own. */
export function client(settings: Partial<WorkerSettings> = {}, memory = new ResponseMemory(1)) {
  const whole = { ...LOOPBACK, ...settings };
  const outbound = createOutbound({ rules: hostRules({ allow: whole.allow_hosts }), extraCa: null });
  const upstreams = { outbound, settings: whole, memory };
  const mcp = createMcp(upstreams);
  keep({ stop: mcp.close });
  return {
    close: mcp.close,
    send: (url: string, request: unknown, parts: JobParts = {}, stop: Stoppable = new AbortController()) => {
      const body = typeof request === "string" ? request : JSON.stringify(request);
      const call = { protocol: "mcp" as const, ...parts.call };
      return runCall(makeJob(url, { body, ...parts, call }), upstreams, stop, mcp.call);
    },
  };
}

export const LIST = { jsonrpc: "2.0", id: 1, method: "tools/list" };

export function echo(message: string, id: unknown = 1) {
  return { jsonrpc: "2.0", id, method: "tools/call", params: { name: "echo", arguments: { message } } };
}

export function text(outcome: Outcome): string {
  return new TextDecoder().decode(outcome.response ?? new Uint8Array());
}

// biome-ignore lint/suspicious/noExplicitAny: answers of test servers are looked into freely.
export function answer(outcome: Outcome): any {
  return JSON.parse(text(outcome));
}

export function methods(requests: readonly Recorded[]): string[] {
  return requests.map(({ method, body, status }) => {
    const name = body === "" ? method : (JSON.parse(body) as { method: string }).method;
    return `${name} ${status}`;
  });
}

export function sessionsOf(requests: readonly Recorded[]): number {
  return new Set(requests.map(({ headers }) => headers.get("mcp-session-id")).filter((id) => id !== null)).size;
}
