// Sends batches of spans to the collector: OTLP over HTTP, as protobuf. Whatever the collector does, a batch is over in
// bounded time and memory. What it says for now (429, 502, 503, 504, no connection) is tried again.
import { type ExportResult, ExportResultCode } from "@opentelemetry/core";
import { ProtobufTraceSerializer } from "@opentelemetry/otlp-transformer";
import type { ReadableSpan, SpanExporter } from "@opentelemetry/sdk-trace";
import { createUnderWay } from "../concurrency/under-way.ts";
import { readBody } from "../http/body.ts";
import { type Outbound, OutboundError } from "../http/outbound.ts";

/** Of one request, its answer included. */
const REQUEST_MS = 10_000;
const PAUSES_MS = [1_000, 4_000];
const ANSWER_BYTES_MAX = 64 * 1024;
const FOR_NOW = new Set([429, 502, 503, 504]);

export interface ExporterOptions {
  /** The base URL of the collector. */
  readonly endpoint: string;
  readonly headers: ReadonlyArray<readonly [name: string, value: string]>;
  readonly outbound: Outbound;
}

/** The batch was not taken. The message is for the log. */
class NotTaken extends Error {
  readonly isForNow: boolean;

  constructor(message: string, isForNow: boolean) {
    super(message);
    this.isForNow = isForNow;
  }
}

export interface Exporter extends SpanExporter {
  /** Ends what is under way, untaken. */
  abort(): void;
}

/** @returns an exporter whose `result.error` has a message for the log */
export function createExporter({ endpoint, headers, outbound }: ExporterOptions): Exporter {
  const url = `${endpoint.replace(/\/+$/, "")}/v1/traces`;
  const [stopping, aborted] = [new AbortController(), new AbortController()];
  const underWay = createUnderWay();
  const sent = [["content-type", "application/x-protobuf"] as const, ...headers];

  async function exchange(body: Uint8Array): Promise<{ readonly status: number; readonly bytes: Uint8Array }> {
    const signal = AbortSignal.any([aborted.signal, AbortSignal.timeout(REQUEST_MS)]);
    try {
      const response = await outbound.request(url, { method: "POST", headers: sent, body, signal });
      const limits = { maxBytes: ANSWER_BYTES_MAX, captureBytes: ANSWER_BYTES_MAX };
      const { tooLarge, captured } = await readBody(response, limits);
      if (!tooLarge) return { status: response.status, bytes: captured };
    } catch (error) {
      if (aborted.signal.aborted) throw new NotTaken("the process ends", false);
      throw new NotTaken(signal.aborted ? `no answer within ${REQUEST_MS} ms` : failureOf(error), true);
    }
    throw new NotTaken(`an answer of more than ${ANSWER_BYTES_MAX} bytes`, false);
  }

  async function sendOnce(body: Uint8Array): Promise<void> {
    const { status, bytes } = await exchange(body);
    if (status < 200 || status > 299) throw new NotTaken(`answered ${status}`, FOR_NOW.has(status));
    const rejected = rejectedOf(bytes);
    if (rejected > 0) throw new NotTaken(`rejected ${rejected} of them`, false);
  }

  async function send(spans: ReadableSpan[]): Promise<void> {
    // Not in the turn of the call whose span has filled the batch.
    await new Promise(setImmediate);
    const body = ProtobufTraceSerializer.serializeRequest(spans);
    if (body === undefined) throw new NotTaken("could not be written", false);
    for (const pause of PAUSES_MS) {
      const failure = await failureIn(sendOnce(body));
      if (failure === null) return;
      if (!failure.isForNow) throw failure;
      await sleep(pause, stopping.signal);
      if (stopping.signal.aborted) throw failure;
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
      stopping.abort();
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

/** Ends early, without an error, when the signal is aborted. */
function sleep(ms: number, signal: AbortSignal): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  const timer = setTimeout(resolve, ms);
  timer.unref();
  signal.addEventListener("abort", () => resolve(), { once: true });
  return promise.finally(() => clearTimeout(timer));
}
