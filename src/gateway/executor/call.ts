// One transactional upstream call, from the job to its outcome: the deadline and the cancel around it, the
// request as every protocol sends it, and the plain http call. A request is sent again only when it certainly
// never reached the upstream.
import { createHash, type Hash } from "node:crypto";
import {
  type BodyRead,
  bodyAtOnce,
  createDecoderShare,
  type DecodedFor,
  type DecoderShare,
  readBody,
} from "../../http/client/body.ts";
import { type Answer, type AnswerReadAhead, ReadAhead } from "../../http/client/exchange.ts";
import { type Outbound, type OutboundRequest, requestSafely } from "../../http/client/outbound.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairQueue, createFairShare, enter, type FairQueue } from "../../kernel/share.ts";
import { CLAIM_BELIEVED_MS, isWallOlder } from "../../kernel/time.ts";
import { type Stoppable, type StopSignal, untilFirst } from "../../kernel/wait.ts";
import type { CallBody } from "../../wire/body.ts";
import { CallError, type CallStop, upstreamFailureOf } from "../upstream/failure.ts";
import { credentialHeaders, ownHeaders } from "../upstream/headers.ts";
import {
  answered,
  FREE_BYTES,
  failed,
  isCounted,
  type Job,
  keep,
  lostCall,
  newTrace,
  noteHead,
  type Outcome,
  type Trace,
  type WorkerSettings,
} from "./job.ts";

/** What a call needs; the signal's reason is a CallStop. */
export interface CallContext {
  readonly outbound: Outbound;
  readonly settings: WorkerSettings;
  readonly signal: StopSignal;
  readonly trace: Trace;
  /** The memory for what is kept of the answer, and for its decoders. */
  readonly hold: MemoryHold;
}

/** What all calls of a worker share. */
export interface Upstreams {
  readonly outbound: Outbound;
  readonly settings: WorkerSettings;
  readonly memory: ResponseMemory;
}

export interface UpstreamRequest {
  readonly url: string;
  readonly method: "POST" | "DELETE";
  readonly headers: OutboundRequest["headers"];
  readonly body: CallBody | null;
}

/**
 * Runs `call` under the deadline of the settings and turns all that happens into an outcome. Never rejects.
 *
 * @param stop of this call alone: aborted, by a CallStop, when the caller cancels, and here when its time is over
 * @param keep receives the function that releases the memory of a long response; by default it is called at once
 */
export async function runCall(
  job: Job,
  { outbound, settings, memory }: Upstreams,
  stop: Stoppable,
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
    const outcome = await call(job, { outbound, settings, signal: stop.signal, trace, hold });
    isKept = isCounted(outcome);
    return outcome;
  } catch (error) {
    return judgeFailure(error, stop.signal, trace);
  } finally {
    if (isKept) keep(() => hold.release());
    else hold.release();
    clearTimeout(deadline);
  }
}

function judgeFailure(error: unknown, signal: StopSignal, trace: Trace): Outcome {
  const { errorClass, detail } = upstreamFailureOf(error, signal);
  // A blocked request was never dialled.
  const known = errorClass === "ssrf_blocked" ? { ...trace, dialled_at: null } : trace;
  return failed(known, errorClass, detail, performance.now());
}

/** The plain http call: what the upstream answers is the result. */
export async function callHttp(job: Job, context: CallContext): Promise<Outcome> {
  const response = await send(context, {
    url: job.call.url,
    method: "POST",
    headers: [...job.call.headers, ...jobHeaders(job)],
    body: job.body,
  });
  noteHead(context.trace, response);
  const { capture, receipt } = job.call;
  const digest = receipt ? createBodyDigest() : null;
  const wanted = [context, response, capture ? MAX.capturedBytes : 0, digest] as const;
  const start = startAtOnce(...wanted) ?? (await readStart(...wanted));
  const body = { start, size: context.trace.resp_size ?? 0, sha256: digest?.of(start) ?? null };
  return answered(context.trace, response.status, keep(body, capture), performance.now());
}

/** The headers that the gateway adds to every call. */
export function jobHeaders({ id, call, credential }: Job): Array<[string, string]> {
  return [...ownHeaders(call.request_id, id), ...credentialHeaders(credential)];
}

/**
 * Sends a request and resolves with the head of the answer.
 *
 * @throws OutboundError; the signal's reason
 */
export function send(context: CallContext, request: UpstreamRequest): Promise<Answer> {
  const { outbound, signal, trace, hold } = context;
  const { url, method, headers, body } = request;
  trace.dialled_at ??= performance.now();
  return requestSafely(outbound, url, { method, headers, body, signal, tenant: hold.tenant, ahead: hold.ahead });
}

/**
 * The first bytes of a body that is read to its end; `resp_size` of the trace becomes its whole size.
 *
 * @param digest receives the bytes after the first ones
 */
