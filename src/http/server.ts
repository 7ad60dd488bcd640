// The HTTP edge of both services: it gives every request an ID, authenticates callers of guarded paths, turns every Fault into
// a response, traces, counts, and writes the access log. Routes know none of this and only throw Faults.
import type { Caller } from "../core/call.ts";
import { Fault } from "../core/fault.ts";
import type { Log, LogFields } from "../core/log.ts";
import { type Meters, silentMeters } from "../core/meters.ts";
import { namedIn, nameIn, type Span, type SpanFields, type Tracer } from "../core/tracing.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairShare } from "../kernel/share.ts";
import { isTurnUsedUp, turnOf } from "../kernel/turns.ts";
import { ActingRequest, actFor } from "../kernel/wait.ts";
import { createRouter, type Missing, type RoutedApp } from "./elysia.ts";
import { createBodyDrainer, declaredLength, Intake, isChunked } from "./intake.ts";
import { createLargeResponses, faultResponse, type LargeResponses } from "./responses.ts";

/** What the edge gives a route together with a guarded request. */
export interface Scope<C = Caller> {
  readonly requestId: string;
  readonly caller: C;
  /** The method as it was sent; HEAD is routed as GET. */
  readonly method: string;
  /** Suspends the idle timeout of the connection. A route restores it before its response ends, for later requests. */
  holdOpen(held: boolean): void;
  /** Adds fields to the request's line in the access log. */
  note(name: string, value: string): void;
  /** Null when the request is not traced. */
  readonly span: Span | null;
  readonly intake: Intake;
  readonly responses: LargeResponses;
}

const SCOPE = Symbol("scope");

type ScopedRequest<C> = Request & { [SCOPE]?: Scope<C> };

/** The scope of a guarded request, which always has one. */
export function scopeOf<C = Caller>(request: Request): Scope<C> {
  const scope = (request as ScopedRequest<C>)[SCOPE];
  if (scope === undefined) throw new Fault("internal", "the request has no scope: its path is not guarded");
  return scope;
}

type ShownCaller = readonly [field: "tenant" | "account", name: string];

export interface Guard<C> {
  /** Whether the path is for known callers only. */
  covers(path: string): boolean;
  /** @throws Fault when the caller is not known */
  identify(request: Request, path: string): C | Promise<C>;
  /** Called before the request is routed. @throws Fault when the caller may not make it */
  permit?(caller: C, method: string, path: string): void;
  /** The field that names the caller in the access log. */
  shown(caller: C): ShownCaller;
  /** Null for a request that gets no span. */
  traced(method: string, path: string): TracedRoute | null;
}

/**
 * The route of most requests, which bypasses the router: 7 of the 59 µs that a call costs the main thread without the store's write
 * (Elysia 1.4.30). The app has it too, to document it, and to answer requests whose path is spelled in another way.
 */
export interface FastPath<C = Caller> {
  readonly method: string;
  /** The path up to its one parameter. */
  readonly prefix: string;
  /** Behaves as the route of the app does. */
  answer(request: Request, scope: Scope<C>, parameter: string): Response | Promise<Response>;
}

export interface GuardedEdgeOptions<C> {
  readonly app: RoutedApp;
  readonly fastPath?: FastPath<C>;
  /** Makes the refusal of an open path that has no route. */
  readonly missing?: Missing;
  readonly log: Log;
  readonly meters?: Pick<Meters, "requestsTo">;
  /** Null when all paths are open. */
  readonly guard: Guard<C> | null;
  /** Omitted or null where traces are off. */
  readonly tracer?: Tracer | null;
}

export interface EdgeOptions extends Omit<GuardedEdgeOptions<Caller>, "guard"> {
  /** @param path of the request: what a token is for, and what a refusal names, may hang on it */
  authenticate(authorization: string | null, path: string): Caller | Promise<Caller>;
  permit?: Guard<Caller>["permit"];
}

export type Edge = ReturnType<typeof createGuardedEdge>;

const REQUEST_ID = new RegExp(`^[A-Za-z0-9._-]{1,${MAX.requestIdCharacters}}$`);

/** The gateway's edge: everything under /v1 needs a bearer token. */
export function createEdge({ authenticate, permit, ...options }: EdgeOptions) {
  const guard: Guard<Caller> = {
    covers: (path) => path === "/v1" || path.startsWith("/v1/"),
    identify: (request, path) => authenticate(request.headers.get("authorization"), path),
    ...(permit !== undefined && { permit }),
    shown: (caller) => ["tenant", caller.tenant],
    traced: tracedCall,
  };
  return createGuardedEdge({ ...options, guard });
}

