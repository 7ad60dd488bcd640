// One exchange with an upstream, from its credential to the answer that goes on to the caller. A request is sent again only
// when it certainly never reached the upstream.

import type { Call } from "../../core/call.ts";
import type { Log } from "../../core/log.ts";
import {
  bodyChunks,
  type Chunks,
  type DecodedFor,
  type DecoderShare,
  isEncoded,
  Undecodable,
} from "../../http/client/body.ts";
import { type Answer, OutboundError, type ReadAhead } from "../../http/client/exchange.ts";
import { type Outbound, requestSafely } from "../../http/client/outbound.ts";
import { BODILESS } from "../../http/client/response-parser.ts";
import { MAX } from "../../kernel/limits.ts";
import { unlessAborted, untilFirst } from "../../kernel/wait.ts";
import { untilStored } from "../../storage/failures.ts";
import { type CallBody, freeMemory } from "../../wire/body.ts";
import { isEventStream } from "../../wire/event-stream.ts";
import type { DeniedTools } from "../../wire/tool-list.ts";
import { CallError, type CallStop, credentialProblem } from "../upstream/failure.ts";
import { type CredentialHeader, credentialHeaders } from "../upstream/headers.ts";
import { answerHeaders, type Budget, type ResponseRecorder } from "./response.ts";
import { filterEvents, filterJson } from "./tool-filter.ts";

/** What is to be sent: what a request (proxy/stream-routes.ts) has become when it is admitted. */
export interface OpenedRequest {
  readonly tenant: string;
  readonly agentId: string;
  readonly url: string;
  readonly credential_ref: string | null;
  readonly headers: Call["headers"];
  readonly request_id: string;
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
  /** Headers that the gateway adds, the credential aside. */
  readonly own: ReadonlyArray<readonly [name: string, value: string]>;
  /** Null when no list of tools can be in the answer. */
  readonly isDenied: DeniedTools | null;
  /** After how much silence a comment shows that an event stream is still there; null for never. */
  readonly commentMs: number | null;
  /** Headers of the answer beside the upstream's. */
  readonly responseHeaders: Readonly<Record<string, string>>;
  /** Whether the claim of this process still holds. Asked right before the upstream is dialled. */
  isOurs(): Promise<boolean>;
  /** Called once, if there was an answer. A whole answer ends for the caller after this. */
  ended(how: Ended): Promise<void>;
}

/** @param sent called when the body has been sent, which may be after the head. @throws what `upstreamFailureOf` knows */
export async function headOf(
  deps: ExchangeDeps,
  { opened, timeouts, recorder, method, own, isOurs }: StreamExchange,
  body: CallBody | null,
  sent?: () => void,
): Promise<Answer> {
  const { signal } = timeouts;
  timeouts.waitFor("head");
  signal.throwIfAborted();
  const { credential_ref: ref } = opened;
  const credential = ref === null ? null : await unlessAborted(signal, credentialOf(deps, opened, ref, signal));
  if (!(await unlessAborted(signal, isOurs()))) {
    throw new CallError("internal", "ended elsewhere", "the call was ended before it was made");
  }
  const headers = [...opened.headers, ...own, ...credentialHeaders(credential)];
  recorder.dialled();
  const { url, tenant } = opened;
  const ahead = deps.readAhead.of(tenant);
  const request = { method, headers, body, signal, tenant, sent, ahead };
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
    const { header } = await untilStored(
      () => resolveCredential(tenant, credential_ref, url),
      () => signal.aborted,
    );
    return header;
  } catch (error) {
    if (!signal.aborted) log.warn("credential_not_resolved", { tenant, credential_ref, error });
    throw credentialProblem("credential not resolved");
  }
}

export async function answerOf(
  { filterMemory, decoders }: ExchangeDeps,
  exchange: StreamExchange,
  response: Answer,
): Promise<Response> {
  const { opened, timeouts, recorder, commentMs, responseHeaders, method, ended } = exchange;
  const { status } = response;
  const headers = answerHeaders(response, responseHeaders, method === "GET");
  const isEvents = isEventStream(response);
  // Proxies before the gateway are asked to hold nothing back (MCP, streamable HTTP).
  if (isEvents && method === "POST") headers.set("x-accel-buffering", "no");
  const chunks = await decodedChunks(response, timeouts, decodedForExchange(decoders, opened), isEvents);
  const body = relayBody({
    chunks,
    timeouts,
    filter: response.ok ? filterOf(exchange, filterMemory, isEvents) : null,
    comments: isEvents ? { firstMs: 50, nextMs: commentMs } : null,
    piece: recorder.piece,
    ended,
  });
  if (!BODILESS.has(status)) return new Response(body, { status, headers });
  // A response without a body is never pulled from, so read it to its end here.
  await new Response(body).bytes().catch(() => {});
  return new Response(null, { status, headers });
}

