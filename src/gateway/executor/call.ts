// One transactional upstream call, from the job to its outcome: the deadline and the cancel around it, the
// request as every protocol sends it, and the plain http call. A request is sent again only when it certainly
// never reached the upstream.
import { CLAIM_BELIEVED_MS, isWallOlder } from "../../core/age.ts";
import { CAPTURE_BYTES_MAX } from "../../core/limits.ts";
import type { ErrorClass } from "../../core/states.ts";
import { readBody } from "../../http/body.ts";
import { Undecodable } from "../../http/codings.ts";
import type { DecodedFor } from "../../http/decode.ts";
import type { DecoderShare } from "../../http/decoder-share.ts";
import { type Outbound, OutboundError } from "../../http/outbound.ts";
import { requestSafely } from "../../http/retry.ts";
import { type BodyDigest, bodyDigest } from "./digest.ts";
import type { Job, Outcome, WorkerSettings } from "./job.ts";
import {
  answered,
  type CallStop,
  failed,
  keep,
  lostCall,
  newTrace,
  noteHead,
  type Trace,
} from "./outcome.ts";
import { isCounted } from "./workers/messages.ts";
import type { MemoryHold, ResponseMemory } from "./workers/response-memory.ts";

/** What a call needs; the signal's reason is a Stop. */
export interface CallContext {
  readonly outbound: Outbound;
  readonly settings: WorkerSettings;
  readonly signal: AbortSignal;
  readonly trace: Trace;
  /** The memory for what is kept of the answer. */
  readonly hold: MemoryHold;
  readonly decodedFor: DecodedFor;
}

/** What all calls of a worker share. */
export interface Upstreams {
  readonly outbound: Outbound;
  readonly settings: WorkerSettings;
  readonly memory: ResponseMemory;
  readonly decoders: DecoderShare;
}

export interface UpstreamRequest {
  readonly url: string;
  readonly method: "POST" | "DELETE";
  readonly headers: ReadonlyArray<[string, string]>;
  readonly body: Uint8Array | null;
}

/** Ends a call with an error class and a reason for the log; the class says nothing about the connection. */
export class CallError extends Error {
  readonly errorClass: ErrorClass;
  constructor(errorClass: ErrorClass, detail: string) {
    super(detail);
    this.errorClass = errorClass;
  }
}

/** What can stand in a header: visible Latin-1, space and tab (RFC 9110, section 5.5). */
const HEADER_VALUE = /^[\t\x20-\x7e\x80-\xff]*$/;

/**
 * Runs `call` under the deadline of the settings and turns whatever happens into an outcome. Never rejects.
 *
 * @param stop of this call alone: aborted, by a Stop, when the caller cancels, and here when its time is over
 * @param keep gets what lets go of the memory for a long response; without it that is done at once
 */
export async function runCall(
  job: Job,
  { outbound, settings, memory, decoders }: Upstreams,
  stop: AbortController,
  call: (job: Job, context: CallContext) => Promise<Outcome>,
  keep: (release: () => void) => void = (release) => release(),
): Promise<Outcome> {
  const halt = (reason: CallStop) => stop.abort(reason);
  const deadline = setTimeout(halt, settings.upstream_timeout_ms, "timeout");
  const trace = newTrace();
  const hold = memory.hold(job.tenant, job.agent_id, stop.signal);
  let isKept = false;
  try {
    stop.signal.throwIfAborted();
    if (job.claim_seen_at !== null && isWallOlder(job.claim_seen_at, CLAIM_BELIEVED_MS)) {
      return { ...lostCall("the claim is too old to be believed"), is_stale: true };
    }
    const { signal } = stop;
    const decodedFor = decodedForCall(decoders, hold, signal);
    const outcome = await call(job, { outbound, settings, signal, trace, hold, decodedFor });
    isKept = isCounted(outcome);
    return outcome;
  } catch (error) {
    return judgeFailure(error, stop.signal, trace);
  } finally {
    if (isKept) keep(hold.release);
    else hold.release();
    clearTimeout(deadline);
  }
}

