// One exchange with an upstream, from its credential to the answer that goes on to the caller, and what an exchange
// comes to that got no answer. A request is sent again only when it certainly never reached the upstream.
import { unlessAborted } from "../../concurrency/deadline.ts";
import { Fault, type FaultKind } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { ErrorClass } from "../../core/states.ts";
import { Undecodable } from "../../http/codings.ts";
import type { DecodedFor } from "../../http/decode.ts";
import type { DecoderShare } from "../../http/decoder-share.ts";
import { type Outbound, OutboundError } from "../../http/outbound.ts";
import type { ReadAhead } from "../../http/read-ahead.ts";
import { BODILESS } from "../../http/response-parser.ts";
import { requestSafely } from "../../http/retry.ts";
import { untilStored } from "../../storage/persist.ts";
import type { ExchangeStop, ExchangeTimeouts } from "./exchange-timeouts.ts";
import type { Budget } from "./memory-budget.ts";
import { decodedChunks, type Ended, relayBody } from "./relay.ts";
import { answerHeaders } from "./response-headers.ts";
import type { ResponseRecorder } from "./response-recorder.ts";
import type { OpenedRequest } from "./service.ts";
import { filterEvents, filterJson, HELD_BYTES_MAX } from "./tool-filter.ts";

/** After so much silence an event stream opens with a comment: see relay.ts. */
const FIRST_COMMENT_MS = 50;
/** For the memory that the answer's encoding takes. */
const DECODER_WAIT_MS = 10_000;

export interface ExchangeDeps {
  readonly log: Log;
  readonly outbound: Outbound;
  readonly filterMemory: Budget;
  readonly readAhead: ReadAhead;
  readonly decoders: DecoderShare;
  resolveCredential(tenant: string, ref: string, url: string): Promise<ExchangeCredential>;
}

interface ExchangeCredential {
  readonly header: { readonly name: string; readonly value: string } | null;
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
  readonly told: Readonly<Record<string, string>>;
  /** Whether the call still belongs to whoever makes it here: asked right before it is dialled. */
  isOurs(): Promise<boolean>;
  /** Told once, when there was an answer. A whole one ends for its caller when this has. */
  ended(how: Ended): Promise<void>;
}

class CredentialProblem extends Error {}

class EndedElsewhere extends Error {}

/**
 * The head of the answer.
 *
 * @param sent told when the body has left, which may be after the head has come
 * @throws what `nothingOf` tells of
 */
export async function headOf(
  deps: ExchangeDeps,
  { opened, timeouts, recorder, method, own, isOurs }: StreamExchange,
  body: Uint8Array | null,
  sent?: () => void,
): Promise<Response> {
  const { signal } = timeouts;
  timeouts.waitFor("head");
  signal.throwIfAborted();
  const credential = await unlessAborted(signal, credentialOf(deps, opened, signal));
  if (!(await unlessAborted(signal, isOurs()))) throw new EndedElsewhere("ended elsewhere");
  recorder.dialled();
  const headers = [...opened.headers, ...own, ...credential];
  const { url, tenant } = opened;
  const ahead = deps.readAhead.of(tenant);
  const request = { method, headers, body, signal, tenant, sent, ahead };
  const response = await requestSafely(deps.outbound, url, request);
  recorder.head(response);
  return response;
}

async function credentialOf(
  { resolveCredential, log }: ExchangeDeps,
  { tenant, credential_ref, url }: OpenedRequest,
  signal: AbortSignal,
): Promise<ReadonlyArray<readonly [string, string]>> {
  if (credential_ref === null) return [];
  try {
    const { header } = await untilStored(
      () => resolveCredential(tenant, credential_ref, url),
      () => signal.aborted,
    );
    return header === null ? [] : [[header.name, header.value]];
  } catch (error) {
    if (!signal.aborted) log.warn("credential_not_resolved", { tenant, credential_ref, error });
    throw new CredentialProblem("credential not resolved");
  }
}