export async function readStart(
  context: CallContext,
  response: Answer,
  captureBytes: number,
  digest: BodyDigest | null = null,
): Promise<Uint8Array> {
  return startOf(context, await readBody(response, readLimits(context, captureBytes, digest)));
}

/** `readStart` of a body that is there already, as most are: a wait would cost as much as a parse of the answer. */
function startAtOnce(
  context: CallContext,
  response: Answer,
  captureBytes: number,
  digest: BodyDigest | null,
): Uint8Array | null {
  const body = bodyAtOnce(response, readLimits(context, captureBytes, digest));
  return body === null ? null : startOf(context, body);
}

function readLimits({ settings, hold }: CallContext, captureBytes: number, digest: BodyDigest | null) {
  return {
    maxBytes: settings.max_response_bytes,
    captureBytes,
    grow: (bytes: number) => hold.grow(bytes),
    decodedFor: hold,
    ...(digest !== null && { beyond: digest.beyond }),
  };
}

function startOf({ trace, settings }: CallContext, { size, tooLarge: isTooLarge, captured }: BodyRead): Uint8Array {
  trace.resp_size = size;
  if (isTooLarge) throw tooLarge(settings);
  return captured;
}

export function tooLarge(settings: WorkerSettings): CallError {
  return new CallError("internal", `the response is larger than ${settings.max_response_bytes} bytes`);
}

/** The SHA-256 of a response, taken while it is read: only its start is ever kept. */
function createBodyDigest() {
  const begin = (start: Uint8Array) => createHash("sha256").update(start);
  let begun: Hash | null = null;
  return {
    /** Takes what follows the start, piece by piece. */
    beyond(rest: Uint8Array, start: () => Uint8Array) {
      begun ??= begin(start());
      begun.update(rest);
    },
    /** The digest in lower hex, at the end. */
    of: (start: Uint8Array) => (begun ?? begin(start)).digest("hex"),
  };
}

type BodyDigest = ReturnType<typeof createBodyDigest>;

// Limits the memory for captured answers of a worker. Short answers are free. A longer one first takes a slot as large as all
// it may ever need, and is not read on before it has it. So no answer that has begun waits for another that has, and a
// waiting one loses nothing but time, up to its own deadline. An encoded answer takes the memory of its decoders before its
// slot, with nothing else held, so no circular wait is possible.

/** What is captured, and the slack that the exchange of an id needs. */
const SLOT_BYTES = MAX.capturedBytes + 8 * 1024;

/** What one call holds. */
export class MemoryHold implements DecodedFor {
  readonly tenant: string;
  readonly agent: string;
  /** Bytes that arrive while the answer waits for its slot. */
  readonly ahead: AnswerReadAhead;
  readonly #memory: ResponseMemory;
  readonly #signal: StopSignal;
  #hasSlot = false;

  constructor(memory: ResponseMemory, tenant: string, agent: string, signal: StopSignal) {
    this.tenant = tenant;
    this.agent = agent;
    this.ahead = memory.readAhead.of(tenant);
    this.#memory = memory;
    this.#signal = signal;
  }

  /** To be awaited before `bytes` in all are kept; undefined when there is nothing to wait for. */
  grow(bytes: number): Promise<void> | undefined {
    return this.#hasSlot || bytes <= FREE_BYTES ? undefined : this.#takeSlot();
  }

  async #takeSlot(): Promise<void> {
    await enter(this.#memory.slots, { tenant: this.tenant, agent: this.agent, amount: 1 }, this.#signal);
    this.#hasSlot = true;
    // From here on it is read regardless of its tenant's other answers, since they may wait for its slot.
    this.ahead.exempt();
  }

  async decoderMemory(bytes: number, closing: StopSignal, evict: () => void): Promise<() => void> {
    const giveBack = await untilFirst([closing, this.#signal], (signal) =>
      this.#memory.decoders.take(this, bytes, signal, evict),
    );
    this.ahead.exempt();
    return giveBack;
  }

  release(): void {
    if (this.#hasSlot) this.#memory.slots.giveBack(this.tenant, this.agent, 1);
    this.#hasSlot = false;
  }
}

/** The memory of one of several workers. */
export class ResponseMemory {
  readonly slots: FairQueue;
  readonly readAhead: ReadAhead;
  readonly decoders: DecoderShare;

  constructor(workers: number, total = MAX.captureBytes) {
    // However many workers there are, a tenant alone must not have all slots of one.
    const size = Math.max(8, Math.floor(total / workers / SLOT_BYTES));
    this.slots = createFairQueue(createFairShare({ size }));
    this.readAhead = new ReadAhead(MAX.aheadBytes / workers);
    this.decoders = createDecoderShare(Math.max(MAX.decoderBytes / workers, MAX.workerDecoderBytes));
  }

  /** @param signal its reason ends a wait */
  hold(tenant: string, agent: string, signal: StopSignal): MemoryHold {
    return new MemoryHold(this, tenant, agent, signal);
  }
}
