// Sends spans to the collector, as OTLP over HTTP with protobuf. New spans are dropped when the queue is full, and a batch is
// dropped when the collector refuses it, so that memory and the time of a batch stay bounded. After a transient failure (429,
// 502, 503, 504, no connection) a batch is retried, after the collector's `Retry-After` (30 s at most) if our backoff is shorter.
import { type ExportResult, ExportResultCode } from "@opentelemetry/core";
import { ProtobufTraceSerializer } from "@opentelemetry/otlp-transformer";
import { BatchSpanProcessor, type ReadableSpan, type SpanExporter, type SpanProcessor } from "@opentelemetry/sdk-trace";
import { attempt } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { systemClock } from "../core/time.ts";
import type { TracingOptions } from "../core/tracing.ts";
import { readBody } from "../http/client/body.ts";
import { type Answer, OutboundError } from "../http/client/exchange.ts";
import { type Outbound, retryAfterMs } from "../http/client/outbound.ts";
import { MAX } from "../kernel/limits.ts";
import { createInFlight, endsWithin } from "../kernel/wait.ts";

/** The deadline of a request, to the end of its response. */
const REQUEST_MS = 10_000;
const ANSWER_BYTES_MAX = 64 * 1024;

type CollectorOptions = Pick<TracingOptions, "endpoint" | "headers"> & { readonly outbound: Outbound };

const TRANSIENT = new Set([429, 502, 503, 504]);

interface BatchFailure {
  /** For the log, so it holds no header and no path. */
  readonly message: string;
  /** The least pause before a retry, in milliseconds; null for no retry. */
  readonly retryAfterMs: number | null;
}

export function createExporter({ endpoint, headers, outbound }: CollectorOptions) {
  const url = `${endpoint.replace(/\/+$/, "")}/v1/traces`;
  const sent = [["content-type", "application/x-protobuf"] as const, ...headers];
  const stopping = Promise.withResolvers<void>();
  const aborted = new AbortController();
  const inFlight = createInFlight();

  async function sendOnce(body: Uint8Array): Promise<BatchFailure | null> {
    const late = AbortSignal.timeout(REQUEST_MS);
    try {
      const signal = AbortSignal.any([aborted.signal, late]);
      const response = await outbound.request(url, { method: "POST", headers: sent, body, signal });
      const limits = { maxBytes: ANSWER_BYTES_MAX, captureBytes: ANSWER_BYTES_MAX };
      const { tooLarge, captured } = await readBody(response, limits);
      if (tooLarge) return { message: `a response of more than ${ANSWER_BYTES_MAX} bytes`, retryAfterMs: null };
      return failureIn(response, captured);
    } catch (error) {
      if (aborted.signal.aborted) return { message: "the process is stopping", retryAfterMs: null };
      return { message: late.aborted ? `no response within ${REQUEST_MS} ms` : messageOf(error), retryAfterMs: 0 };
    }
  }

  async function send(spans: ReadableSpan[]): Promise<BatchFailure | null> {
    // Yields first, so that the call whose span fills the batch does not wait while the batch is serialized.
    await new Promise(setImmediate);
    const body = ProtobufTraceSerializer.serializeRequest(spans);
    if (body === undefined) return { message: "could not be serialized", retryAfterMs: null };
    for (const pause of [1_000, 4_000]) {
      const failure = await sendOnce(body);
      if (failure === null || failure.retryAfterMs === null) return failure;
      if (await endsWithin(Math.max(pause, failure.retryAfterMs), stopping.promise)) return failure;
    }
    return sendOnce(body);
  }

  return {
    export(spans: ReadableSpan[], done: (result: ExportResult) => void): void {
      const leave = inFlight.enter();
      const tell = (failure: { readonly message: string } | null) =>
        failure === null
          ? done({ code: ExportResultCode.SUCCESS })
          : done({ code: ExportResultCode.FAILED, error: new Error(failure.message) });
      send(spans).then(tell, tell).finally(leave);
    },
    /** Retries nothing more, and resolves when no request is in flight. */
    async shutdown(): Promise<void> {
      stopping.resolve();
      await inFlight.idle();
    },
    /** Breaks off the requests in flight; their batches are dropped. */
    abort: () => aborted.abort(),
  };
}

function failureIn({ status, headers }: Answer, bytes: Uint8Array): BatchFailure | null {
  if (status < 200 || status > 299) {
    // A longer `Retry-After` is cut to 30 s, since spans that wait for long fill the queue.
    const asked = retryAfterMs(headers.get("retry-after"), systemClock.now(), 30_000);
    return { message: `answered ${status}`, retryAfterMs: TRANSIENT.has(status) ? (asked ?? 0) : null };
  }
  const rejected = rejectedOf(bytes);
  return rejected > 0 ? { message: `rejected ${rejected} of them`, retryAfterMs: null } : null;
}

/** Text for the log. Of an unexpected error it gives only the name, since the message might quote a header. */
function messageOf(error: unknown): string {
  if (error instanceof OutboundError) return error.message;
  return error instanceof Error ? error.name : "unknown error";
}

/** How many spans the collector says it has rejected; 0 if the response has another form. */
function rejectedOf(bytes: Uint8Array): number {
  const answer = attempt(() => ProtobufTraceSerializer.deserializeResponse(bytes));
  return Number(answer?.partialSuccess?.rejectedSpans ?? 0);
}

/** @param exporter gives a `result.error` whose message may be logged */
export function createSpanQueue(exporter: SpanExporter, log: Log): SpanProcessor {
  let held = 0;
  const drops = createDrops(log);
  const counting: SpanExporter = {
    export(spans, done) {
      exporter.export(spans, (result: ExportResult) => {
        held -= spans.length;
        if (result.code !== ExportResultCode.SUCCESS) drops.count(spans.length, result.error?.message ?? "failed");
        done(result);
      });
    },
    shutdown: () => exporter.shutdown(),
  };
  const batches = new BatchSpanProcessor({
    exporter: counting,
    maxQueueSize: MAX.spans,
    // Serializing a batch of this size blocks the event loop for 2 ms.
    maxExportBatchSize: 256,
    scheduledDelayMillis: 1_000,
    // Longer than the exporter takes with all its retries.
    exportTimeoutMillis: 100_000,
  });
  return {
    onStart() {},
    onEnd(span: ReadableSpan): void {
      if (held >= MAX.spans) {
        drops.count(1, "too many wait for the collector");
        return;
      }
      held++;
      batches.onEnd(span);
    },
    forceFlush: () => batches.forceFlush(),
    async shutdown(): Promise<void> {
      const flushed = batches.shutdown().catch(() => {});
      // Ends the retries, so that `flushed` resolves soon.
      await exporter.shutdown();
      await flushed;
      // Waits for the rest: `flushed` resolves at the first batch that fails, and ignores a batch already in flight.
      await exporter.shutdown();
      drops.flush();
    },
  };
}

/** Logs the first drop at once, and the drops of the next minute as one sum. */
function createDrops(log: Log) {
  let count = 0;
  let reason = "";
  let timer: ReturnType<typeof setTimeout> | null = null;

  function flush(): void {
    timer = null;
    if (count === 0) return;
    log.warn("spans_dropped", { count, reason });
    count = 0;
    timer = setTimeout(flush, 60_000).unref();
  }

  return {
    flush,
    count(spans: number, why: string): void {
      count += spans;
      reason = why;
      if (timer === null) flush();
    },
  };
}