export function createGuardedEdge<C>(options: GuardedEdgeOptions<C>) {
  const { guard, fastPath, meters = silentMeters, tracer = null } = options;
  const route = createRouter(options.app);
  const [intake, responses, drainBody] = [new Intake(), createLargeResponses(), createBodyDrainer()];
  const [accessLog, turnOfKnown] = [createAccessLog(options.log), createTurns()];
  const counted = meters.requestsTo(options.app.routes);
  let draining = false;

  /** Records the caller of a request, begins its span, and makes its scope. */
  function scopeFor(guard: Guard<C>, context: RequestContext, request: Request, caller: C): Scope<C> {
    const { original, requestId, fields, holdOpen } = context;
    const { method } = original;
    const [field, shown] = guard.shown(caller);
    context.identified(original, shown);
    fields[field] = shown;
    context.owner = shown;
    const traced = tracer === null ? null : guard.traced(request.method, context.path);
    if (tracer !== null && traced !== null) {
      context.span = beginSpan(tracer, traced, request, context, [field, shown]);
      fields["trace_id"] = context.span.traceId;
    }
    const note = noteIn(fields);
    return { requestId, caller, method, holdOpen, note, span: context.span, intake, responses };
  }

  function toRoute(request: Request, context: RequestContext, scope: Scope<C>): Response | Promise<Response> {
    const { owner, path } = context;
    guard?.permit?.(scope.caller, scope.method, path);
    context.acting = new ActingRequest(owner);
    const fast = onFastPath(fastPath, request, path);
    if (fast !== null) return actFor(context.acting, () => fast(scope));
    (request as ScopedRequest<C>)[SCOPE] = scope;
    return actFor(context.acting, () => route(request, path));
  }

  function inTurn(guard: Guard<C>, context: RequestContext, request: Request, caller: C): Response | Promise<Response> {
    const scope = scopeFor(guard, context, request, caller);
    const turn = turnOfKnown(context);
    return turn === undefined ? toRoute(request, context, scope) : turn.then(() => toRoute(request, context, scope));
  }

  /** Synchronous when the caller is known from an earlier request, its turn has come, and the route answers at once. */
  function respond(request: Request, context: RequestContext): Response | Promise<Response> {
    const { original, path } = context;
    if (draining) throw new Fault("unavailable", "the service is shutting down", { retryAfterSeconds: 5 });
    checkFraming(context);
    if (!guard?.covers(path)) {
      const toOpenRoute = () => actFor(STRANGERS, () => route(request, path, options.missing));
      return turnOfStranger(context)?.then(toOpenRoute) ?? toOpenRoute();
    }
    const identified = guard.identify(original, path);
    if (!(identified instanceof Promise)) return inTurn(guard, context, request, identified);
    return identified.then((caller) => inTurn(guard, context, request, caller));
  }

  function finish({ path, startedAt, fields, owner, span }: RequestContext, status: number): void {
    const ms = performance.now() - startedAt;
    fields["status"] = status;
    fields["ms"] = Math.round(ms * 10) / 10;
    counted(path, status, ms);
    if (span !== null) endSpan(span, status, fields);
    if (!guard?.covers(path)) accessLog.open(fields);
    else (owner === STRANGERS ? accessLog.stranger : accessLog.known)(fields);
  }

  return {
    /** Of a response to HEAD, Bun's server sends no body. @param identified called once the tenant or account is known */
    async fetch(original: Request, holdOpen: HoldOpen = nothing, identified: Identified = nothing): Promise<Response> {
      const startedAt = performance.now();
      const { request, path } = withRoutableUrl(original);
      const context = contextOf(original, { path, startedAt, holdOpen, identified });
      let response: Response;
      try {
        const responding = respond(request, context);
        response = responding instanceof Promise ? await responding : responding;
      } catch (error) {
        // Otherwise the runtime would answer a connection full of refused requests in one turn of the event loop.
        if (context.owner === STRANGERS) await turnOfStranger(context);
        response = failed(error, context, options.log, accessLog.mayTell);
      }
      context.acting?.liftBound();
      response.headers.set("x-request-id", context.requestId);
      if (draining || context.endsConnection) response.headers.set("connection", "close");
      finish(context, response.status);
      const drained = context.endsConnection ? undefined : drainBody(request, response, context.owner);
      if (drained !== undefined) await drained;
      return response;
    },
    /** Use of this server's limits, by their names in kernel/limits.ts. */
    inUse: () => ({ bodyIntakeBytes: intake.inUse, responseBytes: responses.inUse() }),
    /** From now on every request is answered with 503. */
    drain(): void {
      draining = true;
    },
  };
}

