// The HTTP edge of both services: it numbers every request, lets only known callers at what is guarded, turns every
// Fault into an answer, and writes the access log. Routes themselves only know Faults.

import type { Caller } from "../core/call.ts";
import { Fault } from "../core/fault.ts";
import type { Log, LogFields } from "../core/log.ts";
import { type Meters, silentMeters } from "../core/meters.ts";
import { namedIn, nameIn, type Span, type Tracer } from "../core/tracing.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairShare } from "../kernel/share.ts";
import { actFor, isTurnUsedUp, turnOf } from "../kernel/turns.ts";
import { createRouter, type RoutedApp } from "./elysia.ts";
import { createBodyDrainer, declaredLength, Intake, inChunks } from "./intake.ts";
import { createLargeResponses, faultResponse, type LargeResponses } from "./responses.ts";

/** What the edge knows of a guarded request, beside the request itself. */
export interface Scope<C = Caller> {
  readonly requestId: string;
  readonly caller: C;
  /** As it was sent: HEAD is routed as GET. */
  readonly method: string;
  /**
   * Whether the connection stays open however long it is silent. The server would keep it open for ever, also for later
   * requests on it, so who sets this clears it again before the answer ends.
   */
  holdOpen(held: boolean): void;
  /** Adds fields to the request's line in the access log. */
  note(name: string, value: string): void;
  /** Null where the request is not traced. */
  readonly span: Span | null;
  /** What takes in the bodies of all requests. */
  readonly intake: Intake;
  /** What sends the large responses of all requests. */
  readonly responses: LargeResponses;
}

const SCOPE = Symbol("scope");

type ScopedRequest<C> = Request & { [SCOPE]?: Scope<C> };

/** The scope of a guarded request, which always has one. */
export function scopeOf<C = Caller>(request: Request): Scope<C> {
  const scope = (request as ScopedRequest<C>)[SCOPE];
  if (scope === undefined) throw new Fault("internal", "a request without a scope");
  return scope;
}

/** Which callers may use which paths. */
export interface Guard<C> {
  /** Whether the path is for known callers only. Their requests have a line each in the access log. */
  covers(path: string): boolean;
  /** @throws Fault when the caller is not known */
  identify(request: Request, path: string): C | Promise<C>;
  /** Checked before anything else of the request. @throws Fault when this caller may not make it */
  permit?(caller: C, method: string, path: string): void;
  /** The field that names the caller in the access log. */
  shown(caller: C): SpanStart["caller"];
  /** Null for a request that is to have no span. */
  traced(method: string, path: string): TracedRoute | null;
}

/**
 * The route that most requests take. They go to it from the edge at once, which spares them the router, its context and
 * the look-up of their scope: 7 of the 59 µs that a call of an agent costs the main thread beside the store's write
 * (Elysia 1.4.30, median of 16 measurements by turns). The app has the same route: it describes it, and answers requests
 * whose path is written in any other way.
 */
export interface FastPath<C = Caller> {
  readonly method: string;
  /** Of the path, before its one parameter. */
  readonly prefix: string;
  /** Answers, and throws, as the route of the app does. */
  answer(request: Request, scope: Scope<C>, parameter: string): Response | Promise<Response>;
}

export interface GuardedEdgeOptions<C> {
  readonly app: RoutedApp;
  readonly fastPath?: FastPath<C>;
  readonly log: Log;
  readonly meters?: Pick<Meters, "requestsTo">;
  /** Null when everything is open. */
  readonly guard: Guard<C> | null;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
}

export interface EdgeOptions extends Omit<GuardedEdgeOptions<Caller>, "guard"> {
  /** @param path of the request: what a token is for, and what a refusal names, may hang on it */
  authenticate(authorization: string | null, path: string): Caller | Promise<Caller>;
  permit?: Guard<Caller>["permit"];
}

export type Edge = ReturnType<typeof createGuardedEdge>;

const REQUEST_ID = new RegExp(`^[A-Za-z0-9._-]{1,${MAX.requestIdCharacters}}$`);

