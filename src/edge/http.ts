// The HTTP edge of both wings: it numbers every request, lets only authenticated ones under /v1, maps every
// Fault to a status in the one table there is, and writes the access log. Routes themselves only know Faults.
import { Elysia } from "elysia";
import type { Caller } from "../core/caller.ts";
import { Fault, type FaultKind } from "../core/fault.ts";
import { REQUEST_ID_CHARACTERS_MAX } from "../core/limits.ts";
import type { Log } from "../core/log.ts";

/** The one table of kinds and statuses. */
export const STATUS = {
  invalid_request: 400,
  unauthenticated: 401,
  payment_required: 402,
  denied: 403,
  not_found: 404,
  method_not_allowed: 405,
  conflict: 409,
  payload_too_large: 413,
  agent_not_invocable: 422,
  rate_limited: 429,
  internal: 500,
  unavailable: 503,
} as const satisfies Record<FaultKind, number>;

/** Success statuses, named so that routes need no numbers. */
export const SUCCESS = { ok: 200, created: 201, accepted: 202, empty: 204 } as const;

type Headers_ = Readonly<Record<string, string>>;

/** A JSON response. `application/json` has no charset parameter (RFC 8259, section 11). */
export function json(status: keyof typeof SUCCESS, value: unknown, headers?: Headers_): Response {
  return new Response(JSON.stringify(value), {
    status: SUCCESS[status],
    headers: { "content-type": "application/json", ...headers },
  });
}

export function empty(): Response {
  return new Response(null, { status: SUCCESS.empty });
}

/** For a caller whose copy is still good (RFC 9110, section 15.4.5). */
export function notModified(headers: Headers_): Response {
  return new Response(null, { status: 304, headers });
}

function faultResponse(fault: Fault): Response {
  const headers = new Headers();
  if (fault.retryAfterSeconds !== undefined) headers.set("retry-after", String(fault.retryAfterSeconds));
  if (fault.allow !== undefined) headers.set("allow", fault.allow.join(", "));
  if (fault.kind === "unauthenticated") headers.set("www-authenticate", "Bearer");
  if (fault.closesConnection) headers.set("connection", "close");
  const status = STATUS[fault.kind];
  if (fault.kind === "unauthenticated" || fault.kind === "internal")
    return new Response(null, { status, headers });
  headers.set("content-type", "application/json");
  return new Response(JSON.stringify({ error: fault.message }), { status, headers });
}

/** What the edge knows of a request, beside the request itself. */
export interface Scope {
  readonly requestId: string;
  readonly caller: Caller;
  /** Adds fields to the request's line in the access log. */
  note(name: string, value: string): void;
}

const scopes = new WeakMap<Request, Scope>();

/** The scope of a request under /v1, where every request has a caller. */
export function scopeOf(request: Request): Scope {
  const scope = scopes.get(request);
  if (scope === undefined) throw new Fault("internal", "a request without a scope");
  return scope;
}

/** What a route threw, on its way past Elysia, which would answer with the error's own message. */
const thrown = new WeakMap<Request, unknown>();

/**
 * An Elysia instance as the product wants it: exact paths, and nothing done to bodies and queries behind the
 * routes' backs. Routes read both through edge/input.ts.
 */
export function routes() {
  return new Elysia({ strictPath: true, normalize: false }).onError(
    { as: "global" },
    ({ error, request }) => {
      thrown.set(request, error);
      return new Response(null, { status: STATUS.internal });
    },
  );
}

export interface EdgeOptions {
  readonly app: {
    fetch(request: Request): Response | Promise<Response>;
    readonly routes: readonly RouteShape[];
  };
  readonly log: Log;
  authenticate(authorization: string | null): Caller | Promise<Caller>;
}

interface RouteShape {
  readonly method: string;
  readonly path: string;
}

export interface Edge {
  fetch(request: Request): Promise<Response>;
  /** From now on every request is answered 503. */
  drain(): void;
}

const REQUEST_ID = new RegExp(`^[A-Za-z0-9._-]{1,${REQUEST_ID_CHARACTERS_MAX}}$`);

