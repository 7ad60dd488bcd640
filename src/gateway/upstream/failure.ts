// The one failure table: from an error to the error class of the record, the words of the log and the words for the
// caller. Both paths use it, and nothing else decides the error class of a failure.

import { Fault, type FaultKind } from "../../core/fault.ts";
import type { ErrorClass } from "../../core/states.ts";
import { Undecodable } from "../../http/client/body.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import type { StopSignal } from "../../kernel/wait.ts";

/**
 * Why the gateway stopped a call: the reason of its abort signal. `crowded` means that others need the memory of a body
 * which the upstream does not take.
 */
export type CallStop = "timeout" | "cancelled" | "shutdown" | "crowded";

export interface UpstreamFailure {
  readonly errorClass: ErrorClass;
  /** For the log, without any secret. */
  readonly detail: string;
  readonly kind: FaultKind;
  /** For a caller that waits for the answer. */
  readonly message: string;
}

/** Ends a call with an error class and a reason for the log; the class says nothing about the connection. */
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

/** The credential could not be had, or no header can carry it. */
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
 * The failure of a call that ended with this error instead of an answer.
 *
 * @param signal of the call, whose reason is a CallStop
 */
export function upstreamFailureOf(error: unknown, signal: StopSignal): UpstreamFailure {
  if (signal.aborted) return stoppedBy(signal.reason as CallStop);
  if (error instanceof CallError) return failure(error.errorClass, error.message, error.callerMessage);
  if (error instanceof OutboundError) return connectionFailure(error);
  if (error instanceof Undecodable) return failure("internal", error.message, "the upstream's answer can't be decoded");
  if (error instanceof Fault) return failure("internal", error.message, error.message, error.kind);
  // Only the name: the message of an unforeseen error may quote a header.
  return failure("internal", error instanceof Error ? error.name : "unknown error", "unexpected", "internal");
}

function connectionFailure({ kind, message: detail }: OutboundError): UpstreamFailure {
  if (kind === "blocked") return failure("ssrf_blocked", detail, "the upstream's address is not allowed");
  return failure("upstream_5xx", detail, "the upstream gave no answer");
}