/** The gateway's: everything under /v1 needs a bearer token. */
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

  /** What is known of the request from now on. */
  function enter(known: Guard<C>, context: RequestContext, request: Request, caller: C): Scope<C> {
    const { original, requestId, startedAt, fields, holdOpen } = context;
    const { method } = original;
    const [field, shown] = known.shown(caller);
    context.identified(original, shown);
    fields[field] = shown;
    context.known = shown;
    const traced = tracer === null ? null : known.traced(request.method, context.path);
    if (tracer !== null && traced !== null) {
      context.span = beginSpan(tracer, traced, request, { method, startedAt, caller: [field, shown] });
      fields["trace_id"] = context.span.traceId;
    }
    const note = noteIn(fields);
    return { requestId, caller, method, holdOpen, note, span: context.span, intake, responses };
  }

  function toRoute(request: Request, { known, path }: RequestContext, scope: Scope<C>): Response | Promise<Response> {
    guard?.permit?.(scope.caller, scope.method, path);
    const fast = onFastPath(fastPath, request, path);
    if (fast !== null) return actFor(known, () => fast(scope));
    (request as ScopedRequest<C>)[SCOPE] = scope;
    return actFor(known, () => route(request, path));
  }

  function inTurn(known: Guard<C>, context: RequestContext, request: Request, caller: C): Response | Promise<Response> {
    const scope = enter(known, context, request, caller);
    const turn = turnOfKnown(context);
    return turn === undefined ? toRoute(request, context, scope) : turn.then(() => toRoute(request, context, scope));
  }

  /** No promise is made where the caller is known already, its turn has come, and the route answers at once. */
  function respond(request: Request, context: RequestContext): Response | Promise<Response> {
    const { original, path } = context;
    if (draining) throw new Fault("unavailable", "the service is shutting down", { retryAfterSeconds: 5 });
    checkFraming(original.headers);
    if (!guard?.covers(path)) {
      const toOpenRoute = () => actFor(STRANGERS, () => route(request, path));
      return turnOfStranger(context)?.then(toOpenRoute) ?? toOpenRoute();
    }
    const identified = guard.identify(original, path);
    if (!(identified instanceof Promise)) return inTurn(guard, context, request, identified);
    return identified.then((caller) => inTurn(guard, context, request, caller));
  }

  /** A line in the log, the end of its span, and its count. */
  function tell({ path, startedAt, fields, known, span }: RequestContext, status: number): void {
    const ms = performance.now() - startedAt;
    fields["status"] = status;
    fields["ms"] = Math.round(ms * 10) / 10;
    counted(path, status, ms);
    if (span !== null) endSpan(span, status, fields);
    if (!guard?.covers(path)) accessLog.open(fields);
    else (known === STRANGERS ? accessLog.stranger : accessLog.known)(fields);
  }

  return {
    /**
     * The server leaves the body of an answer to HEAD out, and its length, where it has one, in.
     *
     * @param holdOpen as in the request's scope
     * @param identified is told whose request it is, once that is known
     */
    async fetch(original: Request, holdOpen: HoldOpen = nothing, identified: Identified = nothing): Promise<Response> {
      const startedAt = performance.now();
      const { request, path } = withRoutableUrl(original);
      const sentId = request.headers.get("x-request-id");
      const requestId = sentId !== null && REQUEST_ID.test(sentId) ? sentId : crypto.randomUUID();
      const fields: Fields = { method: original.method, path: shownPath(path), request_id: requestId };
      const unknown = { identified, known: STRANGERS, span: null, endsConnection: false };
      const context: RequestContext = { original, path, requestId, startedAt, fields, holdOpen, ...unknown };
      let response: Response;
      try {
        const responding = respond(request, context);
        response = responding instanceof Promise ? await responding : responding;
      } catch (error) {
        // The runtime would answer a connection full of refusals in one turn of the event loop.
        if (context.known === STRANGERS) await turnOfStranger(context);
        response = failed(error, context, { log: options.log, mayTell: accessLog.mayTell });
      }
      mark(response, context, draining);
      tell(context, response.status);
      const drained = context.endsConnection ? undefined : drainBody(request, response, context.known);
      if (drained !== undefined) await drained;
      return response;
    },
    /** How much of the bounds of a server is in use. */
    inUse: () => ({ bodyIntakeBytes: intake.inUse, responseBytes: responses.inUse() }),
    /** From now on every request is answered 503. */
    drain(): void {
      draining = true;
    },
  };
}

