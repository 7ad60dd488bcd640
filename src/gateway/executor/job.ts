// What crosses between the scheduler, which owns the database, and the workers, which own the upstream
// calls: a Job goes in, exactly one Outcome comes back. Everything here survives a structured clone.
import type { Call } from "../../core/call.ts";
import type { CallBody } from "../../wire/body.ts";
import type { Ending } from "../invocations/service.ts";

export interface Job {
  readonly id: string;
  readonly tenant: string;
  readonly agent_id: string;
  readonly call: Call;
  /** The header that carries the credential; null for none. */
  readonly credential: { readonly name: string; readonly value: string } | null;
  /**
   * MCP sessions are shared by the jobs with the same key: agent, URL, credential and its version. Null for a call that has
   * none.
   */
  readonly session_key: string | null;
  /**
   * When its claim was last known to hold, in milliseconds since the epoch: the one clock that threads share. Null
   * when that was just now.
   */
  readonly claim_seen_at: number | null;
  readonly body: CallBody;
}

export interface Outcome extends Ending {
  /** For the log only: what went wrong, without any secret or body. */
  readonly detail: string | null;
  /** Nothing was sent: `claim_seen_at` was so long ago that the claim may be lost. */
  readonly is_stale?: boolean;
}

export interface WorkerSettings {
  readonly upstream_timeout_ms: number;
  readonly max_response_bytes: number;
  readonly allow_hosts: readonly string[];
  readonly deny_hosts: readonly string[];
  /** PEM of extra trusted roots. */
  readonly extra_ca: string | null;
  /** A pause of a worker's event loop from this length on is logged. */
  readonly blocked_ms: number;
}