/**
 * The request that is routed, and its path. Elysia looks for the path after the 11th character of the URL, so it misreads a URL
 * with a shorter host, and it knows no HEAD; such requests are replaced by one that it routes correctly. With a Host header
 * that makes no URL, the request's URL is the bare path. A new URL is normalised (`\` becomes `/`, `..` is resolved), so the
 * guard judges the path of the request that is routed, never that of the original.
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

/**
 * Content-Length and Host decide where a request ends and which host it is for, so each may be sent once only (RFC 9112,
 * sections 3.2 and 6.3): a proxy that reads another of two values enables request smuggling. The runtime (Bun 1.4.5) answers a
 * trailer with a 400 of its own after it has handed over the body, so a request that announces one is refused before anything is
 * done for it. Its chunks are not drained, since the 400 of the runtime would come first then.
 * @throws Fault `invalid_request`
 */
function checkFraming(context: RequestContext): void {
  const { headers } = context.original;
  if (headers.has("trailer")) {
    context.endsConnection = isChunked(headers);
    throw new Fault("invalid_request", "trailer: trailers are not supported, so send the request without them");
  }
  declaredLength(headers);
  const host = headers.get("host") ?? "";
  // The runtime joins two values by a comma and a space, and no host contains a space.
  if (host.includes(", ")) throw new Fault("invalid_request", "host: must be sent once");
  if (host.includes(" ")) throw new Fault("invalid_request", "host: must not contain a space");
}

/** A path segment without characters that a router might decode or normalise. */
const PLAIN_SEGMENT = /^[\w-]+$/;

/** Null for a request whose path is not the fast path's, or is not plain. */
function onFastPath<C>(fastPath: FastPath<C> | undefined, request: Request, path: string) {
  if (fastPath === undefined || request.method !== fastPath.method || !path.startsWith(fastPath.prefix)) return null;
  const rest = path.slice(fastPath.prefix.length);
  return PLAIN_SEGMENT.test(rest) ? (scope: Scope<C>) => fastPath.answer(request, scope, rest) : null;
}

/** Stands for all unknown callers where callers are accounted by tenant. No tenant has this name. */
export const STRANGERS = "";

type HoldOpen = Scope<never>["holdOpen"];
type Identified = (request: Request, owner: string) => void;

/** For servers without an idle timeout, and without holders of connections. */
const nothing = () => {};

/** The fields of a request's line in the access log, collected while the request is answered. */
type Fields = Record<string, string | number>;

const noteIn = (fields: Fields) => (name: string, value: string) => {
  fields[name] = value;
};

interface RequestContext {
  /** The request object from the server, by which callers of the edge may recognise it. */
  readonly original: Request;
  readonly path: string;
  readonly requestId: string;
  /** By performance.now(). */
  readonly startedAt: number;
  readonly fields: Fields;
  readonly holdOpen: HoldOpen;
  readonly identified: Identified;
  /** The tenant or account whose request it is; STRANGERS until that is known. */
  owner: string;
  /** Null until it is routed, and for an open path. */
  acting: ActingRequest | null;
  /** Null when the request is not traced. */
  span: Span | null;
  /** Whether the connection ends with the response, even if more of the request is to come. */
  endsConnection: boolean;
}

function contextOf(
  original: Request,
  given: Pick<RequestContext, "path" | "startedAt" | "holdOpen" | "identified">,
): RequestContext {
  const { method, headers } = original;
  const sentId = headers.get("x-request-id");
  const requestId = sentId !== null && REQUEST_ID.test(sentId) ? sentId : crypto.randomUUID();
  const fields: Fields = { method, path: shownPath(given.path), request_id: requestId };
  return { original, requestId, fields, ...given, owner: STRANGERS, acting: null, span: null, endsConnection: false };
}

/**
 * The turn of a request from an unknown caller; undefined when it may be answered at once. A request with a large body never
 * waits, since the runtime would buffer the body: 600 connections with a megabyte each took gigabytes. Its connection ends with
 * the response, since otherwise a connection full of such requests would hold the event loop.
 */
function turnOfStranger(context: RequestContext): Promise<void> | undefined {
  if (!isTurnUsedUp()) return undefined;
  const { headers } = context.original;
  const length = headers.get("content-length") ?? "0";
  const isShort = /^\d{1,5}$/.test(length) && Number(length) <= MAX.strangerBodyBytes;
  context.endsConnection = !isShort || isChunked(headers);
  return context.endsConnection ? undefined : turnOf(STRANGERS);
}

