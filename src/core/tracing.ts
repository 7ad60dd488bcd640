// The traces' port: spans are begun and ended through it, and it says all that a span may hold, so that nothing else can
// get into one. Where traces are off there is no tracer (null), and nothing is done for them.

/** Headers as they are sent, names in lower case. */
type HeaderPairs = ReadonlyArray<readonly [name: string, value: string]>;

export interface SpanFields {
  readonly method?: string;
  readonly status?: number;
  /** A path with names in the place of its parameters. */
  readonly route?: string;
  /** The host that is called, without anything else of its URL. */
  readonly host?: string;
  readonly tenant?: string;
  /** At the facilitator. */
  readonly account?: string;
  readonly agentId?: string;
  readonly invocationId?: string;
  /** Of a settlement. */
  readonly attempt?: number;
  readonly outcome?: string;
  readonly rpcMethod?: string;
  /** The node's place in the list. Its URL may hold a key. */
  readonly rpcEndpoint?: number;
  /** A word that tells failures apart. It marks the span as failed. */
  readonly errorType?: string;
}

export interface NewSpan {
  readonly kind: "server" | "client" | "internal";
  /** One of few. */
  readonly name: string;
  /** What it is a part of: a span of this process, or one that headers name. Null begins a trace. */
  readonly parent: Span | HeaderPairs | null;
  /** Whose share of the spans it takes, unless its parent has been recorded. */
  readonly payer: string;
  /** Of performance.now(); now when it is left out. */
  readonly startedAt?: number;
  readonly fields: SpanFields;
}

export interface Span {
  readonly traceId: string;
  /** The headers that name it as the parent, `tracestate` only where there is one. */
  readonly headers: HeaderPairs;
  set(fields: SpanFields): void;
  /** Once. */
  end(fields?: SpanFields): void;
}

export interface Tracer {
  begin(span: NewSpan): Span;
  /** Does the work so that `current` gives this span within it, asynchronous parts included, if it is recorded. */
  during<T>(span: Span, work: () => T): T;
  /** The span within which this runs, until it ends. */
  current(): Span | null;
}

const NAMES = new Set(["traceparent", "tracestate"]);

/** The headers, with this span named in the place of whatever they name. */
export function naming(span: Span, headers: HeaderPairs): HeaderPairs {
  return [...headers.filter(([name]) => !NAMES.has(name)), ...span.headers];
}

/** Sets the fields of a trace in headers that are changed in place. */
export function nameIn(headers: Headers, span: Span): void {
  for (const name of NAMES) headers.delete(name);
  for (const [name, value] of span.headers) headers.set(name, value);
}

export function namedIn(headers: Headers): HeaderPairs {
  return [...NAMES].flatMap((name) => {
    const value = headers.get(name);
    return value === null ? [] : [[name, value] as const];
  });
}

/** Does the work as a part of the current span, in a span of its own. Without a current one, it is just done. */
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

// How traces are switched on and sent: the configuration, as far as it is theirs.

export const SAMPLERS = [
  "always_on",
  "always_off",
  "traceidratio",
  "parentbased_always_on",
  "parentbased_always_off",
  "parentbased_traceidratio",
] as const;
export type SamplerName = (typeof SAMPLERS)[number];

export interface TracingOptions {
  /** The collector's base URL. */
  readonly endpoint: string;
  /** Of each request to it; they may hold a key. */
  readonly headers: HeaderPairs;
  /** Null for the service's own name. */
  readonly serviceName: string | null;
  readonly resource: HeaderPairs;
  readonly sampler: SamplerName;
  /** Of the samplers by ratio: from 0 to 1. */
  readonly ratio: number;
  /** The most that are recorded, whatever the sampler says. */
  readonly tracesPerSecond: number;
  /** PEM of extra trusted roots. */
  readonly extraCa: string | null;
}
