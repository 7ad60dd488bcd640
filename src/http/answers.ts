// What the service answers with: the one table of kinds of faults and HTTP statuses, and short responses.
import type { Fault, FaultKind } from "../core/fault.ts";

/** The one table of kinds and statuses. */
export const STATUS = {
  invalid_request: 400,
  unauthenticated: 401,
  payment_required: 402,
  denied: 403,
  /** The token lacks what the route takes. */
  forbidden: 403,
  not_found: 404,
  method_not_allowed: 405,
  conflict: 409,
  payload_too_large: 413,
  agent_not_invocable: 422,
  rate_limited: 429,
  /** Waiting does not help, so there is no `Retry-After`. */
  over_limit: 429,
  internal: 500,
  bad_gateway: 502,
  unavailable: 503,
  gateway_timeout: 504,
} as const satisfies Record<FaultKind, number>;

/** Success statuses, named so that routes need no numbers. */
export const SUCCESS = { ok: 200, created: 201, accepted: 202, empty: 204 } as const;

/** The whole answer to bytes that are no HTTP request, where no parser of ours gives one. */
export const MALFORMED_HTTP = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/** No browser may take the JSON for something that it shows or runs. */
export const JSON_HEADERS = { "content-type": "application/json", "x-content-type-options": "nosniff" } as const;

type Headers_ = Readonly<Record<string, string>>;

/**
 * A short JSON response; http/large-response.ts sends what may be long. `application/json` has no charset parameter (RFC
 * 8259, section 11).
 */
export function json(status: keyof typeof SUCCESS, value: unknown, headers?: Headers_): Response {
  return new Response(JSON.stringify(value), {
    status: SUCCESS[status],
    headers: { ...JSON_HEADERS, ...headers },
  });
}

/** The same of JSON that is text already, for the answer that is given most. */
export function jsonText(status: keyof typeof SUCCESS, text: string, headers: Record<string, string>): Response {
  Object.assign(headers, JSON_HEADERS);
  return new Response(text, { status: SUCCESS[status], headers });
}

export function text(body: string, type: string): Response {
  return new Response(body, { headers: { "content-type": type } });
}

export function empty(): Response {
  return new Response(null, { status: SUCCESS.empty });
}

/** For a caller whose copy is still good (RFC 9110, section 15.4.5). */
export function notModified(headers: Headers_): Response {
  return new Response(null, { status: 304, headers });
}

export function faultResponse(fault: Fault): Response {
  const headers = new Headers();
  if (fault.retryAfterSeconds !== undefined) headers.set("retry-after", String(fault.retryAfterSeconds));
  if (fault.allow !== undefined) headers.set("allow", fault.allow.join(", "));
  if (fault.kind === "unauthenticated") headers.set("www-authenticate", "Bearer");
  // A challenge, or what became of one payment, is for one caller at one time.
  if (fault.kind === "payment_required") headers.set("cache-control", "no-store");
  if (fault.closesConnection) headers.set("connection", "close");
  for (const [name, value] of Object.entries(fault.answer?.headers ?? {})) headers.set(name, value);
  const status = STATUS[fault.kind];
  if (fault.kind === "unauthenticated" || fault.kind === "internal") return new Response(null, { status, headers });
  for (const [name, value] of Object.entries(JSON_HEADERS)) headers.set(name, value);
  return new Response(JSON.stringify(fault.answer?.body ?? { error: fault.message }), { status, headers });
}
