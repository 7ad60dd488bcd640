// The interface of tracing; src/tracing records and exports the spans. It lists all that a span may hold, so that nothing else
// can get into one. Where traces are off the tracer is null, and tracing costs nothing.

/** HTTP headers, names in lower case. */
type HeaderPairs = ReadonlyArray<readonly [name: string, value: string]>;

export interface SpanFields {
  readonly method?: string;
  readonly status?: number;
  /** The route's pattern: a path with names in place of its parameters. */
  readonly route?: string;
  /** The host that is called, without the rest of its URL. */
  readonly host?: string;
  readonly tenant?: string;
  /** The facilitator's account. */
  readonly account?: string;
  readonly agentId?: string;
  readonly invocationId?: string;
  /** Number of the attempt at a settlement. */
  readonly attempt?: number;
  readonly outcome?: string;
  readonly rpcMethod?: string;
  /** The node's index in the list, not its URL, which may hold a key. */
  readonly rpcEndpoint?: number;
  /** A word for the kind of failure (`error.type`). It marks the span as failed. */
  readonly errorType?: string;
}

export interface NewSpan {
  readonly kind: "server" | "client" | "internal";
  /** One of a few fixed names. */
  readonly name: string;
  /** The parent: a span of this process, or headers that name one. Null begins a trace. */
  readonly parent: Span | HeaderPairs | null;
  /** The tenant or account whose share of the recorded traces the span uses, unless its parent is recorded already. */
  readonly payer: string;
  /** By performance.now(); the current time when omitted. */
  readonly startedAt?: number;
  readonly fields: SpanFields;
}

export interface Span {
  readonly traceId: string;
  /** The headers that name this span as the parent; `tracestate` only where there is one. */
  readonly headers: HeaderPairs;
  set(fields: SpanFields): void;
  /** Called exactly once. */
  end(fields?: SpanFields): void;
}

export interface Tracer {
  begin(span: NewSpan): Span;
  /** Runs `work` with the span, if it is recorded, as the current one, asynchronous parts included. */
  during<T>(span: Span, work: () => T): T;
  /** The current span; null outside of one and after it has ended. */
  current(): Span | null;
}

const TRACE_HEADERS = new Set(["traceparent", "tracestate"]);

/** A copy of the headers in which this span is the parent. */
export function naming(span: Span, headers: HeaderPairs): HeaderPairs {
  return [...headers.filter(([name]) => !TRACE_HEADERS.has(name)), ...span.headers];
}

/** Changes the headers in place so that this span is the parent. */
export function nameIn(headers: Headers, span: Span): void {
  for (const name of TRACE_HEADERS) headers.delete(name);
  for (const [name, value] of span.headers) headers.set(name, value);
}

export function namedIn(headers: Headers): HeaderPairs {
  return [...TRACE_HEADERS].flatMap((name) => {
    const value = headers.get(name);
    return value === null ? [] : [[name, value] as const];
  });
}

/** Runs `work` in a child of the current span, or without a span where there is no current one. */
export async function inSpan<T>(
  tracer: Tracer | null,
  { kind, name, fields = {} }: Pick<NewSpan, "kind" | "name"> & { readonly fields?: SpanFields },
  work: () => Promise<T>,
): Promise<T> {
  const parent = tracer?.current() ?? null;
  if (tracer === null || parent === null) return work();
  const span = tracer.begin({ kind, name, parent, payer: "", fields });
  try {
    const result = await tracer.during(span, work);
    span.end();
    return result;
  } catch (error) {
    span.end({ errorType: error instanceof Error ? error.name : "error" });
    throw error;
  }
}

// The part of the configuration that says whether traces are recorded, and where they are sent.

export const SAMPLERS = [
  "always_on",
  "always_off",
  "traceidratio",
  "parentbased_always_on",
  "parentbased_always_off",
  "parentbased_traceidratio",
] as const;

export interface TracingOptions {
  /** The collector's base URL. */
  readonly endpoint: string;
  /** Sent with each request to the collector; they may hold a key. */
  readonly headers: HeaderPairs;
  /** Null for the service's own name. */
  readonly serviceName: string | null;
  readonly resource: HeaderPairs;
  readonly sampler: (typeof SAMPLERS)[number];
  /** From 0 to 1; for the samplers by ratio. */
  readonly ratio: number;
  /** The most traces that are recorded, whatever the sampler says. */
  readonly tracesPerSecond: number;
  /** Extra trusted root certificates, as PEM. */
  readonly extraCa: string | null;
}
