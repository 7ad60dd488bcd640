// What crosses between the dispatcher, which owns the database, and the workers, which own the upstream
// calls: a Job goes in, exactly one Outcome comes back. Everything here survives a structured clone.
import type { Call } from "../../core/call.ts";
import type { ErrorClass } from "../../core/states.ts";

export interface Job {
  readonly id: string;
  readonly agent_id: string;
  readonly call: Call;
  /** The header that carries the credential; null for none. */
  readonly credential: { readonly name: string; readonly value: string } | null;
  /** Upstream sessions are shared by the jobs with the same key: agent, credential and its version. */
  readonly session_key: string;
  readonly body: Uint8Array;
}

export interface Outcome {
  readonly status: "succeeded" | "failed";
  readonly error_class: ErrorClass | null;
  readonly upstream_status: number | null;
  /** The upstream call from first dial to last byte, retries included; null when there was none. */
  readonly latency_ms: number | null;
  /** Bytes of the whole decoded response body; null when no response came. */
  readonly resp_size: number | null;
  /** The first MiB of the body; null when capture is off or no response came. */
  readonly response: Uint8Array | null;
  readonly response_truncated: boolean;
  readonly response_content_type: string | null;
  /** For the log only: what went wrong, without any secret or body. */
  readonly detail: string | null;
}

export interface WorkerSettings {
  readonly upstream_timeout_ms: number;
  readonly max_response_bytes: number;
  readonly allow_hosts: readonly string[];
  /** PEM of extra trusted roots. */
  readonly extra_ca: string | null;
}
