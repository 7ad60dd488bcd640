// The router, with the work-arounds for it in one place. Elysia reads the path of a URL wrongly if the host is short, knows
// no HEAD, answers with an error's own message, and does not tell an unknown path from a wrong method.
import { Elysia, NotFoundError } from "elysia";
import { Fault, methodNotAllowed } from "../core/fault.ts";
import { STATUS } from "./responses.ts";

/** What a route threw, on its way past Elysia, which would answer with the error's own message. */
const THROWN = Symbol("thrown");

type RoutedRequest = Request & { [THROWN]?: { readonly error: unknown } };

/**
 * An Elysia instance as the product wants it: exact paths, and nothing done to bodies and queries behind the
 * routes' backs. Routes read both through http/input.ts.
 */
export function routes() {
  return new Elysia({ strictPath: true, normalize: false }).onError({ as: "global" }, ({ error, request }) => {
    (request as RoutedRequest)[THROWN] = { error };
    return new Response(null, { status: STATUS.internal });
  });
}

interface RouteShape {
  readonly method: string;
  readonly path: string;
}

export interface RoutedApp {
  fetch(request: Request): Response | Promise<Response>;
  readonly routes: readonly RouteShape[];
}

export function createRouter(app: RoutedApp) {
  const table = app.routes.map(({ method, path }) => ({ method, pattern: pathPattern(path) }));
  /**
   * Passes a request, whose path is the one that was judged, to its route.
   *
   * @throws at once or as rejection: what the route throws; Fault `not_found` and `method_not_allowed` where there is none
   */
  return (request: Request, path: string): Response | Promise<Response> => {
    if (!isDecodable(path)) throw noSuchRoute();
    const judged = (response: Response): Response => {
      const thrown = (request as RoutedRequest)[THROWN];
      if (thrown === undefined) return response;
      const { error } = thrown;
      throw error instanceof NotFoundError ? unknownRoute(table, request.method, path) : error;
    };
    const response = app.fetch(request);
    // A route that waits for nothing is answered without a promise.
    return response instanceof Promise ? response.then(judged) : judged(response);
  };
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

/** For a request without a route: Elysia does not tell whether another method has one. */
function unknownRoute(table: readonly RoutePattern[], method: string, path: string): Fault {
  const allow = table.filter(({ pattern }) => pattern.test(path)).map((route) => route.method);
  if (allow.length === 0 || allow.includes(method)) return noSuchRoute();
  if (allow.includes("GET")) allow.push("HEAD");
  return methodNotAllowed(allow);
}

/** A path that is no percent-encoded UTF-8 names nothing, and Elysia would give routes null for its parameters. */
function isDecodable(path: string): boolean {
  if (!path.includes("%")) return true;
  try {
    decodeURIComponent(path);
    return true;
  } catch {
    return false;
  }
}
