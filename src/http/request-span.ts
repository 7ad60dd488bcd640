// The span of a request that a known caller makes. Strangers have none, so that nobody else can use up what is recorded.
import { namedIn, nameIn, type Span, type Tracer } from "../core/tracing.ts";

/** A request that is to have a span. */
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
export function tracedCall(method: string, path: string): TracedRoute | null {
  const [, id, stream = ""] = CALL_PATH.exec(path) ?? [];
  if (id === undefined || !(stream === "" ? CALL_METHODS : STREAM_METHODS).includes(method)) return null;
  return { route: `/v1/proxy/{id}${stream}`, ...(AGENT_ID.test(id) && { agentId: id }) };
}

/** From here on the request names this span as the parent, so whoever passes its headers on passes that. */
export function beginSpan(
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
export function endSpan(span: Span, status: number, fields: Readonly<Record<string, string | number>>): void {
  const { invocation_id: invocationId } = fields;
  span.end({
    status,
    ...(typeof invocationId === "string" && { invocationId }),
    ...(status >= FAILED_FROM && { errorType: `${status}` }),
  });
}
