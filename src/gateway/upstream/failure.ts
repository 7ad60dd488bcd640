// The one table of failures: maps an error of an upstream call to the error class of its record, the text for the log and the
// message for the caller. Polled and streamed calls both use it, and nothing else decides the error class of a failure.

import { Fault, type FaultKind } from "../../core/fault.ts";
import type { ErrorClass } from "../../core/states.ts";
import { Undecodable } from "../../http/client/body.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import type { StopSignal } from "../../kernel/wait.ts";

/**
 * Why the gateway stopped a call: the reason of its abort signal. `crowded` means that the upstream took the body too slowly
 * while other calls needed its memory.
 */
export type CallStop = "timeout" | "cancelled" | "shutdown" | "crowded";

export interface UpstreamFailure {
  readonly errorClass: ErrorClass;
  /** For the log, without any secret. */
  readonly detail: string;
  readonly kind: FaultKind;
  /** For a caller that waits for the response. */
  readonly message: string;
}

/** Thrown to end a call with an error class and a text for the log; for failures other than those of the connection. */
export class CallError extends Error {
  readonly errorClass: ErrorClass;
  /** For the caller. */
  readonly callerMessage: string;

  constructor(errorClass: ErrorClass, detail: string, callerMessage = detail) {
    super(detail);
    this.errorClass = errorClass;
    this.callerMessage = callerMessage;
  }
}

/** The error of a credential that can't be resolved, or that no header can carry. */
export function credentialProblem(detail: string): CallError {
  return new CallError("credential_error", detail, "the agent's credential could not be resolved");
}

const failure = (
  errorClass: ErrorClass,
  detail: string,
  message: string,
  kind: FaultKind = "bad_gateway",
): UpstreamFailure => ({ errorClass, detail, kind, message });

const STOPPED: Readonly<Record<CallStop, UpstreamFailure>> = {
  timeout: failure("timeout", "deadline", "the upstream gave no answer in time", "gateway_timeout"),
  cancelled: failure("cancelled", "cancelled", "the call was cancelled"),
  shutdown: failure("internal", "shutdown", "the gateway stopped before the upstream answered"),
  crowded: failure("internal", "crowded", "the upstream took the body too slowly, and others needed the memory"),
};

/** The failure of a call that was stopped. */
export function stoppedBy(why: CallStop): UpstreamFailure {
  return STOPPED[why];
}

/**
 * The failure of a call that ended with this error instead of a response.
 *
 * @param signal of the call, whose reason is a CallStop
 */
export function upstreamFailureOf(error: unknown, signal: StopSignal): UpstreamFailure {
  if (signal.aborted) return stoppedBy(signal.reason as CallStop);
  if (error instanceof CallError) return failure(error.errorClass, error.message, error.callerMessage);
  if (error instanceof OutboundError) return connectionFailure(error);
  if (error instanceof Undecodable) return failure("internal", error.message, "the upstream's answer can't be decoded");
  if (error instanceof Fault) return failure("internal", error.message, error.message, error.kind);
  // Only the name, since the message of an unexpected error may quote a header.
  return failure("internal", error instanceof Error ? error.name : "unknown error", "unexpected", "internal");
}

function connectionFailure({ kind, message: detail }: OutboundError): UpstreamFailure {
  if (kind === "blocked") return failure("ssrf_blocked", detail, "the upstream's address is not allowed");
  return failure("upstream_5xx", detail, "the upstream gave no answer");
}