/** A `turnOf` for known callers. @throws Fault `unavailable` to all but few chunked requests, which the runtime parses meanwhile */
function createTurns() {
  const waiting = createFairShare({ size: MAX.chunkedWaiting });
  return (context: RequestContext): Promise<void> | undefined => {
    const { owner, original } = context;
    if (!isChunked(original.headers) || !isTurnUsedUp()) return turnOf(owner);
    context.endsConnection = waiting.take(owner) !== null;
    if (context.endsConnection) throw new Fault("unavailable", "too many chunked bodies", { retryAfterSeconds: 5 });
    return turnOf(owner)?.finally(() => waiting.giveBack(owner));
  };
}

/** @param mayTell whether another log line may be written for an unknown caller; counts the line */
function failed(error: unknown, { fields, owner }: RequestContext, log: Log, mayTell: () => boolean): Response {
  const fault = error instanceof Fault ? error : new Fault("internal", "unexpected", { cause: error });
  // The cause has a message of ours, which quotes nothing from the token.
  if (fault.kind === "unauthenticated" && fault.cause instanceof Error) fields["why"] = fault.cause.message;
  if (fault.kind === "internal") log.error("request_failed", { ...fields, error: fault });
  if (fault.kind === "unavailable" && fault.cause !== undefined && (owner !== STRANGERS || mayTell())) {
    log.warn("request_refused", { ...fields, error: fault });
  }
  return faultResponse(fault);
}

const PATH_CHARACTERS_MAX = 256;

/** A path as the log shows it, truncated: no route of ours is longer. */
export const shownPath = (path: string): string =>
  path.length <= PATH_CHARACTERS_MAX ? path : `${path.slice(0, PATH_CHARACTERS_MAX)}…`;

/** Logs each request of known callers, and a few of unknown ones in a second: the others of that second are summed up in a line. */
export function createAccessLog(log: Log) {
  /** Requests of unknown callers in the current second, which begins with the first request. */
  let strangers = 0;

  function sumUp(): void {
    const more = strangers - MAX.strangerLines;
    strangers = 0;
    if (more > 0) log.info("unauthenticated_requests", { count: more });
  }

  /** Whether an unknown caller may cause another line; counts the line. */
  function mayTell(): boolean {
    if (strangers++ === 0) setTimeout(sumUp, 1_000).unref();
    return strangers <= MAX.strangerLines;
  }

  return {
    mayTell,
    /** A request to an open path. */
    open: (fields: LogFields): void => log.debug("request", fields),
    known: (fields: LogFields): void => log.info("request", fields),
    stranger(fields: LogFields): void {
      if (mayTell()) log.info("request", fields);
    },
  };
}

/** What a request's span says of its route. Requests of unknown callers have no span, so that they can't use up the budget. */
export type TracedRoute = Pick<SpanFields, "agentId"> & { readonly route: string };

const CALL_PATH = /^\/v1\/proxy\/([^/]+)(\/stream)?$/;
const [CALL_METHODS, STREAM_METHODS] = [["POST"], ["POST", "GET", "DELETE"]];
const AGENT_ID = /^agt_[0-9a-f-]{36}$/;

/** Calls of agents have spans. Other requests, polls above all, would only use up their tenant's share of the spans. */
function tracedCall(method: string, path: string): TracedRoute | null {
  const [, id, stream = ""] = CALL_PATH.exec(path) ?? [];
  if (id === undefined || !(stream === "" ? CALL_METHODS : STREAM_METHODS).includes(method)) return null;
  return { route: `/v1/proxy/{id}${stream}`, ...(AGENT_ID.test(id) && { agentId: id }) };
}

/** Begins a request's span, and names it as the parent in the request's headers, with which it is then forwarded. */
function beginSpan(
  tracer: Tracer,
  { route, agentId }: TracedRoute,
  { headers }: Request,
  { original: { method }, startedAt }: RequestContext,
  [field, name]: ShownCaller,
): Span {
  const span = tracer.begin({
    kind: "server",
    name: `${method} ${route}`,
    parent: namedIn(headers),
    payer: name,
    startedAt,
    fields: { method, route, [field]: name, ...(agentId !== undefined && { agentId }) },
  });
  nameIn(headers, span);
  return span;
}

/** @param fields the fields of the access log */
function endSpan(span: Span, status: number, { invocation_id: invocationId }: Fields): void {
  const failed = status >= 500 && { errorType: `${status}` };
  span.end({ status, ...(typeof invocationId === "string" && { invocationId }), ...failed });
}
