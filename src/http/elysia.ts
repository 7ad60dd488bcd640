// The router, and the workarounds for it. Elysia answers with an error's own message and does not distinguish an unknown path
// from a wrong method; both are put right here. It also misreads the path of a URL with a short host and knows no HEAD: see
// withRoutableUrl in server.ts.
import { Elysia, NotFoundError } from "elysia";
import { attempt, Fault, methodNotAllowed } from "../core/fault.ts";
import { suggest } from "../core/text.ts";
import { MAX } from "../kernel/limits.ts";
import { STATUS } from "./responses.ts";

/** Carries what a route threw past Elysia, which would answer with the error's own message. */
const THROWN = Symbol("thrown");

type RoutedRequest = Request & { [THROWN]?: { readonly error: unknown } };

/** An Elysia instance with exact paths that leaves bodies and queries alone: routes read both through http/input.ts. */
export function routes() {
  return new Elysia({ strictPath: true, normalize: false }).onError({ as: "global" }, ({ error, request }) => {
    (request as RoutedRequest)[THROWN] = { error };
    return new Response(null, { status: STATUS.internal });
  });
}

type RouteShape = Readonly<Record<"method" | "path", string>>;

export interface RoutedApp {
  fetch(request: Request): Response | Promise<Response>;
  readonly routes: readonly RouteShape[];
}

/** Makes the refusal that is answered in place of the router's own. */
export type Missing = (refusal: Fault, request: Request, path: string) => Promise<Fault>;

export function createRouter(app: RoutedApp) {
  const table = app.routes.map(({ method, path }) => ({ method, path, pattern: pathPattern(path) }));
  /**
   * Passes a request to its route. `path` is the one that the guard has judged; `missing` makes the refusal of one without a route.
   * @throws at once or as rejection: what the route throws; Fault `not_found` or `method_not_allowed` if there is no route
   */
  return (request: Request, path: string, missing?: Missing): Response | Promise<Response> => {
    if (path.length > MAX.pathCharacters || !isDecodable(path)) throw noSuchRoute();
    const rethrown = (response: Response): Response | Promise<Response> => {
      const thrown = (request as RoutedRequest)[THROWN];
      if (thrown === undefined) return response;
      const { error } = thrown;
      if (!(error instanceof NotFoundError)) throw error;
      const refusal = unknownRoute(table, request.method, path);
      if (missing === undefined || refusal.kind !== "not_found") throw refusal;
      return missing(refusal, request, path).then((fault) => Promise.reject(fault));
    };
    const response = app.fetch(request);
    // The response of a synchronous route is returned without a promise.
    return response instanceof Promise ? response.then(rethrown) : rethrown(response);
  };
}

type RoutePattern = RouteShape & { readonly pattern: RegExp };

/** A route's path as a pattern: `:name` matches one segment, a final `*` the rest. */
export function pathPattern(path: string): RegExp {
  const patternOf = (segment: string) =>
    segment === "*" ? ".*" : segment.startsWith(":") ? "[^/]+" : RegExp.escape(segment);
  return new RegExp(`^${path.split("/").map(patternOf).join("/")}$`);
}

/** The prefix of the API's routes, which callers forget. */
const API = "/v1";

function noSuchRoute(table: readonly RoutePattern[] = [], path = ""): Fault {
  const few = table.length <= 4 ? table.map((route) => `${route.method} ${route.path}`) : [];
  const start = table.some((route) => route.path === "/") ? "; GET / says where to go on" : "";
  const all = few.length === 0 ? start : `; known here: ${few.join(", ")}`;
  const meant = meantRoute(table, path);
  if (meant === null) return new Fault("not_found", `no such route${all}`);
  const hint = meant.startsWith(API) && !path.startsWith(API) ? ` The API's routes begin with ${API}` : "";
  return new Fault("not_found", `no such route; did you mean ${meant.replaceAll(/:(\w+)/g, "{$1}")}?${hint}`);
}

/** The route that a path is near to, or that the prefix makes of it, or the shortest one that has its last word. */
function meantRoute(table: readonly RoutePattern[], path: string): string | null {
  const known = table.filter((route) => !route.path.includes("*"));
  const paths = known.map((route) => route.path);
  const fixed = paths.filter((each) => !each.includes(":"));
  const near = suggest(path, fixed);
  if (near !== null) return near;
  const prefixed = known.find(({ pattern }) => pattern.test(`${API}${path}`));
  if (prefixed !== undefined) return prefixed.path;
  const wordsOf = (each: string): readonly string[] => each.match(/\w{3,}/g) ?? [];
  const [typed = ""] = wordsOf(path.replace(/\.\w+$/, "")).slice(-1);
  const word = suggest(typed, new Set(paths.flatMap(wordsOf)));
  const having = word === null ? [] : paths.filter((each) => wordsOf(each).includes(word));
  return having.sort((a, b) => a.length - b.length)[0] ?? null;
}

/** The Fault for a request without a route: Elysia does not tell whether the path exists for another method. */
function unknownRoute(table: readonly RoutePattern[], method: string, path: string): Fault {
  const allow = table.filter(({ pattern }) => pattern.test(path)).map((route) => route.method);
  if (allow.includes("GET")) allow.push("HEAD");
  if (allow.length === 0 || allow.includes(method)) return noSuchRoute(table, path);
  return methodNotAllowed(allow);
}

/** Whether the path is percent-encoded UTF-8. From any other path Elysia would give routes null as a parameter. */
const isDecodable = (path: string): boolean =>
  !path.includes("%") || attempt(() => decodeURIComponent(path)) !== undefined;
