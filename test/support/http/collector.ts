// A collector of traces on a free loopback port. It decodes what it gets (OTLP over HTTP, protobuf) by the code that
// OpenTelemetry generates from its own definitions, in a release of theirs that still decoded.
import root from "otlp-decoder/build/src/generated/root.js";

const { ExportTraceServiceRequest } = root.opentelemetry.proto.collector.trace.v1;

export interface CollectedSpan {
  /** service.name of its resource. */
  readonly service: string;
  readonly name: string;
  readonly kind: "SERVER" | "CLIENT" | "INTERNAL";
  readonly traceId: string;
  readonly spanId: string;
  /** Empty where it has none. */
  readonly parentSpanId: string;
  readonly traceState: string;
  readonly attributes: Readonly<Record<string, string | number>>;
  readonly isError: boolean;
  readonly startMs: number;
  readonly durationMs: number;
}

export interface Collector extends AsyncDisposable {
  readonly url: string;
  readonly spans: CollectedSpan[];
  /** Requests so far. */
  readonly requests: { readonly headers: Headers; readonly bytes: Uint8Array }[];
  /** Resolves with the first span that fits, one that has come already too. */
  span(fits: (span: CollectedSpan) => boolean): Promise<CollectedSpan>;
  /** Resolves at the next request. */
  next(): Promise<void>;
  /** What it answers from now on. */
  answer(by: () => Response | Promise<Response>): void;
}

interface Value {
  readonly stringValue?: string;
  readonly intValue?: string;
  readonly doubleValue?: number;
}

interface DecodedRequest {
  readonly resourceSpans?: readonly {
    readonly resource?: { readonly attributes?: readonly Attribute[] };
    readonly scopeSpans?: readonly { readonly spans?: readonly DecodedSpan[] }[];
  }[];
}

interface Attribute {
  readonly key: string;
  readonly value: Value;
}

interface DecodedSpan {
  readonly name: string;
  readonly kind: string;
  readonly traceId: Uint8Array;
  readonly spanId: Uint8Array;
  readonly parentSpanId?: Uint8Array;
  readonly traceState?: string;
  readonly attributes?: readonly Attribute[];
  readonly status?: { readonly code?: string };
  readonly startTimeUnixNano: string;
  readonly endTimeUnixNano: string;
}

const NANOS_PER_MS = 1e6;
const hex = (bytes: Uint8Array | undefined) => Buffer.from(bytes ?? []).toString("hex");

function recordOf(attributes: readonly Attribute[] = []): Record<string, string | number> {
  return Object.fromEntries(
    attributes.map(({ key, value }) => [key, value.stringValue ?? Number(value.intValue ?? value.doubleValue)]),
  );
}

function spanOf(service: string, span: DecodedSpan): CollectedSpan {
  const [start, end] = [BigInt(span.startTimeUnixNano), BigInt(span.endTimeUnixNano)];
  return {
    service,
    name: span.name,
    kind: span.kind.replace("SPAN_KIND_", "") as CollectedSpan["kind"],
    traceId: hex(span.traceId),
    spanId: hex(span.spanId),
    parentSpanId: hex(span.parentSpanId),
    traceState: span.traceState ?? "",
    attributes: recordOf(span.attributes),
    isError: span.status?.code === "STATUS_CODE_ERROR",
    startMs: Number(start / 1000n) / 1000,
    durationMs: Number(end - start) / NANOS_PER_MS,
  };
}

/** @throws Error when the bytes are no such request */
function decode(bytes: Uint8Array): CollectedSpan[] {
  const plain = { longs: String, enums: String, bytes: Uint8Array };
  const message = ExportTraceServiceRequest.decode(bytes);
  const request = ExportTraceServiceRequest.toObject(message, plain) as DecodedRequest;
  return (request.resourceSpans ?? []).flatMap(({ resource, scopeSpans = [] }) => {
    const service = String(recordOf(resource?.attributes)["service.name"]);
    return scopeSpans.flatMap(({ spans = [] }) => spans.map((span) => spanOf(service, span)));
  });
}

/** @param tls PEM of its certificate and key; plain HTTP when it is left out */
export function startCollector(tls?: { readonly cert: string; readonly key: string }): Collector {
  const spans: CollectedSpan[] = [];
  const requests: { headers: Headers; bytes: Uint8Array }[] = [];
  const watches = new Set<() => void>();
  let answer: () => Response | Promise<Response> = () =>
    new Response(null, { headers: { "content-type": "application/x-protobuf" } });
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    idleTimeout: 0,
    ...(tls !== undefined && { tls }),
    async fetch(request) {
      const bytes = await request.bytes();
      requests.push({ headers: request.headers, bytes });
      if (new URL(request.url).pathname !== "/v1/traces" || request.method !== "POST") {
        return new Response(null, { status: 404 });
      }
      spans.push(...decode(bytes));
      for (const watch of watches) watch();
      return answer();
    },
  });
  return {
    url: `${tls === undefined ? "http" : "https"}://127.0.0.1:${server.port}`,
    spans,
    requests,
    span(fits) {
      const { promise, resolve } = Promise.withResolvers<CollectedSpan>();
      const look = () => {
        const found = spans.find(fits);
        if (found === undefined) return;
        watches.delete(look);
        resolve(found);
      };
      watches.add(look);
      look();
      return promise;
    },
    next() {
      const { promise, resolve } = Promise.withResolvers<void>();
      const watch = () => {
        watches.delete(watch);
        resolve();
      };
      watches.add(watch);
      return promise;
    },
    answer(by) {
      answer = by;
    },
    [Symbol.asyncDispose]: () => server.stop(true),
  };
}
