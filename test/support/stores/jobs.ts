// Jobs and settings as the executor takes them, for tests that make upstream calls.
import type { Job, WorkerSettings } from "../../../src/gateway/executor/job.ts";

export const LOOPBACK: WorkerSettings = {
  upstream_timeout_ms: 10_000,
  max_response_bytes: 33_554_432,
  allow_hosts: ["127.0.0.1"],
  deny_hosts: [],
  extra_ca: null,
  blocked_ms: 50,
};

let made = 0;

export type JobParts = Partial<Omit<Job, "call" | "body">> & {
  readonly call?: Partial<Job["call"]>;
  readonly body?: string | Uint8Array;
};

export function makeJob(url: string, { call, body = "", ...rest }: JobParts = {}): Job {
  const number = ++made;
  return {
    id: `inv_${number}`,
    tenant: "acme",
    agent_id: "agt_1",
    credential: null,
    session_key: call?.protocol === "mcp" ? "agt_1" : null,
    claim_seen_at: Date.now(),
    body: typeof body === "string" ? new TextEncoder().encode(body) : body,
    ...rest,
    call: {
      url,
      protocol: "http",
      mcp_protocol_version: null,
      credential_ref: null,
      capture: true,
      receipt: false,
      headers: [],
      request_id: `req-${number}`,
      ...call,
    },
  };
}
