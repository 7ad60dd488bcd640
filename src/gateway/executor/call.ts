// Runs one transactional upstream call in a worker, from job to outcome: applies the deadline and the cancel, sends the
// request, and reads the response of a plain http agent (mcp/call.ts reads those of MCP servers). A request is sent again only
// when it certainly never reached the upstream.
import { createHash, type Hash } from "node:crypto";
import type { BodyRead, DecodedFor, DecoderShare } from "../../http/client/body.ts";
import { bodyAtOnce, createDecoderShare, readBody } from "../../http/client/body.ts";
import { type Answer, type AnswerReadAhead, ReadAhead } from "../../http/client/exchange.ts";
import { type Outbound, type OutboundRequest, requestSafely } from "../../http/client/outbound.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairQueue, createFairShare, enter, type FairQueue } from "../../kernel/share.ts";
import { CLAIM_BELIEVED_MS, isWallOlder } from "../../kernel/time.ts";
import { type Stoppable, type StopSignal, untilFirst } from "../../kernel/wait.ts";
import type { CallBody } from "../../wire/body.ts";
import { CallError, type CallStop, upstreamFailureOf } from "../upstream/failure.ts";
import { credentialHeaders, isDialling, newTrace, noteHead, ownHeaders, type Trace } from "../upstream/headers.ts";
import type { Job, Outcome, WorkerSettings } from "./job.ts";
import { answered, FREE_BYTES, failed, isCounted, keep, lostCall } from "./job.ts";

/** What one call needs. The reason of `signal` is a CallStop. */
export interface CallContext extends Omit<Upstreams, "memory"> {
  readonly signal: StopSignal;
  readonly trace: Trace;
  /** The memory that the captured response and its decoders take. */
  readonly hold: MemoryHold;
}

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
 * Runs `call` under the configured deadline and turns whatever happens into an outcome. Never rejects.
 * @param stop belongs to this call alone. It is aborted with a CallStop when the caller cancels, and here at the deadline
 * @param keepMemory receives the function that releases the memory of a long response; the default calls it at once
 */
export async function runCall(
  job: Job,
  { outbound, settings, memory }: Upstreams,
  stop: Stoppable,
  call: (job: Job, context: CallContext) => Promise<Outcome>,
  keepMemory: (release: () => void) => void = (release) => release(),
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
    if (isKept) keepMemory(() => hold.release());
    else hold.release();
    clearTimeout(deadline);
  }
}

function judgeFailure(error: unknown, signal: StopSignal, trace: Trace): Outcome {
  const failure = upstreamFailureOf(error, signal, isDialling(trace));
  // A blocked request was never dialled.
  const known = failure.errorClass === "ssrf_blocked" ? { ...trace, dialled_at: null } : trace;
  return failed(known, failure, performance.now());
}

/** Calls a plain http agent: the upstream's response is the result. */
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
  const reading = [context, response, capture ? MAX.capturedBytes : 0, digest] as const;
  const start = readStartIfArrived(...reading) ?? (await readStart(...reading));
  const body = { start, size: context.trace.resp_size ?? 0, sha256: digest?.of(start) ?? null };
  return answered(context.trace, response.status, keep(body, capture), performance.now());
}

export function jobHeaders({ id, call, credential }: Job): Array<[string, string]> {
  return [...ownHeaders(call.request_id, id), ...credentialHeaders(credential)];
}

/** Sends a request and resolves with the head of the answer. @throws OutboundError; the signal's reason */
export function send(context: CallContext, request: UpstreamRequest): Promise<Answer> {
  const { outbound, signal, trace, hold } = context;
  const { url, method, headers, body } = request;
  trace.dialled_at ??= performance.now();
  const connected = () => {
    trace.is_connected = true;
  };
  const { tenant, ahead } = hold;
  return requestSafely(outbound, url, { method, headers, body, signal, tenant, ahead, connected });
}

