// The HTTP edge of both services: it numbers every request, lets only known callers at what is guarded, maps every
// Fault to a status in the one table there is, and writes the access log. Routes themselves only know Faults.
import { Elysia, NotFoundError } from "elysia";
import { turnOf } from "../concurrency/request-turns.ts";
import type { Caller } from "../core/caller.ts";
import { Fault, type FaultKind } from "../core/fault.ts";
import { REQUEST_ID_CHARACTERS_MAX } from "../core/limits.ts";
import type { Log } from "../core/log.ts";
import { createAccessLog, shownPath } from "./access-log.ts";
import { createPassOver } from "./pass-over.ts";

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

/** The whole answer to what is no HTTP request, where no parser of ours gives one. */
export const MALFORMED_HTTP = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

type Headers_ = Readonly<Record<string, string>>;

/**
 * A short JSON response; what may be long is given by http/large-response.ts. `application/json` has no charset parameter (RFC
 * 8259, section 11).
 */
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
  for (const [name, value] of Object.entries(fault.answer?.headers ?? {})) headers.set(name, value);
  const status = STATUS[fault.kind];
  if (fault.kind === "unauthenticated" || fault.kind === "internal")
    return new Response(null, { status, headers });
  headers.set("content-type", "application/json");
  return new Response(JSON.stringify(fault.answer?.body ?? { error: fault.message }), { status, headers });
}

/** What the edge knows of a guarded request, beside the request itself. */
export interface Scope<C = Caller> {
  readonly requestId: string;
  readonly caller: C;
  /** As it was sent: HEAD is routed as GET. */
  readonly method: string;
  /**
   * Whether the connection stays open however long it is silent. The server would keep it so for ever, whatever
   * comes after on it, so whoever holds it open lets it go before the answer ends.
   */
  holdOpen(held: boolean): void;
  /** Adds fields to the request's line in the access log. */
  note(name: string, value: string): void;
}

/** The scopes of the requests that are being answered. */
export interface Scopes<C> {
  set(request: Request, scope: Scope<C>): void;
  /** Of a guarded request, which always has one. */
  of(request: Request): Scope<C>;
}

export function createScopes<C>(): Scopes<C> {
  const scopes = new WeakMap<Request, Scope<C>>();
  return {
    set: (request, scope) => void scopes.set(request, scope),
    of(request) {
      const scope = scopes.get(request);
      if (scope === undefined) throw new Fault("internal", "a request without a scope");
      return scope;
    },
  };
}

const callers = createScopes<Caller>();

/** The scope of a request under /v1, where every request has a caller. */
export const scopeOf = callers.of;

/** What a route threw, on its way past Elysia, which would answer with the error's own message. */
const thrown = new WeakMap<Request, unknown>();

/**
 * An Elysia instance as the product wants it: exact paths, and nothing done to bodies and queries behind the
 * routes' backs. Routes read both through http/input.ts.
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

/** Who may get at what. */
export interface Guard<C> {
  /** Whether only known callers get at the path; their requests stand in the access log. */
  covers(path: string): boolean;
  /** @throws Fault when nobody known makes the request */
  identify(request: Request): C | Promise<C>;
  /** @throws Fault when this caller may not make it; asked before anything else is looked at */
  permit?(caller: C, method: string, path: string): void;
  /** The field that names the caller in the access log. */
  shown(caller: C): readonly [name: string, value: string];
  readonly scopes: Scopes<C>;
}

export interface GuardedEdgeOptions<C> {
  readonly app: {
    fetch(request: Request): Response | Promise<Response>;
    readonly routes: readonly RouteShape[];
  };
  readonly log: Log;
  /** Null when everything is open. */
  readonly guard: Guard<C> | null;
}

export interface EdgeOptions extends Omit<GuardedEdgeOptions<Caller>, "guard"> {
  authenticate(authorization: string | null): Caller | Promise<Caller>;
  permit?: Guard<Caller>["permit"];
}

interface RouteShape {
  readonly method: string;
  readonly path: string;
}

export interface Edge {
  /** @param holdOpen as in the request's scope */
  fetch(request: Request, holdOpen?: (held: boolean) => void): Promise<Response>;
  /** From now on every request is answered 503. */
  drain(): void;
}

const REQUEST_ID = new RegExp(`^[A-Za-z0-9._-]{1,${REQUEST_ID_CHARACTERS_MAX}}$`);

/** The gateway's: everything under /v1 needs a bearer token. */
export function createEdge({ app, log, authenticate, permit }: EdgeOptions): Edge {
  const guard: Guard<Caller> = {
    covers: (path) => path === "/v1" || path.startsWith("/v1/"),
    identify: (request) => authenticate(request.headers.get("authorization")),
    ...(permit !== undefined && { permit }),
    shown: (caller) => ["tenant", caller.tenant],
    scopes: callers,
  };
  return createGuardedEdge({ app, log, guard });
}

