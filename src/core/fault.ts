// The one error type of the product: a closed kind, a message that is safe for callers, and a cause
// that only the log sees. The kinds are named after the conditions of the interface, not after statuses.

export const FAULT_KINDS = [
  "invalid_request",
  "unauthenticated",
  "denied",
  "forbidden",
  "not_found",
  "method_not_allowed",
  "conflict",
  "payment_required",
  "payload_too_large",
  "agent_not_invocable",
  "rate_limited",
  "over_limit",
  "unavailable",
  "bad_gateway",
  "gateway_timeout",
  "internal",
] as const;

export type FaultKind = (typeof FAULT_KINDS)[number];

/** An answer that says more than an Error body can. */
export interface FaultAnswer {
  readonly body: object;
  /** Names in lower case. */
  readonly headers: Readonly<Record<string, string>>;
}

export interface FaultDetail {
  readonly cause?: unknown;
  /** Whole seconds, sent as `Retry-After`. */
  readonly retryAfterSeconds?: number;
  /** Methods of the route, sent as `Allow`. */
  readonly allow?: readonly string[];
  /** What is left of the request will not come: the connection ends with the answer. */
  readonly closesConnection?: boolean;
  /** Sent in place of the Error body. */
  readonly answer?: FaultAnswer;
}

export class Fault extends Error {
  readonly kind: FaultKind;
  readonly retryAfterSeconds: number | undefined;
  readonly allow: readonly string[] | undefined;
  readonly closesConnection: boolean;
  readonly answer: FaultAnswer | undefined;

  /** `message` reaches the caller word for word: it must name no internal state and no secret. */
  constructor(kind: FaultKind, message: string, detail: FaultDetail = {}) {
    super(message, detail.cause === undefined ? undefined : { cause: detail.cause });
    this.name = "Fault";
    this.kind = kind;
    this.retryAfterSeconds = detail.retryAfterSeconds;
    this.allow = detail.allow;
    this.closesConnection = detail.closesConnection ?? false;
    this.answer = detail.answer;
  }
}

const FIELD_CHARACTERS_MAX = 100;

/** A name as a message shows it, cut off where it is long: callers choose some names, and answers must not grow with them. */
export function shownField(field: string): string {
  if (field.length <= FIELD_CHARACTERS_MAX) return field;
  return `${field.slice(0, FIELD_CHARACTERS_MAX).toWellFormed()}…`;
}

/** An invalid request whose message starts with the name of the field that is wrong. */
export function invalidField(field: string, problem: string): Fault {
  return new Fault("invalid_request", `${shownField(field)}: ${problem}`);
}

/** @param where what else than the route decides on the methods, such as ` for the agent's protocol` */
export function methodNotAllowed(allow: readonly string[], where = ""): Fault {
  return new Fault("method_not_allowed", `method not allowed${where} (use ${allow.join(", ")})`, { allow });
}

/** More than a tenant may have of something. Waiting does not help, so nothing says how long. */
export function overQuota(max: number, what: string): Fault {
  return new Fault("over_limit", `a tenant may have at most ${max} ${what}`);
}
