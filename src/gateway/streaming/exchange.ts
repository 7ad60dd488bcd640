// One streamed exchange with an upstream: resolves the credential, sends the request, and relays the response to the caller as
// it comes. A request is sent again only when it certainly never reached the upstream.
import type { Call } from "../../core/call.ts";
import type { Log } from "../../core/log.ts";
import type { Chunks, DecodedFor, DecoderShare } from "../../http/client/body.ts";
import { bodyChunks, isEncoded, Undecodable } from "../../http/client/body.ts";
import { type Answer, OutboundError, type ReadAhead } from "../../http/client/exchange.ts";
import { type Outbound, requestSafely } from "../../http/client/outbound.ts";
import { BODILESS } from "../../http/client/response-parser.ts";
import { MAX } from "../../kernel/limits.ts";
import { atOnceOrInTurn } from "../../kernel/turns.ts";
import { endsWithin, type StopSignal, unlessAborted, untilFirst } from "../../kernel/wait.ts";
import { untilStored } from "../../storage/failures.ts";
import { type CallBody, freeMemory } from "../../wire/body.ts";
import { isEventStream } from "../../wire/event-stream.ts";
import type { DeniedTools } from "../../wire/tool-list.ts";
import { CallError, type CallStop, credentialProblem } from "../upstream/failure.ts";
import { type CredentialHeader, credentialHeaders } from "../upstream/headers.ts";
import { answerHeaders, type Budget, type ResponseRecorder } from "./response.ts";
import { filterEvents, filterJson, refuseAll } from "./tool-filter.ts";

/** An admitted request (see proxy/stream-routes.ts), ready to be sent. */
export interface OpenedRequest extends Pick<Call, "url" | "credential_ref" | "headers" | "request_id"> {
  readonly tenant: string;
  readonly agentId: string;
}

export interface ExchangeDeps {
  readonly log: Log;
  readonly outbound: Outbound;
  readonly filterMemory: Budget;
  readonly readAhead: ReadAhead;
  readonly decoders: DecoderShare;
  resolveCredential(tenant: string, ref: string, url: string): Promise<{ readonly header: CredentialHeader | null }>;
}

export interface StreamExchange {
  readonly opened: OpenedRequest;
  readonly timeouts: ExchangeTimeouts;
  readonly recorder: ResponseRecorder;
  readonly method: "POST" | "GET" | "DELETE";
  /** Headers that the gateway adds to the request, without the credential. */
  readonly own: ReadonlyArray<readonly [name: string, value: string]>;
  /** Null if the response can hold no list of tools. */
  readonly isDenied: DeniedTools | null;
  /** After this much silence of an event stream a comment keeps it alive, in milliseconds; null for never. */
  readonly commentMs: number | null;
  /** Headers that the gateway adds to the response. */
  readonly responseHeaders: Readonly<Record<string, string>>;
  /** Whether this process still holds the claim on the call. Asked right before the upstream is dialled. */
  isOurs(): Promise<boolean>;
  /**
   * Called once if there was a response. The caller sees the end of a whole response only after this has resolved.
   * @param error of a response that ended early, unless the exchange was stopped
   * @returns false when the end is recorded otherwise, so that the caller must not see a whole response
   */
  ended(how: Ended, error?: unknown): Promise<boolean>;
}

/** @param sent called when the body has been sent, which may be after the head. @throws errors that `upstreamFailureOf` knows */
export async function headOf(
  deps: ExchangeDeps,
  { opened, timeouts, recorder, method, own, isOurs }: StreamExchange,
  body: CallBody | null,
  sent?: () => void,
): Promise<Answer> {
  const { signal } = timeouts;
  timeouts.waitFor("head");
  timeouts.throwIfStopped();
  const { credential_ref: ref } = opened;
  const credential = ref === null ? null : await unlessAborted(signal, credentialOf(deps, opened, ref, signal));
  if (!(await unlessAborted(signal, isOurs()))) {
    throw new CallError("internal", "ended elsewhere", { callerMessage: "the call was ended before it was sent" });
  }
  timeouts.throwIfStopped();
  const headers = [...opened.headers, ...own, ...credentialHeaders(credential)];
  recorder.dialled();
  const { url, tenant } = opened;
  const ahead = deps.readAhead.of(tenant);
  const request = { method, headers, body, signal, tenant, sent, ahead, connected: recorder.connected };
  const response = await requestSafely(deps.outbound, url, request);
  recorder.head(response);
  return response;
}