export function createGuardedEdge<C>(options: GuardedEdgeOptions<C>): Edge {
  const { guard } = options;
  const table = options.app.routes.map((route) => ({
    method: route.method,
    pattern: pathPattern(route.path),
  }));
  const passOver = createPassOver();
  const accessLog = createAccessLog(options.log);
  let draining = false;

  /** Lets a known caller in, when it is its turn. */
  async function enter(known: Guard<C>, request: Request, told: RequestContext): Promise<void> {
    const { original, path, requestId, fields, holdOpen } = told;
    const seen = known.identify(original);
    const caller = seen instanceof Promise ? await seen : seen;
    const [field, shown] = known.shown(caller);
    fields[field] = shown;
    told.known = shown;
    known.scopes.set(request, {
      requestId,
      caller,
      method: original.method,
      holdOpen,
      note(name, value) {
        fields[name] = value;
      },
    });
    const turn = turnOf(shown);
    if (turn !== undefined) await turn;
    known.permit?.(caller, original.method, path);
  }

  async function respond(request: Request, told: RequestContext): Promise<Response> {
    const { path } = told;
    if (draining) throw new Fault("unavailable", "the service is shutting down", { retryAfterSeconds: 5 });
    if (guard?.covers(path)) await enter(guard, request, told);
    if (!isDecodable(path)) throw noSuchRoute();
    const response = await options.app.fetch(request);
    if (!thrown.has(request)) return response;
    const error = thrown.get(request);
    throw error instanceof NotFoundError ? unknownRoute(table, request.method, path) : error;
  }

  return {
    async fetch(original, holdOpen = holdNothing) {
      const startedAt = performance.now();
      const { request, path } = withRoutableUrl(original);
      const asked = request.headers.get("x-request-id");
      const requestId = asked !== null && REQUEST_ID.test(asked) ? asked : crypto.randomUUID();
      const fields: Fields = { method: original.method, path: shownPath(path), request_id: requestId };
      const told: RequestContext = { original, path, requestId, fields, holdOpen, known: STRANGERS };
      let response: Response;
      try {
        response = await respond(request, told);
      } catch (error) {
        response = failed(error, told, { log: options.log, mayTell: accessLog.mayTell });
      }
      response.headers.set("x-request-id", requestId);
      if (draining) response.headers.set("connection", "close");
      fields["status"] = response.status;
      fields["ms"] = Math.round((performance.now() - startedAt) * 10) / 10;
      if (!guard?.covers(path)) accessLog.open(fields);
      else if (told.known === STRANGERS) accessLog.stranger(fields);
      else accessLog.known(fields);
      await passOver(request, response, told.known);
      // The server leaves the body of an answer to HEAD out, and its length, where it has one, in.
      return response;
    },
    drain() {
      draining = true;
    },
  };
}

/** All whom nobody knows, where others are told apart by tenant: no tenant has this name. */
export const STRANGERS = "";

/** Where the server closes nothing. */
const holdNothing = () => {};

/** The fields of a request's line in the log, which one object gathers while the request is answered. */
type Fields = Record<string, string | number>;

interface RequestContext {
  /** As the server gave it, for whoever knows it by that. */
  readonly original: Request;
  readonly path: string;
  readonly requestId: string;
  readonly fields: Fields;
  readonly holdOpen: (held: boolean) => void;
  /** Whose request it is, as far as that is known yet. */
  known: string;
}

/** @param mayTell whether a stranger's request may have another line */
function failed(
  error: unknown,
  { fields, known }: RequestContext,
  { log, mayTell }: { readonly log: Log; readonly mayTell: () => boolean },
): Response {
  const fault = error instanceof Fault ? error : new Fault("internal", "unexpected", { cause: error });
  if (fault.kind === "internal") log.error("request_failed", { ...fields, error: fault });
  if (fault.kind === "unavailable" && fault.cause !== undefined && (known !== STRANGERS || mayTell())) {
    log.warn("request_refused", { ...fields, error: fault });
  }
  return faultResponse(fault);
}

/**
 * Elysia looks for the path after the 11th character of the URL and so misreads one with a shorter host, and
 * it knows no HEAD. Both get a request that it routes right; the scope is keyed by that request. A Host header
 * that makes no URL leaves the bare path as the request's URL. A new URL is written anew (`\` is `/`, and `..` goes up),
 * so the path that is judged is always that of the request which is routed.
 */
function withRoutableUrl(original: Request): { request: Request; path: string } {
  const { url } = original;
  const start = pathStart(url);
  const isHead = original.method === "HEAD";
  if (start >= 11 && !isHead) return { request: original, path: pathOf(url, start) };
  const { headers, body, signal } = original;
  const method = isHead ? "GET" : original.method;
  const target = start === -1 || url[start] !== "/" ? "/" : url.slice(start);
  const request = new Request(`http://localhost${target}`, { method, headers, body, signal });
  return { request, path: pathOf(request.url, pathStart(request.url)) };
}

function pathStart(url: string): number {
  const scheme = url.indexOf("://");
  return scheme === -1 ? 0 : url.indexOf("/", scheme + 3);
}

function pathOf(url: string, start: number): string {
  const query = url.indexOf("?", start);
  return url.slice(start, query === -1 ? url.length : query);
}

interface RoutePattern {
  readonly method: string;
  readonly pattern: RegExp;
}

/** A route's path as a pattern: `:name` is one segment, a final `*` is the rest. */
export function pathPattern(path: string): RegExp {
  const source = path
    .split("/")
    .map((segment) => (segment === "*" ? ".*" : segment.startsWith(":") ? "[^/]+" : RegExp.escape(segment)))
    .join("/");
  return new RegExp(`^${source}$`);
}

function noSuchRoute(): Fault {
  return new Fault("not_found", "no such route");
}

/** For what Elysia has no route for, and does not tell whether another method has one. */
function unknownRoute(table: readonly RoutePattern[], method: string, path: string): Fault {
  const allow = table.filter(({ pattern }) => pattern.test(path)).map((route) => route.method);
  if (allow.length === 0 || allow.includes(method)) return noSuchRoute();
  if (allow.includes("GET")) allow.push("HEAD");
  return new Fault("method_not_allowed", "this route has other methods", { allow });
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