/**
 * Elysia looks for the path after the 11th character of the URL and so misreads one with a shorter host, and
 * it knows no HEAD. Both get a request that it routes right; the scope is keyed by that request. A Host header
 * that makes no URL leaves the bare path as the request's URL. A new URL is written in its normal form (`\` is `/`, and `..` goes up),
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

/**
 * What decides where a request ends, and to whom it goes, must be said once (RFC 9112, sections 3.2 and 6.3).
 *
 * @throws Fault `invalid_request`
 */
function checkFraming(headers: Headers): void {
  declaredLength(headers);
  // The runtime joins the two by a comma and a space, and no host holds a space.
  if (headers.get("host")?.includes(" ")) throw new Fault("invalid_request", "host: must be sent once");
}

/** A segment of which every spelling is itself, so that no router could read it otherwise. */
const PLAIN_SEGMENT = /^[\w-]+$/;

/** Null for a request that is not of the fast path, or not plain. */
function onFastPath<C>(fastPath: FastPath<C> | undefined, request: Request, path: string) {
  if (fastPath === undefined || request.method !== fastPath.method || !path.startsWith(fastPath.prefix)) return null;
  const rest = path.slice(fastPath.prefix.length);
  return PLAIN_SEGMENT.test(rest) ? (scope: Scope<C>) => fastPath.answer(request, scope, rest) : null;
}

/** Stands for all unknown callers where others are told apart by tenant. No tenant has this name. */
export const STRANGERS = "";

type HoldOpen = Scope<never>["holdOpen"];
type Identified = (request: Request, known: string) => void;

/** For servers that close no silent connection, and don't ask whose connections they have. */
const nothing = () => {};

/** The fields of a request's line in the log, which one object gathers while the request is answered. */
type Fields = Record<string, string | number>;

const noteIn = (fields: Fields) => (name: string, value: string) => {
  fields[name] = value;
};

interface RequestContext {
  /** The request object that the server gave; callers of the edge may know it by that. */
  readonly original: Request;
  readonly path: string;
  readonly requestId: string;
  /** Of performance.now(). */
  readonly startedAt: number;
  readonly fields: Fields;
  readonly holdOpen: HoldOpen;
  readonly identified: Identified;
  /** Whose request it is, as far as that is known yet. */
  known: string;
  /** Null where it is not traced. */
  span: Span | null;
  /** Whether the connection ends with the answer, whatever is still to come of the request. */
  endsConnection: boolean;
}

function mark(response: Response, { requestId, endsConnection }: RequestContext, draining: boolean): void {
  response.headers.set("x-request-id", requestId);
  if (draining || endsConnection) response.headers.set("connection", "close");
}

/**
 * Undefined when a stranger's request may be answered at once. One that has much of a body never waits, since the runtime
 * would keep what arrives of it: 600 connections with a megabyte each took gigabytes. Its connection ends with the answer,
 * or one connection full of such requests would keep the event loop.
 */
function turnOfStranger(context: RequestContext): Promise<void> | undefined {
  if (!isTurnUsedUp()) return undefined;
  const { headers } = context.original;
  const length = headers.get("content-length") ?? "0";
  const isShort = /^\d{1,5}$/.test(length) && Number(length) <= MAX.strangerBodyBytes;
  context.endsConnection = !isShort || inChunks(headers);
  return context.endsConnection ? undefined : turnOf(STRANGERS);
}

/** The turns of known callers, as `turnOf`. Few wait with bodies in chunks, which the runtime parses meanwhile. @throws Fault `unavailable`; then the connection ends */
function createTurns() {
  const waiting = createFairShare({ size: MAX.chunkedWaiting });
  return (context: RequestContext): Promise<void> | undefined => {
    const { known, original } = context;
    if (!inChunks(original.headers) || !isTurnUsedUp()) return turnOf(known);
    context.endsConnection = waiting.take(known) !== null;
    if (context.endsConnection) throw new Fault("unavailable", "too many bodies in chunks", { retryAfterSeconds: 5 });
    return turnOf(known)?.finally(() => waiting.giveBack(known));
  };
}

