// Sends batches of spans to the collector. Whatever the collector does, a batch is over in bounded time. What it says for
// now (429, 502, 503, 504, no connection) is tried again, after the time that it asks for if that is longer than ours.
import { type ExportResult, ExportResultCode } from "@opentelemetry/core";
import { ProtobufTraceSerializer } from "@opentelemetry/otlp-transformer";
import type { ReadableSpan, SpanExporter } from "@opentelemetry/sdk-trace";
import { endsWithin } from "../concurrency/deadline.ts";
import { createUnderWay } from "../concurrency/under-way.ts";
import { type CollectorOptions, createCollectorRequest, NoAnswer } from "./collector.ts";

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

export interface Exporter extends SpanExporter {
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
