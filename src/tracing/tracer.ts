// Traces by OpenTelemetry's own library. This folder is loaded only where they are switched on.
//
// Times: a span has the wall time at which it was begun, and the monotonic clock from there on, so a step of the wall
// clock changes no duration.
import { AsyncLocalStorage } from "node:async_hooks";
import {
  type Context,
  createContextKey,
  type Span as OtelSpan,
  ROOT_CONTEXT,
  SpanKind,
  SpanStatusCode,
  trace,
} from "@opentelemetry/api";
import { W3CTraceContextPropagator } from "@opentelemetry/core";
import { resourceFromAttributes } from "@opentelemetry/resources";
import { TracerProvider } from "@opentelemetry/sdk-trace";
import { endsWithin } from "../concurrency/deadline.ts";
import type { Log } from "../core/log.ts";
import type { NewSpan, Span, SpanFields, Tracer } from "../core/tracing.ts";
import type { TracingOptions } from "../core/tracing-options.ts";
import { VERSION } from "../core/version.ts";
import { createOutbound } from "../http/outbound.ts";
import { createExporter } from "./exporter.ts";
import { attributesOf } from "./fields.ts";
import { createSampler } from "./sampling.ts";
import { createSpanQueue } from "./span-queue.ts";

/** How long the last spans may take at the end of the process. */
const LAST_SPANS_MS = 2_000;
/** For telling that they were dropped. */
const ABORTED_MS = 500;
const VALUE_CHARACTERS_MAX = 256;
const KINDS = { server: SpanKind.SERVER, client: SpanKind.CLIENT, internal: SpanKind.INTERNAL };
const PROPAGATOR = new W3CTraceContextPropagator();

type Pairs = Span["headers"];

const GETTER = {
  get: (headers: Pairs, wanted: string) => headers.find(([name]) => name === wanted)?.[1],
  keys: (headers: Pairs) => headers.map(([name]) => name),
};

export interface RunningTracer extends Tracer {
  /** Sends what is left, as far as the collector takes it at once. Never rejects. */
  stop(): Promise<void>;
}

/** @param service the name of the service, where the operator gives none */
export function createTracer(options: TracingOptions, service: string, log: Log): RunningTracer {
  const { endpoint, headers, serviceName, resource, extraCa } = options;
  const payerKey = createContextKey("tollgate.payer");
  // The operator chose the collector, so the host rules for tenants do not apply to it.
  const exporter = createExporter({ endpoint, headers, outbound: createOutbound({ rules: null, extraCa }) });
  const provider = new TracerProvider({
    resource: resourceFromAttributes({
      "service.name": service,
      "service.version": VERSION,
      "service.instance.id": crypto.randomUUID(),
      ...Object.fromEntries(resource),
      ...(serviceName !== null && { "service.name": serviceName }),
    }),
    sampler: createSampler(options, (context) => String(context.getValue(payerKey))),
    spanLimits: { attributeValueLengthLimit: VALUE_CHARACTERS_MAX },
    spanProcessors: [createSpanQueue(exporter, log)],
  });
  const tracer = provider.getTracer("tollgate", VERSION);
  const current = new AsyncLocalStorage<BegunSpan>();

  return {
    begin({ kind, name, parent, payer, startedAt = performance.now(), fields }: NewSpan): Span {
      const context = contextOf(parent).setValue(payerKey, payer);
      const spanOptions = { kind: KINDS[kind], startTime: startedAt, attributes: attributesOf(fields) };
      return new BegunSpan(tracer.startSpan(name, spanOptions, context));
    },
    during: (span, work) => (span instanceof BegunSpan && span.isRecorded ? current.run(span, work) : work()),
    current() {
      const span = current.getStore();
      return span === undefined || span.isOver ? null : span;
    },
    async stop(): Promise<void> {
      const sent = provider.shutdown().catch(() => {});
      if (await endsWithin(LAST_SPANS_MS, sent)) return;
      exporter.abort();
      await endsWithin(ABORTED_MS, sent);
    },
  };
}

function contextOf(parent: NewSpan["parent"]): Context {
  if (parent === null) return ROOT_CONTEXT;
  if (parent instanceof BegunSpan) return parent.context;
  return PROPAGATOR.extract(ROOT_CONTEXT, "end" in parent ? parent.headers : parent, GETTER);
}

class BegunSpan implements Span {
  readonly context: Context;
  readonly isRecorded: boolean;
  isOver = false;
  readonly #span: OtelSpan;

  constructor(span: OtelSpan) {
    this.#span = span;
    this.isRecorded = span.isRecording();
    this.context = trace.setSpan(ROOT_CONTEXT, span);
  }

  get traceId(): string {
    return this.#span.spanContext().traceId;
  }

  get headers(): Pairs {
    return headersOf(this.context);
  }

  set(fields: SpanFields): void {
    if (!this.isRecorded) return;
    this.#span.setAttributes(attributesOf(fields));
    if (fields.errorType !== undefined) this.#span.setStatus({ code: SpanStatusCode.ERROR });
  }

  end(fields?: SpanFields): void {
    if (this.isOver) return;
    this.isOver = true;
    if (fields !== undefined) this.set(fields);
    this.#span.end(performance.now());
  }
}

function headersOf(context: Context): Pairs {
  const headers: [string, string][] = [];
  PROPAGATOR.inject(context, headers, {
    set(pairs, name, value) {
      if (value !== "") pairs.push([name, value]);
    },
  });
  return headers;
}