/** The answer as it goes on to the caller. */
export async function answerOf(
  { filterMemory, decoders }: ExchangeDeps,
  exchange: StreamExchange,
  response: Response,
): Promise<Response> {
  const { opened, timeouts, recorder, commentMs, told, method, ended } = exchange;
  const { status } = response;
  const headers = answerHeaders(response, told, method === "GET");
  const isEvents = isEventStream(response);
  const chunks = await decodedChunks(response, {
    timeouts,
    decodedFor: decodedForExchange(decoders, opened),
    isEvents,
  });
  const body = relayBody({
    chunks,
    timeouts,
    filter: filterOf(exchange, filterMemory, response.ok, isEvents),
    comments: isEvents ? { firstMs: FIRST_COMMENT_MS, nextMs: commentMs } : null,
    piece: recorder.piece,
    ended,
  });
  if (!BODILESS.has(status)) return new Response(body, { status, headers });
  // Nobody pulls from a body that there is none of.
  await new Response(body).bytes().catch(() => {});
  return new Response(null, { status, headers });
}

/** @throws Undecodable when there is no memory in time: the caller waits for its head meanwhile */
function decodedForExchange(decoders: DecoderShare, { tenant, agentId }: OpenedRequest): DecodedFor {
  return {
    tenant,
    memory: {
      async take(bytes, closing, giveWay) {
        const signal = AbortSignal.any([closing, AbortSignal.timeout(DECODER_WAIT_MS)]);
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

function isEventStream(response: Response): boolean {
  return /^\s*text\/event-stream\s*(;|$)/i.test(response.headers.get("content-type") ?? "");
}

function filterOf(
  { isDenied, commentMs, opened: { tenant }, timeouts: { signal } }: StreamExchange,
  memory: Budget,
  isOk: boolean,
  isEvents: boolean,
) {
  const options = { bytesMax: HELD_BYTES_MAX, memory: memory(tenant), tenant, signal };
  const denied = isOk ? isDenied : null;
  // Comments come between events, so those pass whole where there are any.
  if (isEvents && (denied ?? commentMs) !== null) return filterEvents({ ...options, isDenied: denied });
  return denied === null ? null : filterJson({ ...options, isDenied: denied });
}

export const STOPPED: Readonly<Record<ExchangeStop, ErrorClass>> = {
  timeout: "timeout",
  cancelled: "cancelled",
  shutdown: "internal",
  crowded: "internal",
};

const STOPPED_MESSAGES: Readonly<Record<Exclude<ExchangeStop, "timeout">, string>> = {
  cancelled: "the call was cancelled",
  shutdown: "the gateway stopped before the upstream answered",
  crowded: "the upstream took the body too slowly, and others needed the memory",
};

export interface UpstreamFailure {
  readonly errorClass: ErrorClass;
  /** For the log, without any secret. */
  readonly detail: string;
  readonly kind: FaultKind;
  /** For the caller. */
  readonly message: string;
}

/** What an exchange came to that ended with this error instead of an answer. */
export function upstreamFailureOf(error: unknown, signal: AbortSignal): UpstreamFailure {
  if (signal.aborted) return stoppedBefore(signal.reason as ExchangeStop);
  if (error instanceof CredentialProblem) {
    const message = "the agent's credential could not be resolved";
    return { errorClass: "credential_error", detail: error.message, kind: "bad_gateway", message };
  }
  if (error instanceof EndedElsewhere) {
    const message = "the call was ended before it was made";
    return { errorClass: "internal", detail: error.message, kind: "bad_gateway", message };
  }
  if (error instanceof OutboundError) {
    const detail = error.message;
    if (error.kind !== "blocked") {
      return {
        errorClass: "upstream_5xx",
        detail,
        kind: "bad_gateway",
        message: "the upstream gave no answer",
      };
    }
    const message = "the upstream's address is not allowed";
    return { errorClass: "ssrf_blocked", detail, kind: "bad_gateway", message };
  }
  if (error instanceof Undecodable) {
    const message = "the upstream's answer can't be decoded";
    return { errorClass: "internal", detail: error.message, kind: "bad_gateway", message };
  }
  if (error instanceof Fault) {
    return { errorClass: "internal", detail: error.message, kind: error.kind, message: error.message };
  }
  // Only the name: the message of an unforeseen error may quote a header.
  const detail = error instanceof Error ? error.name : "unknown error";
  return { errorClass: "internal", detail, kind: "internal", message: "unexpected" };
}

function stoppedBefore(why: ExchangeStop): UpstreamFailure {
  const errorClass = STOPPED[why];
  if (why === "timeout") {
    const message = "the upstream gave no answer in time";
    return { errorClass, detail: "deadline", kind: "gateway_timeout", message };
  }
  return { errorClass, detail: why, kind: "bad_gateway", message: STOPPED_MESSAGES[why] };
}
