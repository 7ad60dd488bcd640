// The data of one call: who makes it, what is stored until the upstream has been called, and the event that announces its end.
import type { ErrorClass, ErrorDetail, Mode, Protocol, SettlementStatus } from "./states.ts";

export interface Caller {
  readonly tenant: string;
  readonly user: string;
  readonly scopes: ReadonlySet<string>;
}

/** The scope that a caller needs to read captured bodies. */
export const READ_BODY_SCOPE = "invocations:read_body";

/** The call as it was accepted, whatever becomes of its agent; stored until it is made. It survives JSON and a structured clone. */
export interface Call {
  readonly url: string;
  readonly protocol: Protocol;
  readonly mcp_protocol_version: string | null;
  readonly credential_ref: string | null;
  readonly capture: boolean;
  /** Whether a receipt will state what the upstream answered; then the response is hashed. */
  readonly receipt: boolean;
  /** The caller's headers that are forwarded to the upstream, names in lower case. */
  readonly headers: ReadonlyArray<readonly [name: string, value: string]>;
  readonly request_id: string;
}

/** The end of a call, announced once it is durable: what the record says, without bodies and secrets. */
export interface CallEnd {
  readonly tenant: string;
  readonly invocation_id: string;
  readonly agent_id: string;
  readonly caller: string;
  readonly mode: Mode;
  readonly model: string | null;
  readonly mcp_method: string | null;
  /** ID of the request by which the call was accepted; null where the code that ended the call had not loaded it. */
  readonly request_id: string | null;
  readonly status: "succeeded" | "failed";
  readonly error_class: ErrorClass | null;
  readonly error_detail: ErrorDetail | null;
  readonly upstream_status: number | null;
  /** Duration of the upstream call from the first dial to the last byte, retries included; null when there was none. */
  readonly latency_ms: number | null;
  /** Time to the first byte of a streamed body. */
  readonly ttft_ms: number | null;
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
  /** Network and asset as the record names them: `base`, `USDC`. */
  readonly network: string;
  readonly asset: string;
  /** In the token's smallest units, in decimal. */
  readonly amount: string;
  /** Null where the tenant has no facilitator: the payment was verified only. */
  readonly settlement_status: SettlementStatus | null;
}

export type CallEndListener = (end: CallEnd) => void;
