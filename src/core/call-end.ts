// The end of a call, announced once it is durable to all that listen: waiters, the log and the metrics, and later
// webhooks. It says what the record says, and holds no body and no secret.
import type { ErrorClass, Mode, SettlementStatus } from "./states.ts";

export interface CallEnd {
  readonly tenant: string;
  readonly invocation_id: string;
  readonly agent_id: string;
  /** The user who made the call. */
  readonly caller: string;
  readonly mode: Mode;
  readonly model: string | null;
  readonly mcp_method: string | null;
  /** Of the request that was accepted; null when whoever ended the call did not have it at hand. */
  readonly request_id: string | null;
  readonly status: "succeeded" | "failed";
  readonly error_class: ErrorClass | null;
  readonly upstream_status: number | null;
  /** The upstream call from first dial to last byte, retries included; null when there was none. */
  readonly latency_ms: number | null;
  /** Until the first byte of a streamed body. */
  readonly ttft_ms: number | null;
  /** Bytes of the request's body. */
  readonly req_size: number | null;
  /** Bytes of the whole decoded response; null when no response came. */
  readonly resp_size: number | null;
  readonly response_truncated: boolean;
  readonly response_content_type: string | null;
  /** Milliseconds since the epoch, by the database's clock. */
  readonly accepted_at: number;
  readonly ended_at: number;
  /** Null for a call that cost nothing. */
  readonly payment: CallPayment | null;
  /** What went wrong, for the log only. */
  readonly detail: string | null;
}

export interface CallPayment {
  /** As the record names it: `base`. */
  readonly network: string;
  /** As the record names it: `USDC`. */
  readonly asset: string;
  /** In the token's smallest units, in decimal. */
  readonly amount: string;
  /** Null where the tenant has no facilitator: the payment was verified only. */
  readonly settlement_status: SettlementStatus | null;
}

export type CallEndListener = (end: CallEnd) => void;
