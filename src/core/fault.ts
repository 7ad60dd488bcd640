// The one error type for expected refusals: a kind from a closed list, a message that is safe for callers, and a cause that
// only the log sees. Kinds are named after conditions of the interface; http/responses.ts maps each kind to its status.
import { isId } from "./id.ts";

export type FaultKind =
  | "invalid_request"
  | "unauthenticated"
  | "denied"
  | "forbidden"
  | "not_found"
  | "method_not_allowed"
  | "conflict"
  | "payment_required"
  | "payload_too_large"
  | "agent_not_invocable"
  | "rate_limited"
  | "over_limit"
  | "unavailable"
  | "bad_gateway"
  | "gateway_timeout"
  | "internal";

/** A response that says more than an Error body can, such as the challenge of a 402, or a page for a browser. */
export interface FaultAnswer {
  /** Sent as JSON, or as it is when it is a text, whose type the headers give. */
  readonly body: object | string;
  /** Header names in lower case. */
  readonly headers: Readonly<Record<string, string>>;
}

export interface FaultDetail {
  readonly cause?: unknown;
  /** Sent as `Retry-After`, so whole seconds. */
  readonly retryAfterSeconds?: number;
  /** The route's methods, sent as `Allow`. */
  readonly allow?: readonly string[];
  /** Whether the rest of the request will not be read, so that the connection is closed after the response. */
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

/** A field's name as error messages show it, truncated: callers choose some names, and responses must not grow with them. */
export function shownField(field: string): string {
  if (field.length <= FIELD_CHARACTERS_MAX) return field;
  return `${field.slice(0, FIELD_CHARACTERS_MAX).toWellFormed()}…`;
}

export const invalidField = (field: string, problem: string): Fault =>
  new Fault("invalid_request", `${shownField(field)}: ${problem}`);

/** @param where what other than the route restricts the methods, such as ` for the agent's protocol` */
export const methodNotAllowed = (allow: readonly string[], where = ""): Fault =>
  new Fault("method_not_allowed", `method not allowed${where} (use ${allow.join(", ")})`, { allow });

const RESOURCES = { agt: "agent", cred: "credential", inv: "invocation" } as const;

/** The Fault for an ID of which the tenant has nothing. A text that can't be an ID, such as a name, is answered with where IDs are. */
export function noSuch(prefix: keyof typeof RESOURCES, id: string): Fault {
  const what = RESOURCES[prefix];
  const hint = isId(prefix, id)
    ? ""
    : `: use its ID (${prefix}_…)${prefix === "inv" ? "" : ", not its name"}; GET /v1/${what}s lists them`;
  return new Fault("not_found", `no such ${what}${hint}`);
}

/** The result of the work, or undefined when it throws. */
export function attempt<T>(work: () => T): T | undefined {
  try {
    return work();
  } catch {
    return undefined;
  }
}

/** The code of an error of the system or the runtime, such as ENOENT; null when it has none. */
export function errorCode(error: unknown): string | null {
  const code: unknown = (error as { code?: unknown } | null | undefined)?.code;
  return typeof code === "string" ? code : null;
}

/** The code or the class of an error, for where its message may show anything. */
export const errorName = (error: unknown): string =>
  errorCode(error) ?? (error instanceof Error ? error.name : "unknown");

/** A Fault for a tenant that has reached a quota. Waiting does not help, so there is no Retry-After. */
export const overQuota = (max: number, what: string): Fault =>
  new Fault("over_limit", `a tenant may have at most ${max} ${what}`);