/** @throws Undecodable when there is no memory in time, since the caller waits for the head meanwhile */
function decodedForExchange(decoders: DecoderShare, { tenant, agentId: agent }: OpenedRequest): DecodedFor {
  return {
    tenant,
    async decoderMemory(bytes, closing, evict) {
      const wait = AbortSignal.timeout(MAX.decoderWaitMs);
      try {
        return await untilFirst([closing, wait], (signal) => decoders.take({ tenant, agent }, bytes, signal, evict));
      } catch (error) {
        closing.throwIfAborted();
        throw new Undecodable("no memory for its encoding in time", { cause: error });
      }
    },
  };
}

function filterOf(
  { isDenied, opened: { tenant }, timeouts: { signal } }: StreamExchange,
  filterMemory: Budget,
  isEvents: boolean,
) {
  if (isDenied === null) return null;
  const options = { isDenied, bytesMax: MAX.toolAnswerBytes, memory: filterMemory(tenant), tenant, signal };
  return isEvents ? filterEvents(options) : filterJson(options);
}

// The timeouts of one exchange with an upstream, and the reason why it was stopped. Only the side that is waited for can run
// out of time: while the caller reads slowly, the upstream does not count as silent.

export interface ExchangeTimeoutLimits {
  /** The wait for the head of the answer, in milliseconds. */
  readonly headMs: number;
  /** Each silence of the upstream after it; null for no limit. */
  readonly silenceMs: number | null;
  /** How long the caller may leave available bytes unread. */
  readonly callerMs: number;
}

export function startExchangeTimeouts(
  { headMs, silenceMs, callerMs }: ExchangeTimeoutLimits,
  callerSignal: AbortSignal,
) {
  const controller = new AbortController();
  const limits = { head: headMs, upstream: silenceMs, caller: callerMs };
  let limit: number | null = null;
  let since = 0;
  let dueAt = Number.POSITIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let isOver: CallStop = "timeout";

  const stop = (why: CallStop) => {
    clearTimeout(timer);
    if (!controller.signal.aborted) controller.abort(why);
  };
  const onGone = () => stop("cancelled");

  /** No new timer for each piece: a timer that fires too early is armed again for the rest of the time. */
  function arm(at: number): void {
    clearTimeout(timer);
    dueAt = at;
    timer = setTimeout(look, Math.max(0, at - performance.now()));
  }

  function look(): void {
    dueAt = Number.POSITIVE_INFINITY;
    if (limit === null) return;
    if (performance.now() - since >= limit) stop(isOver);
    else arm(since + limit);
  }

  callerSignal.addEventListener("abort", onGone, { once: true });
  if (callerSignal.aborted) onGone();
  return {
    /** Its reason is a CallStop. */
    signal: controller.signal,
    stop,
    waitFor(whom: "head" | "upstream" | "caller") {
      limit = limits[whom];
      since = performance.now();
      isOver = whom === "caller" ? "cancelled" : "timeout";
      if (limit !== null && since + limit < dueAt && !controller.signal.aborted) arm(since + limit);
    },
    end() {
      clearTimeout(timer);
      limit = null;
      callerSignal.removeEventListener("abort", onGone);
    },
  };
}

export type ExchangeTimeouts = ReturnType<typeof startExchangeTimeouts>;

// The answer's body on its way to the caller, piece by piece as the caller takes it: nothing is read ahead, so a slow reader
// holds up the upstream and fills no memory. Measured on Bun 1.4.5: a stream that is pulled from waits for the socket to
// drain (59 MB after 600 MB to a reader that stops), while one of type "direct" does not; a stream that errors resets the
// connection, and the chunk that ends a body is never sent.
//
// Bun sends the end of the head only with the first bytes of the body (oven-sh/bun#33660). So an event stream that begins
// with silence opens with a comment, which event streams have for that; other answers wait. What has been taken from the
// stream is not sent before the event loop has turned, and a stream that errors earlier takes it along, the head too. So an
// answer that breaks off is held open for a moment first.

/** How an answer ended that had a head: `broken` by the upstream or by the timeouts, `failed` by the gateway. */
export type Ended = "whole" | "broken" | "failed";

export interface RelayOptions {
  /** Of the body as it is before Content-Encoding. */
  readonly chunks: Chunks;
  readonly timeouts: ExchangeTimeouts;
  readonly filter: ((chunks: Chunks) => Chunks) | null;
  /** After how much silence a comment is sent: at the start, and from then on. Null: no event stream, or no comment. */
  readonly comments: { readonly firstMs: number; readonly nextMs: number | null } | null;
  piece(bytes: Uint8Array): void;
  /** Called once. If the exchange was stopped, the timeouts' signal has the reason. A whole answer ends after this. */
  ended(how: Ended): Promise<void>;
}

