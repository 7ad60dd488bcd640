// The tracer, on OpenTelemetry's own library. This file is loaded only if tracing is on.
//
// The sampler that the operator chose decides which traces are recorded; the `parentbased_` ones follow the caller's flag. A
// bound on traces per second holds whatever the sampler says, so that no caller can make the gateway record without end, and
// each tenant has a share of that bound. A span within a trace is recorded if and only if the trace is.
import { AsyncLocalStorage } from "node:async_hooks";
import type { Attributes, Context, Span as OtelSpan } from "@opentelemetry/api";
import { createContextKey, ROOT_CONTEXT, SpanKind, SpanStatusCode, TraceFlags, trace } from "@opentelemetry/api";
import { W3CTraceContextPropagator } from "@opentelemetry/core";
import { resourceFromAttributes } from "@opentelemetry/resources";
import {
  AlwaysOffSampler,
  AlwaysOnSampler,
  ParentBasedSampler,
  type Sampler,
  SamplingDecision,
  TraceIdRatioBasedSampler,
  TracerProvider,
} from "@opentelemetry/sdk-trace";
import {
  ATTR_ERROR_TYPE,
  ATTR_HTTP_REQUEST_METHOD,
  ATTR_HTTP_RESPONSE_STATUS_CODE,
  ATTR_HTTP_ROUTE,
  ATTR_SERVER_ADDRESS,
} from "@opentelemetry/semantic-conventions";
import type { Log } from "../core/log.ts";
import { VERSION } from "../core/startup.ts";
import type { NewSpan, Span, SpanFields, Tracer, TracingOptions } from "../core/tracing.ts";
import { createOutbound } from "../http/client/outbound.ts";
import { createReservedShare } from "../kernel/share.ts";
import { endsWithin } from "../kernel/wait.ts";
import { createExporter, createSpanQueue } from "./exporter.ts";

const KINDS = { server: SpanKind.SERVER, client: SpanKind.CLIENT, internal: SpanKind.INTERNAL };
const PROPAGATOR = new W3CTraceContextPropagator();

const GETTER = {
  get: (headers: Span["headers"], wanted: string) => headers.find(([name]) => name === wanted)?.[1],
  keys: (headers: Span["headers"]) => headers.map(([name]) => name),
};

export interface RunningTracer extends Tracer {
  /** Sends the remaining spans, and drops them if the collector does not take them within two seconds. Never rejects. */
  stop(): Promise<void>;
}

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
    spanLimits: { attributeValueLengthLimit: 256 },
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
      if (await endsWithin(2_000, sent)) return;
      exporter.abort();
      // Time to log that the last spans were dropped.
      await endsWithin(500, sent);
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

  get headers(): Span["headers"] {
    const headers: [string, string][] = [];
    PROPAGATOR.inject(this.context, headers, {
      set(pairs, name, value) {
        if (value !== "") pairs.push([name, value]);
      },
    });
    return headers;
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

const WINDOW_MS = 1000;
const LEFT_OUT = { decision: SamplingDecision.NOT_RECORD };
const RECORDED = { decision: SamplingDecision.RECORD_AND_SAMPLED };

/** @param payerOf names the tenant or account whose share of the budget a trace in this context uses */
export function createSampler(
  { sampler, ratio, tracesPerSecond }: Pick<TracingOptions, "sampler" | "ratio" | "tracesPerSecond">,
  payerOf: (context: Context) => string,
): Sampler {
  const chosen = samplerOf(sampler, ratio);
  const mayRecord = createTraceBudget(tracesPerSecond);
  return {
    shouldSample(context, traceId, name, kind, attributes, links) {
      const parent = trace.getSpanContext(context);
      if (kind !== SpanKind.SERVER && parent !== undefined && trace.isSpanContextValid(parent)) {
        return (parent.traceFlags & TraceFlags.SAMPLED) === 0 ? LEFT_OUT : RECORDED;
      }
      const result = chosen.shouldSample(context, traceId, name, kind, attributes, links);
      if (result.decision !== SamplingDecision.RECORD_AND_SAMPLED) return LEFT_OUT;
      return mayRecord(payerOf(context)) ? result : LEFT_OUT;
    },
    toString: () => `${chosen}, at most ${tracesPerSecond} a second`,
  };
}

function samplerOf(name: string, ratio: number): Sampler {
  const [, root] = /^parentbased_(.*)$/.exec(name) ?? [];
  if (root !== undefined) return new ParentBasedSampler({ root: samplerOf(root, ratio) });
  if (name === "always_off") return new AlwaysOffSampler();
  return name === "traceidratio" ? new TraceIdRatioBasedSampler(ratio) : new AlwaysOnSampler();
}

/** A budget of traces per second, an eighth of which is reserved for payers that have recorded none in this second. */
function createTraceBudget(perSecond: number): (payer: string) => boolean {
  let share = createReservedShare(perSecond);
  let endsAt = performance.now() + WINDOW_MS;
  return (payer) => {
    const now = performance.now();
    if (now >= endsAt) [share, endsAt] = [createReservedShare(perSecond), now + WINDOW_MS];
    return share.take(payer);
  };
}

/** Attribute names, by OpenTelemetry's semantic conventions. */
const NAMES: Readonly<Record<keyof SpanFields, string>> = {
  method: ATTR_HTTP_REQUEST_METHOD,
  status: ATTR_HTTP_RESPONSE_STATUS_CODE,
  route: ATTR_HTTP_ROUTE,
  host: ATTR_SERVER_ADDRESS,
  errorType: ATTR_ERROR_TYPE,
  // `rpc.method` is not stable in the conventions yet, so the package has no constant. The `tollgate.` names are our own.
  rpcMethod: "rpc.method",
  rpcEndpoint: "tollgate.rpc.endpoint",
  tenant: "tollgate.tenant",
  account: "tollgate.account",
  agentId: "tollgate.agent.id",
  invocationId: "tollgate.invocation.id",
  attempt: "tollgate.settlement.attempt",
  outcome: "tollgate.settlement.outcome",
};

function attributesOf(fields: SpanFields): Attributes {
  const attributes: Attributes = {};
  for (const field in fields) {
    const name = field as keyof SpanFields;
    const value = fields[name];
    if (value !== undefined) attributes[NAMES[name]] = value;
  }
  return attributes;
}
