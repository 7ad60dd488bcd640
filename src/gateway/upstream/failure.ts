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

const STOPPED: Readonly<Record<CallStop, UpstreamFailure>> = {
  timeout: {
    errorClass: "timeout",
    detail: "deadline",
    kind: "gateway_timeout",
    message: "the upstream gave no answer in time",
  },
  cancelled: {
    errorClass: "cancelled",
    detail: "cancelled",
    kind: "bad_gateway",
    message: "the call was cancelled",
  },
  shutdown: {
    errorClass: "internal",
    detail: "shutdown",
    kind: "bad_gateway",
    message: "the gateway stopped before the upstream answered",
  },
  crowded: {
    errorClass: "internal",
    detail: "crowded",
    kind: "bad_gateway",
    message: "the upstream took the body too slowly, and others needed the memory",
  },
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
  if (error instanceof CallError) {
    return {
      errorClass: error.errorClass,
      detail: error.message,
      kind: "bad_gateway",
      message: error.callerMessage,
    };
  }
  if (error instanceof OutboundError) return connectionFailure(error);
  if (error instanceof Undecodable) {
    const message = "the upstream's answer can't be decoded";
    return { errorClass: "internal", detail: error.message, kind: "bad_gateway", message };
  }
  if (error instanceof Fault) {
    return { errorClass: "internal", detail: error.message, kind: error.kind, message: error.message };
  }
  // Only the name: the message of an unforeseen error may quote a header.
  const detail = error instanceof Error ? error.name : "unknown error";
  return { errorClass: "internal", detail, kind: "internal", message: "unexpected" };
}

function connectionFailure({ kind, message: detail }: OutboundError): UpstreamFailure {
  if (kind === "blocked") {
    const message = "the upstream's address is not allowed";
    return { errorClass: "ssrf_blocked", detail, kind: "bad_gateway", message };
  }
  return {
    errorClass: "upstream_5xx",
    detail,
    kind: "bad_gateway",
    message: "the upstream gave no answer",
  };
}