/** @param mayTell whether a stranger's request may have another log line */
function failed(
  error: unknown,
  { fields, known }: RequestContext,
  { log, mayTell }: { readonly log: Log; readonly mayTell: () => boolean },
): Response {
  const fault = error instanceof Fault ? error : new Fault("internal", "unexpected", { cause: error });
  // The reason is in words of ours, and says nothing of what the token holds.
  if (fault.kind === "unauthenticated" && fault.cause instanceof Error) fields["why"] = fault.cause.message;
  if (fault.kind === "internal") log.error("request_failed", { ...fields, error: fault });
  if (fault.kind === "unavailable" && fault.cause !== undefined && (known !== STRANGERS || mayTell())) {
    log.warn("request_refused", { ...fields, error: fault });
  }
  return faultResponse(fault);
}

const PATH_CHARACTERS_MAX = 256;

/** A path as the log shows it. Longer ones are none of our routes. */
export function shownPath(path: string): string {
  return path.length <= PATH_CHARACTERS_MAX ? path : `${path.slice(0, PATH_CHARACTERS_MAX)}…`;
}

/**
 * One line of the log for each request of a known caller. Strangers can't flood it: a few of their requests in a second
 * have a line each, and the others are summed up in one.
 */
export function createAccessLog(log: Log) {
  /** Requests of strangers in the current second, which begins with the first of them. */
  let strangers = 0;

  function sumUp(): void {
    const more = strangers - MAX.strangerLines;
    strangers = 0;
    if (more > 0) log.info("unauthenticated_requests", { count: more });
  }

  /** Whether another line may be caused by a stranger; counts it. */
  function mayTell(): boolean {
    if (strangers++ === 0) setTimeout(sumUp, 1_000).unref();
    return strangers <= MAX.strangerLines;
  }

  return {
    mayTell,
    /** Of a request to an open path. */
    open: (fields: LogFields): void => log.debug("request", fields),
    known: (fields: LogFields): void => log.info("request", fields),
    /** A request of an unknown caller. */
    stranger(fields: LogFields): void {
      if (mayTell()) log.info("request", fields);
    },
  };
}

/** A request that is to have a span. Strangers have none, so that nobody else can use up what is recorded. */
export interface TracedRoute {
  readonly route: string;
  /** In its path. */
  readonly agentId?: string;
}

export interface SpanStart {
  readonly method: string;
  /** Of performance.now(). */
  readonly startedAt: number;
  /** The caller as the access log shows it. */
  readonly caller: readonly [field: "tenant" | "account", name: string];
}

const CALL_PATH = /^\/v1\/proxy\/([^/]+)(\/stream)?$/;
const [CALL_METHODS, STREAM_METHODS] = [["POST"], ["POST", "GET", "DELETE"]];
const AGENT_ID = /^agt_[0-9a-f-]{36}$/;
const FAILED_FROM = 500;

/** Calls of agents have spans. Other requests would only use up the share of their tenant, polls above all. */
function tracedCall(method: string, path: string): TracedRoute | null {
  const [, id, stream = ""] = CALL_PATH.exec(path) ?? [];
  if (id === undefined || !(stream === "" ? CALL_METHODS : STREAM_METHODS).includes(method)) return null;
  return { route: `/v1/proxy/{id}${stream}`, ...(AGENT_ID.test(id) && { agentId: id }) };
}

/** From here on the request names this span as the parent, so to pass its headers on is to pass that on. */
function beginSpan(
  tracer: Tracer,
  { route, agentId }: TracedRoute,
  { headers }: Request,
  { method, startedAt, caller: [field, name] }: SpanStart,
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

/** @param fields those of the access log */
function endSpan(span: Span, status: number, fields: Readonly<Record<string, string | number>>): void {
  const { invocation_id: invocationId } = fields;
  span.end({
    status,
    ...(typeof invocationId === "string" && { invocationId }),
    ...(status >= FAILED_FROM && { errorType: `${status}` }),
  });
}