/**
 * Reads a body to its end and resolves with its first bytes. Sets `resp_size` of the trace to the size of the whole body.
 * @param digest receives the bytes that follow the captured ones
 */
export async function readStart(
  context: CallContext,
  response: Answer,
  captureBytes: number,
  digest: BodyDigest | null = null,
): Promise<Uint8Array> {
  return capturedStart(context, await readBody(response, readLimits(context, captureBytes, digest)));
}

/** The fast path of `readStart`, for bodies that have arrived in full, as most have: an await costs as much as their parsing. */
function readStartIfArrived(context: CallContext, response: Answer, captureBytes: number, digest: BodyDigest | null) {
  const body = bodyAtOnce(response, readLimits(context, captureBytes, digest));
  return body === null ? null : capturedStart(context, body);
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

function capturedStart({ trace, settings }: CallContext, { size, tooLarge: isTooLarge, captured }: BodyRead) {
  trace.resp_size = size;
  if (isTooLarge) throw tooLarge(settings);
  return captured;
}

export function tooLarge(settings: WorkerSettings): CallError {
  const detail = `the response is larger than ${settings.max_response_bytes} bytes`;
  return new CallError("internal", detail, { errorDetail: "response_too_large" });
}

/** The SHA-256 of a response, computed while the body is read, since only the start of the body is kept. */
function createBodyDigest() {
  const begin = (start: Uint8Array) => createHash("sha256").update(start);
  let begun: Hash | null = null;
  return {
    /** Takes the bytes that follow the start, piece by piece. */
    beyond(rest: Uint8Array, start: () => Uint8Array) {
      begun ??= begin(start());
      begun.update(rest);
    },
    /** The digest in lower-case hex, once the body has ended. */
    of: (start: Uint8Array) => (begun ?? begin(start)).digest("hex"),
  };
}

type BodyDigest = ReturnType<typeof createBodyDigest>;

// The memory for captured responses in one worker. Short responses are free. A longer response first takes a slot, as large as
// the most that it can need, and is not read on until it has the slot. So a response that holds memory never waits for more,
// and one that waits loses nothing but time, up to its own deadline. A compressed response takes the memory of its decoders
// before its slot, while it holds nothing else, so no circular wait is possible.

/** The captured bytes, plus slack for replacing the JSON-RPC id. */
const SLOT_BYTES = MAX.capturedBytes + 8 * 1024;

export class MemoryHold implements DecodedFor {
  readonly tenant: string;
  readonly agent: string;
  /** Accounts for bytes that arrive while the response waits for its slot. */
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

  /** To be awaited before the call keeps `bytes` in total; undefined when no wait is needed. */
  grow(bytes: number): Promise<void> | undefined {
    return this.#hasSlot || bytes <= FREE_BYTES ? undefined : this.#takeSlot();
  }

  async #takeSlot(): Promise<void> {
    await enter(this.#memory.slots, { tenant: this.tenant, agent: this.agent, amount: 1 }, this.#signal);
    this.#hasSlot = true;
    // From here on this response is read regardless of its tenant's other responses, since those may wait for its slot.
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

/** The memory for responses in one worker: its part of the whole process's. */
export class ResponseMemory {
  readonly slots: FairQueue;
  readonly readAhead: ReadAhead;
  readonly decoders: DecoderShare;

  constructor(workers: number, total = MAX.captureBytes) {
    // At least 8, so that one tenant cannot hold all slots of a worker, however many workers there are.
    const size = Math.max(8, Math.floor(total / workers / SLOT_BYTES));
    this.slots = createFairQueue(createFairShare({ size }));
    this.readAhead = new ReadAhead(MAX.aheadBytes / workers);
    this.decoders = createDecoderShare(Math.max(MAX.decoderBytes / workers, MAX.workerDecoderBytes));
  }

  /** @param signal ends a wait for memory, which rejects with the signal's reason */
  hold(tenant: string, agent: string, signal: StopSignal): MemoryHold {
    return new MemoryHold(this, tenant, agent, signal);
  }
}
