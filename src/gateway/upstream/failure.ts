// The one table of failures: maps an error of an upstream call to the error class of its record, the text for the log and the
// message for the caller. Polled and streamed calls both use it, and nothing else decides the error class of a failure.
import { Fault, type FaultKind } from "../../core/fault.ts";
import type { ErrorClass, ErrorDetail } from "../../core/states.ts";
import { Undecodable } from "../../http/client/body.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import { TooLongAnswer, UnreadableAnswer } from "../../wire/tool-list.ts";

/** Why the gateway stopped a call. `crowded`: the upstream took the body slowly while others needed the memory that it held. */
export type CallStop = "timeout" | "cancelled" | "shutdown" | "crowded";

export interface CallFailure {
  readonly errorClass: ErrorClass;
  readonly errorDetail: ErrorDetail | null;
  /** For the log, without any secret. */
  readonly detail: string;
}

export interface UpstreamFailure extends CallFailure {
  readonly kind: FaultKind;
  /** For a caller that waits for the response. */
  readonly message: string;
}

type CallErrorOptions = { errorDetail?: ErrorDetail | null; callerMessage?: string; storeFault?: Fault | null };

/** Thrown to end a call with a failure other than those of the connection. */
export class CallError extends Error {
  readonly failure: UpstreamFailure;
  /** The Fault of a store that is unavailable: its `Retry-After` is passed on to the caller. */
  readonly storeFault: Fault | null;

  constructor(errorClass: ErrorClass, detail: string, options: CallErrorOptions = {}) {
    super(detail);
    const { errorDetail = null, callerMessage = detail, storeFault = null } = options;
    this.storeFault = storeFault;
    this.failure = failure(errorClass, errorDetail, detail, callerMessage, storeFault?.kind);
  }
}

/** A secret could not be resolved. The message is for the log: it never contains any part of a secret. */
export class CredentialFailure extends Error {
  override readonly name = "CredentialFailure";
  /** Whether the secret may not be sent to the host of the call. */
  readonly isOtherHost: boolean;

  constructor(message: string, { isOtherHost = false, ...options }: ErrorOptions & { isOtherHost?: boolean } = {}) {
    super(message, options);
    this.isOtherHost = isOtherHost;
  }
}

/** The error of a call without its credential. @param cause why the credential can't be resolved */
export function credentialProblem(cause: unknown): CallError {
  const detail = "credential not resolved";
  if (cause instanceof CredentialFailure && cause.isOtherHost) {
    const callerMessage = "the allowed_hosts of the agent's credential omit the agent's host";
    return new CallError("credential_error", detail, { errorDetail: "credential_host", callerMessage });
  }
  const callerMessage = "the agent's credential could not be resolved";
  const storeFault = cause instanceof Fault && cause.kind === "unavailable" ? cause : null;
  return new CallError("credential_error", detail, {
    errorDetail: "credential_unresolved",
    callerMessage,
    storeFault,
  });
}

const failure = (
  errorClass: ErrorClass,
  errorDetail: ErrorDetail | null,
  detail: string,
  message: string,
  kind: FaultKind = "bad_gateway",
): UpstreamFailure => ({ errorClass, errorDetail, detail, kind, message });

const STOPPED: Readonly<Record<CallStop, UpstreamFailure>> = {
  timeout: failure("timeout", "deadline", "deadline", "the upstream gave no answer in time", "gateway_timeout"),
  cancelled: failure("cancelled", null, "cancelled", "the call was cancelled"),
  shutdown: failure("internal", "process_ended", "shutdown", "the gateway stopped before the upstream answered"),
  crowded: failure("internal", null, "crowded", "the upstream took the body too slowly, and others needed the memory"),
};

const NOT_CONNECTED: UpstreamFailure = {
  ...STOPPED.timeout,
  errorDetail: "connect_timeout",
  detail: "deadline, while connecting",
  message: "there was no connection to the upstream in time",
};

/**
 * The failure of a call that ended with this error instead of a response.
 * @param signal of the call, whose reason is a CallStop
 * @param isDialling whether the call had begun to connect, and had no connection yet
 */
export function upstreamFailureOf(error: unknown, signal: StopSignal, isDialling = false): UpstreamFailure {
  if (signal.aborted) {
    const why = signal.reason as CallStop;
    return why === "timeout" && isDialling ? NOT_CONNECTED : STOPPED[why];
  }
  if (error instanceof CallError) return error.failure;
  if (error instanceof OutboundError) return connectionFailure(error);
  if (error instanceof Undecodable) {
    return failure("internal", null, error.message, "the upstream's answer can't be decoded");
  }
  if (error instanceof UnreadableAnswer) {
    const detail = error instanceof TooLongAnswer ? "response_too_large" : null;
    return failure("internal", detail, error.message, "the tools in the upstream's answer can't be filtered");
  }
  if (error instanceof Fault) return failure("internal", null, error.message, error.message, error.kind);
  // Only the name, since the message of an unexpected error may quote a header.
  return failure("internal", null, error instanceof Error ? error.name : "unknown error", "unexpected", "internal");
}

const NO_ANSWER: Readonly<Partial<Record<ErrorDetail, string>>> = {
  connection_refused: "the upstream refused the connection",
  connection_reset: "the upstream closed the connection without a whole answer",
  connect_timeout: "there was no connection to the upstream in time",
  name_not_found: "the upstream's host name has no address",
  tls: "the TLS connection to the upstream failed",
};

function connectionFailure({ kind, message: detail, reason }: OutboundError): UpstreamFailure {
  if (kind === "blocked") return failure("ssrf_blocked", reason, detail, "the upstream's address is not allowed");
  const message = (reason === null ? undefined : NO_ANSWER[reason]) ?? "the upstream gave no answer";
  return failure("upstream_5xx", reason, detail, message);
}