/** Between the break of an answer and its error. One millisecond is enough, except on a busy machine. */
const FLUSH_MS = 100;

const OPENING = Buffer.from(":\n\n");
const COMMENT = Buffer.from(":\n");
const LINE_FEED = 0x0a;

/** An encoded event stream that is silent for so long has its head answered anyway. */
const FIRST_WAIT_MS = 50;

/**
 * The body of an answer, decoded. For an encoded body this waits for the first decoded bytes: until then the gateway can
 * still answer the caller with an error.
 * @throws Undecodable; the reason of the signal
 */
async function decodedChunks(
  response: Answer,
  timeouts: ExchangeTimeouts,
  decodedFor: DecodedFor,
  isEvents: boolean,
): Promise<Chunks> {
  const { signal } = timeouts;
  const chunks = bodyChunks(response, { maxBytes: Number.MAX_SAFE_INTEGER, signal, decodedFor });
  if (!isEncoded(response.headers)) return chunks;
  timeouts.waitFor("upstream");
  const first = nextOf(chunks);
  try {
    if (!isEvents || !(await isSilent(first, FIRST_WAIT_MS))) await first;
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

export function relayBody({
  chunks: decoded,
  timeouts,
  filter,
  comments,
  ...tell
}: RelayOptions): ReadableStream<Uint8Array> {
  const chunks = filter === null ? decoded : filter(decoded);
  let next: Promise<IteratorResult<Uint8Array, void>> | null = null;
  let silenceMs = comments?.firstMs ?? null;
  let passed: Uint8Array | null = null;
  let hasBegun = false;
  /** A comment is a line, and allowed between any two others. */
  let isBetweenLines = true;
  let isOver = false;

  async function over(how: Ended): Promise<void> {
    if (isOver) return;
    isOver = true;
    timeouts.end();
    await tell.ended(how);
  }

  /** Breaks the body off: never a clean end, and not before the bytes so far are on their way. */
  async function breakOff(controller: ReadableStreamDefaultController<Uint8Array>, how: Ended): Promise<void> {
    // Bun ends the head with the first bytes of the body, and a comment is allowed anywhere in an event stream.
    if (!hasBegun && comments !== null) controller.enqueue(OPENING);
    hasBegun = true;
    await Promise.all([over(how), Bun.sleep(FLUSH_MS)]);
    controller.error(new Error("the response ended early"));
  }

  /**
   * The server has written or copied a piece when it asks for the next. The collector would leave ten bodies of 10 MiB lying
   * about, and memory that is new to the process costs more than the copy into it.
   */
  function releasePassed(): void {
    if (passed !== null) freeMemory(passed);
    passed = null;
  }

  async function pull(controller: ReadableStreamDefaultController<Uint8Array>): Promise<void> {
    releasePassed();
    if (next === null) timeouts.waitFor("upstream");
    next ??= nextOf(chunks);
    if (silenceMs !== null && isBetweenLines && (await isSilent(next, silenceMs))) {
      silenceMs = comments?.nextMs ?? null;
      controller.enqueue(hasBegun ? COMMENT : OPENING);
      hasBegun = true;
      return;
    }
    const { done, value } = await next;
    next = null;
    silenceMs = comments?.nextMs ?? null;
    if (done) {
      await over("whole");
      controller.close();
      return;
    }
    tell.piece(value);
    isBetweenLines = value.at(-1) === LINE_FEED;
    timeouts.waitFor("caller");
    hasBegun = true;
    controller.enqueue(value);
    if (filter === null) passed = value;
  }

  return new ReadableStream<Uint8Array>(
    {
      start(controller) {
        // Without a pull in progress nothing else would notice.
        timeouts.signal.addEventListener("abort", () => {
          // A whole answer that is being recorded still ends whole.
          if (!isOver) void breakOff(controller, "broken");
        });
      },
      async pull(controller) {
        try {
          await pull(controller);
        } catch (error) {
          await breakOff(controller, error instanceof OutboundError ? "broken" : "failed");
        }
      },
      cancel() {
        // The caller has left, so there is nobody to tell.
        hasBegun = true;
        timeouts.stop("cancelled");
      },
    },
    { highWaterMark: 0 },
  );
}

function nextOf(chunks: Chunks): Promise<IteratorResult<Uint8Array, void>> {
  const next = chunks.next();
  // It may fail while nobody pulls. The timeouts report that.
  next.catch(() => {});
  return next;
}

/** Rejects as `next` does. One promise and one timer for each piece, where `Promise.race` makes several. */
function isSilent(next: Promise<unknown>, ms: number): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms, true);
    const came = () => {
      clearTimeout(timer);
      resolve(false);
    };
    next.then(came, (error) => {
      clearTimeout(timer);
      reject(error);
    });
  });
}