async function credentialOf(
  { resolveCredential, log }: ExchangeDeps,
  { tenant, url }: OpenedRequest,
  credential_ref: string,
  signal: AbortSignal,
): Promise<CredentialHeader | null> {
  try {
    const resolve = () => resolveCredential(tenant, credential_ref, url);
    return (await untilStored(resolve, () => signal.aborted)).header;
  } catch (error) {
    if (!signal.aborted) log.warn("credential_not_resolved", { tenant, credential_ref, error });
    throw credentialProblem(error);
  }
}

export async function answerOf({ filterMemory, decoders }: ExchangeDeps, exchange: StreamExchange, response: Answer) {
  const { opened, timeouts, recorder, commentMs, responseHeaders, method, ended } = exchange;
  const { status } = response;
  const headers = answerHeaders(response, responseHeaders, method === "GET");
  const isEvents = isEventStream(response);
  // Asks proxies in front of the gateway not to buffer (MCP, streamable HTTP).
  if (isEvents && method === "POST") headers.set("x-accel-buffering", "no");
  const chunks = await decodedChunks(response, timeouts, decodedForExchange(decoders, opened), isEvents);
  const body = relayBody({
    chunks,
    timeouts,
    filter: response.ok ? filterOf(exchange, filterMemory, response) : null,
    comments: isEvents ? { firstMs: 50, nextMs: commentMs } : null,
    piece: recorder.piece,
    ended,
  });
  if (!BODILESS.has(status)) return new Response(body, { status, headers });
  // The server never reads the body of such a response, so it is read to its end here.
  await new Response(body).bytes().catch(() => {
    const callerMessage = "the call was ended before its response was recorded";
    throw new CallError("internal", "ended elsewhere", { callerMessage });
  });
  return new Response(null, { status, headers });
}

/** Waits only briefly for decoder memory, since the caller waits for the head. @throws Undecodable if there is none in time */
function decodedForExchange(decoders: DecoderShare, { tenant, agentId: agent }: OpenedRequest): DecodedFor {
  return {
    tenant,
    async decoderMemory(bytes, closing, evict) {
      const take = (signal: StopSignal) => decoders.take({ tenant, agent }, bytes, signal, evict);
      try {
        return await untilFirst([closing], take, MAX.decoderWaitMs);
      } catch (error) {
        closing.throwIfAborted();
        throw new Undecodable("no memory for its encoding in time", { cause: error });
      }
    },
  };
}

function filterOf({ isDenied, opened, timeouts: { signal } }: StreamExchange, filterMemory: Budget, response: Answer) {
  if (isDenied === null) return null;
  const { tenant } = opened;
  const options = { isDenied, bytesMax: MAX.toolAnswerBytes, memory: filterMemory(tenant), tenant, signal };
  if (isEventStream(response)) return filterEvents(options);
  const type = response.headers.get("content-type") ?? "";
  if (/event-stream/i.test(type)) return refuseAll;
  return filterJson(options, /json/i.test(type));
}

// The timeouts of one exchange with an upstream, and the reason why it was stopped. Only the side that we are waiting for can
// time out: while the caller reads slowly, the upstream does not count as silent.

export interface ExchangeTimeoutLimits {
  /** The longest wait for the head of the response, in milliseconds. */
  readonly headMs: number;
  /** The longest silence of the upstream after the head; null for no limit. */
  readonly silenceMs: number | null;
  /** How long the caller may leave bytes unread. */
  readonly callerMs: number;
}