/**
 * What decoders need is taken before any of the body is kept, and that with nothing held: so nobody waits in a circle.
 *
 * @param signal ends a wait
 */
export function decodedForCall(
  decoders: DecoderShare,
  { tenant, agentId, ahead }: MemoryHold,
  signal: AbortSignal,
): DecodedFor {
  const take: DecodedFor["memory"]["take"] = async (bytes, closing, giveWay) => {
    const either = AbortSignal.any([closing, signal]);
    const giveBack = await decoders.take(tenant, agentId, bytes, either, giveWay);
    ahead.exempt();
    return giveBack;
  };
  return { tenant, memory: { take } };
}

function judgeFailure(error: unknown, signal: AbortSignal, trace: Trace): Outcome {
  const now = performance.now();
  if (signal.aborted) {
    const isTimeout = signal.reason === "timeout";
    return failed(trace, isTimeout ? "timeout" : "cancelled", isTimeout ? "deadline" : "cancelled", now);
  }
  if (error instanceof CallError) return failed(trace, error.errorClass, error.message, now);
  if (error instanceof Undecodable) return failed(trace, "internal", error.message, now);
  if (!(error instanceof OutboundError)) {
    // Only the name: the message of an unforeseen error may quote a header.
    return failed(trace, "internal", error instanceof Error ? error.name : "unknown error", now);
  }
  if (error.kind !== "blocked") return failed(trace, "upstream_5xx", error.message, now);
  return failed({ ...trace, dialled_at: null }, "ssrf_blocked", error.message, now);
}

/** The plain http call: what the upstream answers is the result. */
export async function callHttp(job: Job, context: CallContext): Promise<Outcome> {
  const headers = [...job.call.headers.map(([name, value]): [string, string] => [name, value])];
  const response = await send(context, {
    url: job.call.url,
    method: "POST",
    headers: [...headers, ...ownHeaders(job)],
    body: job.body,
  });
  noteHead(context.trace, response);
  const { capture, receipt } = job.call;
  const digest = receipt ? bodyDigest() : null;
  const start = await readStart(context, response, capture ? CAPTURE_BYTES_MAX : 0, digest);
  const body = { start, size: context.trace.resp_size ?? 0, sha256: digest?.of(start) ?? null };
  return answered(context.trace, response.status, keep(body, capture), performance.now());
}

/** The headers that the gateway adds to every call. */
export function ownHeaders(job: Job): Array<[string, string]> {
  return [
    ["x-request-id", job.call.request_id],
    ["x-service-invocation-id", job.id],
    ...credentialHeader(job.credential),
  ];
}

export function credentialHeader(credential: Job["credential"]): Array<[string, string]> {
  if (credential === null) return [];
  if (!HEADER_VALUE.test(credential.value)) {
    throw new CallError("credential_error", "the secret holds characters that no header can carry");
  }
  return [[credential.name, credential.value]];
}

/**
 * Sends a request and resolves with the head of the answer.
 *
 * @throws OutboundError; the signal's reason
 */
export function send(context: CallContext, request: UpstreamRequest): Promise<Response> {
  const { outbound, signal, trace, hold } = context;
  const { url, ...init } = request;
  trace.dialled_at ??= performance.now();
  return requestSafely(outbound, url, { ...init, signal, tenant: hold.tenant, ahead: hold.ahead });
}

/**
 * The first bytes of a body that is read to its end; `resp_size` of the trace becomes its whole size.
 *
 * @param digest told of what follows them
 */
export async function readStart(
  context: CallContext,
  response: Response,
  captureBytes: number,
  digest: BodyDigest | null = null,
): Promise<Uint8Array> {
  const body = await readBody(response, {
    maxBytes: context.settings.max_response_bytes,
    captureBytes,
    grow: context.hold.grow,
    decodedFor: context.decodedFor,
    ...(digest !== null && { beyond: digest.beyond }),
  });
  context.trace.resp_size = body.size;
  if (body.tooLarge) throw tooLarge(context.settings);
  return body.captured;
}

export function tooLarge(settings: WorkerSettings): CallError {
  return new CallError("internal", `the response is larger than ${settings.max_response_bytes} bytes`);
}
