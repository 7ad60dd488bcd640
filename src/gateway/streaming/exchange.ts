// One exchange with an upstream, from its credential to the answer that goes on to the caller.
// A request is sent again only when it certainly never reached the upstream.

import type { Log } from "../../core/log.ts";
import { type Answer, isEncoded, Undecodable } from "../../http/client/answer.ts";
import type { DecodedFor, DecoderShare } from "../../http/client/decode.ts";
import { type Outbound, requestSafely } from "../../http/client/outbound.ts";
import type { ReadAhead } from "../../http/client/read-ahead.ts";
import { BODILESS } from "../../http/client/response-parser.ts";
import { MAX } from "../../kernel/limits.ts";
import { unlessAborted } from "../../kernel/wait.ts";
import { untilStored } from "../../storage/failures.ts";
import type { CallBody } from "../../wire/body.ts";
import { CallError, type CallStop, credentialProblem } from "../upstream/failure.ts";
import { type CredentialHeader, credentialHeaders } from "../upstream/headers.ts";
import { decodedChunks, type Ended, relayBody } from "./relay.ts";
import { answerHeaders } from "./response-headers.ts";
import type { Budget, ResponseRecorder } from "./response-recorder.ts";
import type { OpenedRequest } from "./service.ts";
import { filterEvents, filterJson } from "./tool-filter.ts";

export interface ExchangeDeps {
  readonly log: Log;
  readonly outbound: Outbound;
  readonly filterMemory: Budget;
  readonly readAhead: ReadAhead;
  readonly decoders: DecoderShare;
  resolveCredential(tenant: string, ref: string, url: string): Promise<{ readonly header: CredentialHeader | null }>;
}

/** One exchange on its way. */
export interface StreamExchange {
  readonly opened: OpenedRequest;
  readonly timeouts: ExchangeTimeouts;
  readonly recorder: ResponseRecorder;
  readonly method: "POST" | "GET" | "DELETE";
  /** Headers that the gateway adds, the credential aside. */
  readonly own: ReadonlyArray<readonly [name: string, value: string]>;
  /** Null when no list of tools can be in the answer. */
  readonly isDenied: ((tool: string) => boolean) | null;
  /** After how much silence a comment shows that an event stream is still there; null for never. */
  readonly commentMs: number | null;
  /** Headers of the answer beside the upstream's. */
  readonly responseHeaders: Readonly<Record<string, string>>;
  /** Whether the claim of this process still holds. Asked right before the upstream is dialled. */
  isOurs(): Promise<boolean>;
  /** Called once, if there was an answer. A whole answer ends for the caller after this. */
  ended(how: Ended): Promise<void>;
}

/**
 * The head of the answer.
 *
 * @param sent called when the body has been sent, which may be after the head has come
 * @throws the errors that `upstreamFailureOf` knows
 */
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
  if (!(await unlessAborted(signal, isOurs()))) throw endedElsewhere();
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

function endedElsewhere(): CallError {
  return new CallError("internal", "ended elsewhere", "the call was ended before it was made");
}

/** The answer as it goes on to the caller. */
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
  const chunks = await decodedChunks(response, {
    timeouts,
    decodedFor: decodedForExchange(decoders, opened),
    isEvents,
  });
  const body = relayBody({
    chunks,
    // A decoder may use its memory again.
    arePiecesFree: !isEncoded(response.headers),
    timeouts,
    filter: filterOf(exchange, filterMemory, response.ok, isEvents),
    // After so much silence an event stream opens with a comment: see relay.ts.
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
function decodedForExchange(decoders: DecoderShare, { tenant, agentId }: OpenedRequest): DecodedFor {
  return {
    tenant,
    memory: {
      async take(bytes, closing, giveWay) {
        const signal = AbortSignal.any([closing, AbortSignal.timeout(MAX.decoderWaitMs)]);
        try {
          return await decoders.take(tenant, agentId, bytes, signal, giveWay);
        } catch (error) {
          closing.throwIfAborted();
          throw new Undecodable("no memory for its encoding in time", { cause: error });
        }
      },
    },
  };
}

function isEventStream(response: Answer): boolean {
  return /^\s*text\/event-stream\s*(;|$)/i.test(response.headers.get("content-type") ?? "");
}

function filterOf(
  { isDenied, commentMs, opened: { tenant }, timeouts: { signal } }: StreamExchange,
  memory: Budget,
  isOk: boolean,
  isEvents: boolean,
) {
  const options = { bytesMax: MAX.toolAnswerBytes, memory: memory(tenant), tenant, signal };
  const denied = isOk ? isDenied : null;
  // Comments go between events, so events must pass whole where comments are sent.
  if (isEvents && (denied ?? commentMs) !== null) return filterEvents({ ...options, isDenied: denied });
  return denied === null ? null : filterJson({ ...options, isDenied: denied });
}

// The timeouts of one exchange with an upstream, and the reason why it was stopped. Only the side that is waited for
// can run out of time: while the caller reads slowly, the upstream does not count as silent.

export interface ExchangeTimeoutLimits {
  /** The wait for the head of the answer, in milliseconds. */
  readonly headMs: number;
  /** Each silence of the upstream after it; null for no limit. */
  readonly silenceMs: number | null;
  /** How long the caller may leave available bytes unread. */
  readonly callerMs: number;
}

/** @param callerSignal aborted when the caller has gone */
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
    /** Restarts the time. */
    waitFor(whom: "head" | "upstream" | "caller") {
      limit = limits[whom];
      since = performance.now();
      isOver = whom === "caller" ? "cancelled" : "timeout";
      if (limit !== null && since + limit < dueAt && !controller.signal.aborted) arm(since + limit);
    },
    /** Stops all waiting. */
    end() {
      clearTimeout(timer);
      limit = null;
      callerSignal.removeEventListener("abort", onGone);
    },
  };
}

export type ExchangeTimeouts = ReturnType<typeof startExchangeTimeouts>;