export function startExchangeTimeouts(
  { headMs, silenceMs, callerMs }: ExchangeTimeoutLimits,
  callerSignal: AbortSignal,
  tenant: string,
) {
  const controller = new AbortController();
  const limits = { head: headMs, upstream: silenceMs, caller: callerMs };
  let limit: number | null = null;
  let since = 0;
  let dueAt = Number.POSITIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let whenOver: CallStop = "timeout";
  let stoppedFor: CallStop | null = null;

  const abort = () => {
    clearTimeout(timer);
    controller.abort(stoppedFor);
  };
  /** Thousands of streams may be stopped in one moment, as when a client dies, and the end of each takes 80 µs. */
  const stop = (why: CallStop) => {
    if (stoppedFor !== null) return;
    stoppedFor = why;
    void atOnceOrInTurn(tenant, abort);
  };
  const onGone = () => stop("cancelled");

  /** Pieces don't start new timers, which would cost time: a timer that fires too early is armed again for the rest. */
  function arm(at: number): void {
    clearTimeout(timer);
    dueAt = at;
    timer = setTimeout(check, Math.max(0, at - performance.now()));
  }

  function check(): void {
    dueAt = Number.POSITIVE_INFINITY;
    if (limit === null) return;
    if (performance.now() - since >= limit) stop(whenOver);
    else arm(since + limit);
  }

  callerSignal.addEventListener("abort", onGone, { once: true });
  if (callerSignal.aborted) onGone();
  return {
    /** Its reason is a CallStop. It may be aborted some turns of the event loop after a stop. */
    signal: controller.signal,
    stop,
    /** For what must not begin while a stop waits for its turn. @throws the reason of the stop */
    throwIfStopped() {
      if (stoppedFor !== null) abort();
      controller.signal.throwIfAborted();
    },
    waitFor(whom: "head" | "upstream" | "caller") {
      limit = limits[whom];
      since = performance.now();
      whenOver = whom === "caller" ? "cancelled" : "timeout";
      if (limit !== null && since + limit < dueAt && stoppedFor === null) arm(since + limit);
    },
    /** From then on the signal is aborted if the exchange was stopped before. */
    end() {
      clearTimeout(timer);
      limit = null;
      if (stoppedFor !== null) abort();
      callerSignal.removeEventListener("abort", onGone);
    },
  };
}

export type ExchangeTimeouts = ReturnType<typeof startExchangeTimeouts>;

// Relays the body of the response to the caller piece by piece, as the caller reads it. Nothing is read ahead, so a slow caller
// slows the upstream down and fills no memory. Measured on Bun 1.4.5: a stream with `pull` waits for the socket to drain (59 MB
// of memory after 600 MB to a reader that stops), while one of type "direct" does not; a stream that errors resets the
// connection, so the caller never sees the chunk that ends a whole body.
//
// Bun sends the end of the head only with the first bytes of the body (oven-sh/bun#33660). So an event stream that begins with
// silence opens with a comment; other responses wait. Bun sends bytes that it has pulled only after the event loop has turned,
// and drops them, even the head, if the stream errors before that. So a response that breaks off is held open for a moment.

/** How a response ended after its head: `broken` by the upstream or the timeouts, `failed` by the gateway. */
export type Ended = "whole" | "broken" | "failed";

export interface RelayOptions extends Pick<StreamExchange, "timeouts" | "ended"> {
  /** The pieces of the decoded body. */
  readonly chunks: Chunks;
  readonly filter: ((chunks: Chunks) => Chunks) | null;
  /** After how much silence a comment is sent: first at the start, then later (null for never). Null for no event stream. */
  readonly comments: { readonly firstMs: number; readonly nextMs: number | null } | null;
  piece(bytes: Uint8Array): void;
}

/** How long a response that breaks off is held open. One millisecond is enough, except on a busy machine. */
const FLUSH_MS = 100;

const OPENING = Buffer.from(":\n\n");
const COMMENT = Buffer.from(":\n");
/** The byte order mark of UTF-8. */
const MARK = Buffer.from("\ufeff");
const LINE_FEED = 0x0a;

/** After this much silence the head of an encoded event stream is sent without its first bytes. */
const FIRST_WAIT_MS = 50;

/**
 * The pieces of the decoded body. Awaits the first of an encoded one: until then the answer can still be an error.
 * @throws Undecodable; the reason of the signal
 */
async function decodedChunks(response: Answer, timeouts: ExchangeTimeouts, decodedFor: DecodedFor, isEvents: boolean) {
  const { signal } = timeouts;
  const chunks = bodyChunks(response, { maxBytes: Number.MAX_SAFE_INTEGER, signal, decodedFor });
  if (!isEncoded(response.headers)) return chunks;
  timeouts.waitFor("upstream");
  const first = nextOf(chunks);
  try {
    if (!isEvents || (await endsWithin(FIRST_WAIT_MS, first))) await first;
  } catch (error) {
    signal.throwIfAborted();
    if (error instanceof Undecodable) throw error;
  }
  return withFirst(first, chunks);
}

async function* withFirst(first: Promise<IteratorResult<Uint8Array, void>>, rest: Chunks): Chunks {
  const { done, value } = await first;
  if (done) return;
  yield value;
  yield* rest;
}

