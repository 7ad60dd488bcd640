// Spans on their way to the collector, by OTLP over HTTP as protobuf. A span that finds no room is dropped, and so is a batch
// that the collector does not take. Whatever the collector does, a batch is over in bounded time and memory. A passing failure
// (429, 502, 503, 504, no connection) is tried again, after the time that the collector asks for if that is longer than ours.

import { type ExportResult, ExportResultCode } from "@opentelemetry/core";
import { ProtobufTraceSerializer } from "@opentelemetry/otlp-transformer";
import { BatchSpanProcessor, type ReadableSpan, type SpanExporter, type SpanProcessor } from "@opentelemetry/sdk-trace";
import type { Log } from "../core/log.ts";
import { systemClock } from "../core/time.ts";
import type { TracingOptions } from "../core/tracing.ts";
import { readBody } from "../http/client/body.ts";
import { type Answer, OutboundError } from "../http/client/exchange.ts";
import { type Outbound, retryAfterMs } from "../http/client/outbound.ts";
import { MAX } from "../kernel/limits.ts";
import { createInFlight, endsWithin } from "../kernel/wait.ts";

/** Until the end of the answer. */
const REQUEST_MS = 10_000;
const ANSWER_BYTES_MAX = 64 * 1024;

type CollectorOptions = Pick<TracingOptions, "endpoint" | "headers"> & { readonly outbound: Outbound };

const FOR_NOW = new Set([429, 502, 503, 504]);

interface UntakenBatch {
  /** For the log: it holds no header and no path. */
  readonly message: string;
  /** How long to wait before the batch is sent again, at least; null when it is not. */
  readonly againMs: number | null;
}

export function createExporter({ endpoint, headers, outbound }: CollectorOptions) {
  const url = `${endpoint.replace(/\/+$/, "")}/v1/traces`;
  const sent = [["content-type", "application/x-protobuf"] as const, ...headers];
  const [stopping, aborted] = [Promise.withResolvers<void>(), new AbortController()];
  const inFlight = createInFlight();

  async function sendOnce(body: Uint8Array): Promise<UntakenBatch | null> {
    const late = AbortSignal.timeout(REQUEST_MS);
    try {
      const signal = AbortSignal.any([aborted.signal, late]);
      const response = await outbound.request(url, { method: "POST", headers: sent, body, signal });
      const limits = { maxBytes: ANSWER_BYTES_MAX, captureBytes: ANSWER_BYTES_MAX };
      const { tooLarge, captured } = await readBody(response, limits);
      if (tooLarge) return { message: `an answer of more than ${ANSWER_BYTES_MAX} bytes`, againMs: null };
      return refusalIn(response, captured);
    } catch (error) {
      if (aborted.signal.aborted) return { message: "the process ends", againMs: null };
      return { message: late.aborted ? `no answer within ${REQUEST_MS} ms` : failureOf(error), againMs: 0 };
    }
  }

  async function send(spans: ReadableSpan[]): Promise<UntakenBatch | null> {
    // The call whose span has filled the batch does not wait for its writing.
    await new Promise(setImmediate);
    const body = ProtobufTraceSerializer.serializeRequest(spans);
    if (body === undefined) return { message: "could not be written", againMs: null };
    for (const pause of [1_000, 4_000]) {
      const refusal = await sendOnce(body);
      if (refusal === null || refusal.againMs === null) return refusal;
      if (await endsWithin(Math.max(pause, refusal.againMs), stopping.promise)) return refusal;
    }
    return sendOnce(body);
  }

  return {
    export(spans: ReadableSpan[], done: (result: ExportResult) => void): void {
      const leave = inFlight.enter();
      const fail = (error: Error) => done({ code: ExportResultCode.FAILED, error });
      send(spans)
        .then(
          (refusal) => (refusal === null ? done({ code: ExportResultCode.SUCCESS }) : fail(new Error(refusal.message))),
          fail,
        )
        .finally(leave);
    },
    /** Tries nothing again, and resolves when nothing is in flight. */
    async shutdown(): Promise<void> {
      stopping.resolve();
      await inFlight.idle();
    },
    /** Ends the requests in flight, untaken. */
    abort: () => aborted.abort(),
  };
}

function refusalIn({ status, headers }: Answer, bytes: Uint8Array): UntakenBatch | null {
  if (status < 200 || status > 299) {
    // A longer `Retry-After` is not obeyed: spans that wait are dropped once there are many.
    const asked = retryAfterMs(headers.get("retry-after"), systemClock.now(), 30_000);
    return { message: `answered ${status}`, againMs: FOR_NOW.has(status) ? (asked ?? 0) : null };
  }
  const rejected = rejectedOf(bytes);
  return rejected > 0 ? { message: `rejected ${rejected} of them`, againMs: null } : null;
}

/** Never the message of an unforeseen error, which might quote a header. */
function failureOf(error: unknown): string {
  if (error instanceof OutboundError) return error.message;
  return error instanceof Error ? error.name : "unknown error";
}

/** Spans that the collector says it has not taken. An answer in another form says nothing. */
function rejectedOf(bytes: Uint8Array): number {
  try {
    return Number(ProtobufTraceSerializer.deserializeResponse(bytes).partialSuccess?.rejectedSpans ?? 0);
  } catch {
    return 0;
  }
}

/** @param exporter whose `result.error` has a message for the log */
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
    // Written in one piece: 2 ms of the event loop.
    maxExportBatchSize: 256,
    scheduledDelayMillis: 1_000,
    // More than the exporter takes with all its tries.
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
      // From here on nothing is tried again.
      await exporter.shutdown();
      await flushed;
      // `flushed` is over with the first batch that is not taken, and does not cover a batch that was in flight before.
      await exporter.shutdown();
      drops.tell();
    },
  };
}

/** The first drop is logged at once, and what follows within a minute together. */
function createDrops(log: Log) {
  let count = 0;
  let reason = "";
  let timer: ReturnType<typeof setTimeout> | null = null;

  function tell(): void {
    timer = null;
    if (count === 0) return;
    log.warn("spans_dropped", { count, reason });
    count = 0;
    timer = setTimeout(tell, 60_000).unref();
  }

  return {
    tell,
    count(spans: number, why: string): void {
      count += spans;
      reason = why;
      if (timer === null) tell();
    },
  };
}
