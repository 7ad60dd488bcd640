// What crosses between the scheduler, which owns the database, and the workers, which own the upstream calls: a Job goes in,
// exactly one Outcome comes back. Everything in them survives a structured clone. And how an outcome is judged, from what
// happened to the stored end.
import type { Call } from "../../core/call.ts";
import { type ErrorClass, errorClassOf } from "../../core/states.ts";
import type { Answer } from "../../http/client/exchange.ts";
import { MAX } from "../../kernel/limits.ts";
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

/** What is known of a call so far. It is filled in as the call goes on, so that a failure is recorded with it too. */
export interface Trace {
  /** When the first connection was dialled, of performance.now(); null before that. */
  dialled_at: number | null;
  /** Set once the head of the final response came. */
  upstream_status: number | null;
  response_content_type: string | null;
  /** Bytes of the decoded body, as far as they could be counted. */
  resp_size: number | null;
}

/** What is kept of a body. */
export interface KeptBody {
  /** Null when it is not captured. */
  readonly response: Uint8Array | null;
  readonly response_truncated: boolean;
  /** Of the whole body; null when no receipt will say it. */
  readonly resp_sha256: string | null;
}

const NOT_STORED: KeptBody = { response: null, response_truncated: false, resp_sha256: null };

export function newTrace(): Trace {
  return { dialled_at: null, upstream_status: null, response_content_type: null, resp_size: null };
}

export function noteHead(trace: Trace, response: Answer): void {
  trace.upstream_status = response.status;
  const type = response.headers.get("content-type");
  // A longer content type would only fill the record.
  trace.response_content_type = type === null ? null : type.slice(0, 256);
  trace.resp_size = null;
}

/** The call was answered in full. */
export function answered(trace: Trace, upstreamStatus: number, stored: KeptBody, now: number): Outcome {
  const errorClass = errorClassOf(upstreamStatus);
  return {
    status: errorClass === null ? "succeeded" : "failed",
    error_class: errorClass,
    upstream_status: upstreamStatus,
    latency_ms: latency(trace, now),
    resp_size: trace.resp_size,
    ...stored,
    response_content_type: trace.response_content_type,
    detail: null,
  };
}

/** The call has no whole answer. The numbers so far are kept; a partial body is not stored. */
export function failed(trace: Trace, errorClass: ErrorClass, detail: string, now: number): Outcome {
  return {
    status: "failed",
    error_class: errorClass,
    upstream_status: trace.upstream_status,
    latency_ms: latency(trace, now),
    resp_size: trace.resp_size,
    ...NOT_STORED,
    response_content_type: trace.response_content_type,
    detail,
  };
}

/** The outcome of a call whose worker died or never took it, so that nothing is known. */
export function lostCall(detail: string): Outcome {
  return failed(newTrace(), "internal", detail, 0);
}

/** A whole body as its caller gets it. */
export interface WholeBody {
  /** The first bytes, at least as many as are captured. */
  readonly start: Uint8Array;
  readonly size: number;
  readonly sha256: string | null;
}

/** The stored form of a body. */
export function keep({ start, size, sha256: resp_sha256 }: WholeBody, capture: boolean): KeptBody {
  if (!capture) return { ...NOT_STORED, resp_sha256 };
  const response = start.length > MAX.capturedBytes ? start.slice(0, MAX.capturedBytes) : start;
  return { response, response_truncated: size > response.length, resp_sha256 };
}

function latency(trace: Trace, now: number): number | null {
  return trace.dialled_at === null ? null : Math.max(0, Math.round(now - trace.dialled_at));
}
