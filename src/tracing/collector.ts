// One request to the collector of traces: OTLP over HTTP, as protobuf. Whatever the collector does, it is over in bounded
// time and memory.
import { systemClock } from "../core/clock.ts";
import { readBody } from "../http/body.ts";
import { type Outbound, OutboundError } from "../http/outbound.ts";
import { retryAfterMs } from "../http/retry-after.ts";

/** The answer included. */
const REQUEST_MS = 10_000;
const ANSWER_BYTES_MAX = 64 * 1024;
/** However long it asks not to be asked: spans that wait are dropped once there are many. */
const RETRY_AFTER_MS_MAX = 30_000;

export interface CollectorOptions {
  /** The base URL of the collector. */
  readonly endpoint: string;
  /** They may hold a key. */
  readonly headers: ReadonlyArray<readonly [name: string, value: string]>;
  readonly outbound: Outbound;
}

export interface CollectorAnswer {
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