/** Leaves out a byte order mark that begins a stream: after the opening comment it would be part of a field's name. */
function withoutMark(): (piece: Uint8Array) => Uint8Array {
  let leftOut = 0;
  return (piece) => {
    const before = leftOut;
    let at = 0;
    while (leftOut < MARK.length && piece[at] === MARK[leftOut]) {
      at++;
      leftOut++;
    }
    if (leftOut === MARK.length || at === piece.length) return piece.subarray(at);
    leftOut = MARK.length;
    return before === 0 ? piece : Buffer.concat([MARK.subarray(0, before), piece]);
  };
}

type Controller = ReadableStreamDefaultController<Uint8Array>;

export function relayBody(options: RelayOptions): ReadableStream<Uint8Array> {
  const { chunks: decoded, timeouts, filter, comments, ...events } = options;
  const chunks = filter === null ? decoded : filter(decoded);
  let next: Promise<IteratorResult<Uint8Array, void>> | null = null;
  let silenceMs = comments?.firstMs ?? null;
  let relayed: Uint8Array | null = null;
  let hasBegun = false;
  /** A comment is a line of its own, so it may come only between two lines. */
  let isBetweenLines = true;
  let passed = (piece: Uint8Array): Uint8Array => piece;
  let isOver = false;

  async function end(how: Ended, error?: unknown): Promise<boolean> {
    if (isOver) return false;
    isOver = true;
    timeouts.end();
    return events.ended(how, error);
  }

  function comment(controller: Controller): void {
    controller.enqueue(hasBegun ? COMMENT : OPENING);
    if (!hasBegun) passed = withoutMark();
    hasBegun = true;
  }

  /** Breaks the body off, so that the caller sees no clean end, after the bytes so far have been sent. */
  async function breakOff(controller: Controller, how: Ended, error?: unknown): Promise<void> {
    // So that Bun sends the head: see above.
    if (!hasBegun && comments !== null) comment(controller);
    hasBegun = true;
    await Promise.all([end(how, error), Bun.sleep(FLUSH_MS)]);
    controller.error(new Error("the response ended early"));
  }

  async function endWhole(controller: Controller): Promise<void> {
    if (await end("whole")) controller.close();
    else await breakOff(controller, "failed");
  }

  /**
   * Frees the last piece, which the server has written or copied when it asks for the next one. The garbage collector would
   * leave ten bodies of 10 MiB in memory, and memory that is new to the process costs more than the copy into it.
   */
  function freeRelayed(): void {
    if (relayed !== null) freeMemory(relayed);
    relayed = null;
  }

  async function pull(controller: Controller): Promise<void> {
    freeRelayed();
    if (next === null) timeouts.waitFor("upstream");
    next ??= nextOf(chunks);
    if (silenceMs !== null && isBetweenLines && !(await endsWithin(silenceMs, next))) {
      silenceMs = comments?.nextMs ?? null;
      comment(controller);
      return;
    }
    const { done, value } = await next;
    timeouts.throwIfStopped();
    next = null;
    silenceMs = comments?.nextMs ?? null;
    if (done) return endWhole(controller);
    events.piece(value);
    if (filter === null) relayed = value;
    const piece = passed(value);
    if (piece.length === 0) return pull(controller);
    isBetweenLines = piece.at(-1) === LINE_FEED;
    timeouts.waitFor("caller");
    hasBegun = true;
    controller.enqueue(piece);
  }

  return new ReadableStream<Uint8Array>(
    {
      start(controller) {
        // Between two pulls nothing else would notice a stop.
        const onStop = () => {
          // Whether a whole response is broken off while its end is being recorded is for the record to say.
          if (!isOver) void breakOff(controller, "broken");
        };
        timeouts.signal.addEventListener("abort", onStop, { once: true });
        // The stop may have come between the head and here, and of a caller that has gone nothing is pulled.
        if (timeouts.signal.aborted) onStop();
      },
      async pull(controller) {
        try {
          await pull(controller);
        } catch (error) {
          await breakOff(controller, error instanceof OutboundError ? "broken" : "failed", error);
        }
      },
      cancel() {
        // The caller has left, so no opening comment is needed.
        hasBegun = true;
        timeouts.stop("cancelled");
      },
    },
    { highWaterMark: 0 },
  );
}

function nextOf(chunks: Chunks): Promise<IteratorResult<Uint8Array, void>> {
  const next = chunks.next();
  // A failure while nobody awaits it is no unhandled rejection: the next pull, or the timeouts, report it.
  next.catch(() => {});
  return next;
}
