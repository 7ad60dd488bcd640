// Spans on their way to the collector, by OTLP over HTTP as protobuf. A bounded number waits; a span that finds no room is
// dropped, and so is a batch that the collector does not take. Both are counted and logged once a minute. Whatever the
// collector does, a batch is over in bounded time and memory. A passing failure (429, 502, 503, 504, no connection) is tried
// again, after the time that the collector asks for if that is longer than ours.

import { type ExportResult, ExportResultCode } from "@opentelemetry/core";
import { ProtobufTraceSerializer } from "@opentelemetry/otlp-transformer";
import { BatchSpanProcessor, type ReadableSpan, type SpanExporter, type SpanProcessor } from "@opentelemetry/sdk-trace";
import { endsWithin } from "../concurrency/deadline.ts";
import { createUnderWay } from "../concurrency/under-way.ts";
import { systemClock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { readBody } from "../http/body.ts";
import { type Outbound, OutboundError } from "../http/outbound.ts";
import { retryAfterMs } from "../http/retry-after.ts";

/** The answer included. */
const REQUEST_MS = 10_000;
const ANSWER_BYTES_MAX = 64 * 1024;
/** However long it asks not to be asked: spans that wait are dropped once there are many. */
const RETRY_AFTER_MS_MAX = 30_000;

interface CollectorOptions {
  /** The base URL of the collector. */
  readonly endpoint: string;
  /** They may hold a key. */
  readonly headers: ReadonlyArray<readonly [name: string, value: string]>;
  readonly outbound: Outbound;
}

interface CollectorAnswer {
  readonly status: number;
  readonly bytes: Uint8Array;
  /** What it asks for, if it does. */
  readonly retryAfterMs: number | null;
}

/** There is no answer that can be used. The message holds no header and no path. */
export class NoAnswer extends Error {
  override readonly name = "NoAnswer";
  /** Whether another request may find one. */
  readonly isForNow: boolean;

  constructor(message: string, isForNow: boolean, options?: { readonly cause: unknown }) {
    super(message, options);
    this.isForNow = isForNow;
  }
}

/** @returns what sends a request, and throws NoAnswer, or the reason of the signal */
export function createCollectorRequest({ endpoint, headers, outbound }: CollectorOptions) {
  const url = `${endpoint.replace(/\/+$/, "")}/v1/traces`;
  const sent = [["content-type", "application/x-protobuf"] as const, ...headers];

  return async (body: Uint8Array, aborted: AbortSignal): Promise<CollectorAnswer> => {
    const late = AbortSignal.timeout(REQUEST_MS);
    const signal = AbortSignal.any([aborted, late]);
    try {
      const response = await outbound.request(url, { method: "POST", headers: sent, body, signal });
      const limits = { maxBytes: ANSWER_BYTES_MAX, captureBytes: ANSWER_BYTES_MAX };
      const { tooLarge, captured: bytes } = await readBody(response, limits);
      const asked = retryAfterMs(response.headers.get("retry-after"), systemClock.now(), RETRY_AFTER_MS_MAX);
      if (!tooLarge) return { status: response.status, bytes, retryAfterMs: asked };
    } catch (error) {
      aborted.throwIfAborted();
      const message = late.aborted ? `no answer within ${REQUEST_MS} ms` : failureOf(error);
      throw new NoAnswer(message, true, { cause: error });
    }
    throw new NoAnswer(`an answer of more than ${ANSWER_BYTES_MAX} bytes`, false);
  };
}

/** Never the message of an unforeseen error, which might quote a header. */
function failureOf(error: unknown): string {
  if (error instanceof OutboundError) return error.message;
  return error instanceof Error ? error.name : "unknown error";
}

const PAUSES_MS = [1_000, 4_000];
const FOR_NOW = new Set([429, 502, 503, 504]);

/** The batch was not taken. The message is for the log. */
class NotTaken extends Error {
  /** How long to wait before it is sent again, at least; null when it is not. */
  readonly againMs: number | null;

  constructor(message: string, againMs: number | null) {
    super(message);
    this.againMs = againMs;
  }
}

interface Exporter extends SpanExporter {
  /** Ends what is under way, untaken. */
  abort(): void;
}

/** @returns an exporter whose `result.error` has a message for the log */
export function createExporter(options: CollectorOptions): Exporter {
  const request = createCollectorRequest(options);
  const [stopping, aborted] = [Promise.withResolvers<void>(), new AbortController()];
  const underWay = createUnderWay();

  async function sendOnce(body: Uint8Array): Promise<void> {
    const { status, bytes, retryAfterMs } = await request(body, aborted.signal).catch((error) => {
      if (aborted.signal.aborted) throw new NotTaken("the process ends", null);
      throw error instanceof NoAnswer ? new NotTaken(error.message, error.isForNow ? 0 : null) : error;
    });
    if (status < 200 || status > 299) {
      throw new NotTaken(`answered ${status}`, FOR_NOW.has(status) ? (retryAfterMs ?? 0) : null);
    }
    const rejected = rejectedOf(bytes);
    if (rejected > 0) throw new NotTaken(`rejected ${rejected} of them`, null);
  }

  async function send(spans: ReadableSpan[]): Promise<void> {
    // Not in the turn of the call whose span has filled the batch.
    await new Promise(setImmediate);
    const body = ProtobufTraceSerializer.serializeRequest(spans);
    if (body === undefined) throw new NotTaken("could not be written", null);
    for (const pause of PAUSES_MS) {
      const failure = await failureIn(sendOnce(body));
      if (failure === null) return;
      if (failure.againMs === null) throw failure;
      if (await endsWithin(Math.max(pause, failure.againMs), stopping.promise)) throw failure;
    }
    await sendOnce(body);
  }

  return {
    export(spans: ReadableSpan[], done: (result: ExportResult) => void): void {
      const leave = underWay.enter();
      send(spans)
        .then(
          () => done({ code: ExportResultCode.SUCCESS }),
          (error) => done({ code: ExportResultCode.FAILED, error }),
        )
        .finally(leave);
    },
    /** Tries nothing again, and resolves when nothing is under way. */
    async shutdown(): Promise<void> {
      stopping.resolve();
      await underWay.idle();
    },
    abort: () => aborted.abort(),
  };
}

/** Null when it was taken. */
function failureIn(sending: Promise<void>): Promise<NotTaken | null> {
  return sending.then(
    () => null,
    (error) => {
      if (error instanceof NotTaken) return error;
      throw error;
    },
  );
}

/** Spans that the collector says it has not taken. An answer in another form says nothing. */
function rejectedOf(bytes: Uint8Array): number {
  try {
    return Number(ProtobufTraceSerializer.deserializeResponse(bytes).partialSuccess?.rejectedSpans ?? 0);
  } catch {
    return 0;
  }
}

/** Spans that wait or are under way. */
const HELD_MAX = 4096;
/** Written in one piece: 2 ms of the event loop. */
const BATCH_MAX = 256;
const WAIT_MS = 1_000;
/** More than the exporter takes with all its tries. */
const EXPORT_MS = 100_000;
const TELL_MS = 60_000;

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
    maxQueueSize: HELD_MAX,
    maxExportBatchSize: BATCH_MAX,
    scheduledDelayMillis: WAIT_MS,
    exportTimeoutMillis: EXPORT_MS,
  });
  return {
    onStart() {},
    onEnd(span: ReadableSpan): void {
      if (held >= HELD_MAX) {
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
      // That is over with the first batch that is not taken, and knows nothing of one that was under way before.
      await exporter.shutdown();
      drops.tell();
    },
  };
}

/** The first is told at once, and what follows within a minute together. */
function createDrops(log: Log) {
  let count = 0;
  let reason = "";
  let timer: ReturnType<typeof setTimeout> | null = null;

  function tell(): void {
    if (count > 0) log.warn("spans_dropped", { count, reason });
    count = 0;
  }

  function pause(): void {
    timer = setTimeout(() => {
      timer = null;
      if (count === 0) return;
      tell();
      pause();
    }, TELL_MS);
    timer.unref();
  }

  return {
    tell,
    count(spans: number, why: string): void {
      count += spans;
      reason = why;
      if (timer !== null) return;
      tell();
      pause();
    },
  };
}