export function createEdge(options: EdgeOptions): Edge {
  const table = options.app.routes.map((route) => ({
    method: route.method,
    pattern: pathPattern(route.path),
  }));
  let draining = false;

  async function respond(request: Request, path: string, requestId: string, notes: Record<string, string>) {
    if (draining) throw new Fault("unavailable", "the service is shutting down", { retryAfterSeconds: 5 });
    if (isProtected(path)) {
      const seen = options.authenticate(request.headers.get("authorization"));
      const caller = seen instanceof Promise ? await seen : seen;
      notes["tenant"] = caller.tenant;
      scopes.set(request, {
        requestId,
        caller,
        note(name, value) {
          notes[name] = value;
        },
      });
    }
    refuseUnknownRoute(table, request.method, path);
    const response = await options.app.fetch(request);
    if (thrown.has(request)) throw thrown.get(request);
    return response;
  }

  return {
    async fetch(original) {
      const startedAt = performance.now();
      const { request, path } = withRoutableUrl(original);
      const asked = request.headers.get("x-request-id");
      const requestId = asked !== null && REQUEST_ID.test(asked) ? asked : crypto.randomUUID();
      const notes: Record<string, string> = {};
      let response: Response;
      try {
        response = await respond(request, path, requestId, notes);
      } catch (error) {
        response = failed(error, requestId, notes, options.log);
      }
      response.headers.set("x-request-id", requestId);
      if (draining) response.headers.set("connection", "close");
      const fields = {
        method: original.method,
        path,
        status: response.status,
        request_id: requestId,
        ...notes,
      };
      const ms = Math.round((performance.now() - startedAt) * 10) / 10;
      if (isProtected(path)) options.log.info("request", { ...fields, ms });
      else options.log.debug("request", { ...fields, ms });
      // The server leaves the body of an answer to HEAD out, and its length in.
      return response;
    },
    drain() {
      draining = true;
    },
  };
}

function isProtected(path: string): boolean {
  return path === "/v1" || path.startsWith("/v1/");
}

function failed(error: unknown, requestId: string, notes: Record<string, string>, log: Log): Response {
  const fault = error instanceof Fault ? error : new Fault("internal", "unexpected", { cause: error });
  if (fault.kind === "internal")
    log.error("request failed", { request_id: requestId, ...notes, error: fault });
  if (fault.kind === "unavailable" && fault.cause !== undefined) {
    log.warn("request refused", { request_id: requestId, ...notes, error: fault });
  }
  return faultResponse(fault);
}

/**
 * Elysia looks for the path after the 11th character of the URL and so misreads one with a shorter host, and
 * it knows no HEAD. Both get a request that it routes right; the scope is keyed by that request. A Host header
 * that makes no URL leaves the bare path as the request's URL.
 */
function withRoutableUrl(original: Request): { request: Request; path: string } {
  const { url } = original;
  const scheme = url.indexOf("://");
  const start = scheme === -1 ? 0 : url.indexOf("/", scheme + 3);
  const target = start === -1 || url[start] !== "/" ? "/" : url.slice(start);
  const query = target.indexOf("?");
  const path = query === -1 ? target : target.slice(0, query);
  const isHead = original.method === "HEAD";
  if (start >= 11 && !isHead) return { request: original, path };
  const { headers, body, signal } = original;
  const method = isHead ? "GET" : original.method;
  return { request: new Request(`http://localhost${target}`, { method, headers, body, signal }), path };
}

interface RoutePattern {
  readonly method: string;
  readonly pattern: RegExp;
}

/** A route's path as a pattern: `:name` is one segment, a final `*` is the rest. */
function pathPattern(path: string): RegExp {
  const source = path
    .split("/")
    .map((segment) => (segment === "*" ? ".+" : segment.startsWith(":") ? "[^/]+" : RegExp.escape(segment)))
    .join("/");
  return new RegExp(`^${source}$`);
}

function refuseUnknownRoute(table: readonly RoutePattern[], method: string, path: string): void {
  if (!isDecodable(path)) throw new Fault("not_found", "no such route");
  const allowed: string[] = [];
  for (const route of table) {
    if (!route.pattern.test(path)) continue;
    if (route.method === method) return;
    allowed.push(route.method);
  }
  if (allowed.length === 0) throw new Fault("not_found", "no such route");
  if (allowed.includes("GET")) allowed.push("HEAD");
  throw new Fault("method_not_allowed", "this route has other methods", { allow: allowed });
}

/** What is no percent-encoded UTF-8 names nothing, and Elysia would give routes null for its parameters. */
function isDecodable(path: string): boolean {
  if (!path.includes("%")) return true;
  try {
    decodeURIComponent(path);
    return true;
  } catch {
    return false;
  }
}
