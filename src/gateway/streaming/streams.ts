// Runs streamed calls and MCP connections, from their admission to the record of their end, and limits how many run at once.
// Streams run on the main thread: they can't be handed to a worker (Bun 1.4.5 refuses to transfer a ReadableStream), and passing
// their pieces in messages would copy each piece and lose the back-pressure that keeps memory flat.
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import type { Tracer } from "../../core/tracing.ts";
import { createDecoderShare } from "../../http/client/body.ts";
import { ReadAhead } from "../../http/client/exchange.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairQueue, createFairShare, enter, type FairShareOptions } from "../../kernel/share.ts";
import { CLAIM_BELIEVED_MS, isOlder, type Moment } from "../../kernel/time.ts";
import { createInFlight, endsWithin, untilFirst } from "../../kernel/wait.ts";
import { within } from "../../storage/failures.ts";
import type { Store } from "../../storage/store.ts";
import { type CallBody, freeBody } from "../../wire/body.ts";
import type { DeniedTools } from "../../wire/tool-list.ts";
import { type Ending, holdsClaim, type InvocationKey, release } from "../invocations/service.ts";
import { beginCallSpan, endCallSpan, spanned } from "../upstream/call-span.ts";
import { CallError, type UpstreamFailure, upstreamFailureOf } from "../upstream/failure.ts";
import { ownHeaders } from "../upstream/headers.ts";
import { type RecordEndOptions, recordEnd } from "../upstream/ownership.ts";
import type { ExchangeDeps, ExchangeTimeouts, OpenedRequest, StreamExchange } from "./exchange.ts";
import { answerOf, headOf, startExchangeTimeouts } from "./exchange.ts";
import { createBudget, createResponseRecorder, type ResponseRecorder } from "./response.ts";

export interface StreamPermit {
  /** A second call does nothing. */
  release(): void;
}

/** A GET or DELETE of an mcp agent: part of the MCP connection, not an invocation. */
export interface OpenedConnection extends OpenedRequest {
  readonly method: "GET" | "DELETE";
  readonly slot: StreamPermit;
}

/** A running invocation, which `call` will end. The body is passed separately, so that its memory is free once it has been sent. */
export interface OpenedCall extends OpenedRequest, Pick<Call, "capture" | "receipt"> {
  readonly slot: StreamPermit;
  readonly key: InvocationKey;
  readonly token: string;
  readonly claimedAt: Moment;
  /** Whether the call waited for its payment, so that the caller may come back for it until the upstream is dialled. */
  readonly isResumable: boolean;
  /** Set if the response may be one to `tools/list`; `hasCacheHints` if its protocol version has hints for caches. */
  readonly listsTools: { readonly hasCacheHints: boolean } | null;
  readonly responseHeaders: Readonly<Record<string, string>>;
}

export interface StreamsDeps extends RecordEndOptions, Omit<ExchangeDeps, "filterMemory" | "readAhead" | "decoders"> {
  readonly upstreamTimeoutMs: number;
  /** Which tools of an agent are denied to everyone; null if the tenant has no policy. */
  deniedTools(tenant: string, agentId: string): Promise<((tool: string) => boolean) | null>;
  readonly tracer?: Tracer | null;
}

/** The caller's side of an exchange. */
export interface CallerSide {
  readonly callerSignal: AbortSignal;
  /** Called when the body of the request is no longer needed. */
  sent(): void;
  /** Receives a function that ends the exchange if others need the memory of a body that is not sent yet. */
  endBy(end: () => void): void;
  over(): void;
}

export function createStreams(options: StreamsDeps) {
  const deps = { ...options, ...memoryOfStreams() };
  const captureMemory = createBudget(MAX.streamCaptureBytes);
  const calls = new Map<string, ExchangeTimeouts>();
  const connections = new Set<ExchangeTimeouts>();
  /** Calls that are being admitted, and calls whose end is not recorded yet. */
  const inFlight = createInFlight();
  const [stopping, givenUp] = [new AbortController(), new AbortController()];

  return {
    /** Aborted when no new streams may begin. */
    stopping: stopping.signal,
    /** Marks a call as being admitted, so that a drain waits for it. Returns a function that ends this. */
    enter: inFlight.enter,
    /** Runs an open call and records its end, whatever happens. @throws Fault when the upstream gave no response */
    async call(opened: OpenedCall, body: CallBody, callerSide: CallerSide): Promise<Response> {
      const { tenant, agentId, key, listsTools } = opened;
      const timeouts = timeoutsOf(opened, options.upstreamTimeoutMs, false, callerSide);
      const leave = inFlight.enter();
      calls.set(key.id, timeouts);
      // A paid call is not stopped because others need its memory.
      if (!opened.isResumable) callerSide.endBy(() => timeouts.stop("crowded"));
      return run(deps, {
        opened,
        method: "POST",
        id: key.id,
        timeouts,
        recorder: createResponseRecorder(opened, captureMemory(tenant)),
        deniedTools: async () =>
          listsTools === null ? null : withHints(await deps.deniedTools(tenant, agentId), listsTools),
        commentMs: null,
        responseHeaders: { ...opened.responseHeaders, "x-service-invocation-id": key.id },
        isOurs: () => isStillClaimed(deps.store, opened),
        body,
        callerSide,
        async conclude(ending, detail) {
          opened.slot.release();
          const recorded = conclusionOf(deps, opened, { ...ending, detail }, givenUp.signal).finally(() => {
            calls.delete(key.id);
            leave();
          });
          return withinASecond(recorded).finally(() => callerSide.over());
        },
      });
    },

    async connect(opened: OpenedConnection, callerSide: CallerSide): Promise<Response> {
      const { tenant, agentId, method } = opened;
      const isEventStream = method === "GET";
      const timeouts = timeoutsOf(opened, options.upstreamTimeoutMs, isEventStream, callerSide);
      connections.add(timeouts);
      return run(deps, {
        opened,
        method,
        id: null,
        timeouts,
        recorder: createResponseRecorder({ capture: false, receipt: false }, captureMemory(tenant)),
        // A resumed stream replays messages that the caller has missed, which may hold lists of tools.
        deniedTools: async () => (isEventStream ? deps.deniedTools(tenant, agentId) : null),
        // An event stream may be silent for hours. Comments show both sides that the connection is still alive.
        commentMs: isEventStream ? 30_000 : null,
        responseHeaders: {},
        isOurs: async () => true,
        body: null,
        callerSide,
        async conclude() {
          connections.delete(timeouts);
          opened.slot.release();
          callerSide.over();
          return true;
        },
      });
    },

    running: () => calls.size,
    /** By the names of their rows in kernel/limits.ts. */
    inUse: () => ({
      runningStreams: calls.size,
      streamCaptureBytes: captureMemory.inUse(),
      toolListBytes: deps.filterMemory.inUse(),
      streamAheadBytes: deps.readAhead.inUse,
      streamDecoderBytes: deps.decoders.inUse(),
    }),

    /** Stops the call of an invocation that was ended elsewhere, if it runs here. */
    stop: (id: string) => calls.get(id)?.stop("cancelled"),

    /** Waits up to `ms` for the calls to end, then breaks off those that still run, and all connections. */
    async drain(ms: number) {
      stopping.abort();
      await endsWithin(ms, inFlight.idle());
      for (const timeouts of [...calls.values(), ...connections]) timeouts.stop("shutdown");
      await endsWithin(5_000, inFlight.idle());
      givenUp.abort();
    },
  };
}

function memoryOfStreams() {
  return {
    filterMemory: createBudget(MAX.toolListBytes),
    readAhead: new ReadAhead(MAX.streamAheadBytes),
    decoders: createDecoderShare(MAX.streamDecoderBytes),
  };
}

export type Streams = ReturnType<typeof createStreams>;

function timeoutsOf({ tenant }: OpenedRequest, headMs: number, mayBeSilent: boolean, { callerSignal }: CallerSide) {
  const limits = { headMs, silenceMs: mayBeSilent ? null : headMs, callerMs: MAX.callerSilenceMs };
  return startExchangeTimeouts(limits, callerSignal, tenant);
}

interface StreamRun extends Omit<StreamExchange, "own" | "isDenied" | "ended"> {
  readonly opened: OpenedRequest;
  readonly id: string | null;
  readonly recorder: ResponseRecorder;
  readonly body: CallBody | null;
  readonly callerSide: CallerSide;
  /** Null if the response can hold no list of tools, or nothing is denied. */
  deniedTools(): Promise<DeniedTools | null>;
  /** @returns as `StreamExchange.ended` does */
  conclude(ending: Ending, detail: string | null): Promise<boolean>;
}

async function run(deps: StreamsDeps & ExchangeDeps, stream: StreamRun): Promise<Response> {
  const { opened, method, id, timeouts, recorder, responseHeaders, body, callerSide } = stream;
  const { tenant, agentId, url, headers } = opened;
  const { tracer = null } = deps;
  const call = { tenant, agentId, invocationId: id, method, url, headers };
  const span = tracer === null ? null : beginCallSpan(tracer, call);
  let concluded: Promise<boolean> | null = null;
  function conclude(ending: Ending, detail: string | null): Promise<boolean> {
    if (span !== null && concluded === null) endCallSpan(span, ending);
    concluded ??= stream.conclude(ending, detail);
    return concluded;
  }
  try {
    const exchange: StreamExchange = {
      ...stream,
      opened: span === null ? opened : spanned(opened, span),
      own: ownHeaders(opened.request_id, id),
      isDenied: await stream.deniedTools(),
      ended(how, error) {
        if (how === "whole") return conclude(recorder.whole(), null);
        const failure = upstreamFailureOf(error, timeouts.signal);
        return conclude(recorder.broken(failure), failure.detail);
      },
    };
    const response = await headOf(deps, exchange, body, () => {
      // The captured start of the body is stored by now, and a POST is never sent twice, so the body is no longer needed.
      if (body !== null) freeBody(body);
      callerSide.sent();
    });
    return await answerOf(deps, exchange, response);
  } catch (error) {
    callerSide.sent();
    timeouts.end();
    const failure = upstreamFailureOf(error, timeouts.signal, recorder.isDialling());
    await conclude(recorder.broken(failure), failure.detail);
    throw faultOf(failure, error, responseHeaders);
  }
}

/** The error classes of calls that this process has stopped. */
const STOPPED_CLASSES: ReadonlySet<unknown> = new Set(["timeout", "cancelled", "internal"]);

/** Marks the list as private for caches, since the policy may change, and other callers may be denied other tools. */
function withHints(isDenied: DeniedTools | null, { hasCacheHints }: { readonly hasCacheHints: boolean }) {
  if (isDenied === null || !hasCacheHints) return isDenied;
  return Object.assign((tool: string) => isDenied(tool), { listIsPrivate: true });
}

/** Asks the database only if the claim is so old that other replicas may have ended the call. */
const isStillClaimed = async ({ read }: Store, { key, token, claimedAt }: OpenedCall): Promise<boolean> =>
  !isOlder(claimedAt, CLAIM_BELIEVED_MS) || holdsClaim(read, key, token);

function faultOf({ kind, message }: UpstreamFailure, cause: unknown, headers: Readonly<Record<string, string>>): Fault {
  const fault = cause instanceof CallError ? cause.storeFault : cause;
  const retryAfterSeconds = fault instanceof Fault ? fault.retryAfterSeconds : undefined;
  return new Fault(kind, message, {
    answer: { body: { error: message }, headers },
    ...(retryAfterSeconds !== undefined && { retryAfterSeconds }),
    ...(kind === "internal" && { cause }),
  });
}

/**
 * The end of a response waits up to a second for the record, so that a caller who polls right after it sees the end. A longer
 * wait would help nobody, and then the response counts as recorded.
 */
const withinASecond = (recorded: Promise<boolean>) => within(1_000, recorded).catch(() => true);

/** Records the end of a call, or releases it for its caller to resume. Never rejects. @returns as `recordEnd` does */
async function conclusionOf(deps: StreamsDeps, opened: OpenedCall, ending: Ending, givenUp: AbortSignal) {
  // A paid call that was stopped before the upstream was dialled stays pending, and its caller may come back for it.
  const isStopped = ending.latency_ms === null && STOPPED_CLASSES.has(ending.error_class);
  if (!opened.isResumable || !isStopped) return recordEnd(deps, opened, ending, () => givenUp.aborted);
  const { store, clock, claims } = deps;
  const { key, token } = opened;
  // If this write fails, the regular comparison of claims with the database gives the claim back.
  claims.over(token);
  await store.write((tx) => release(tx, key, token, clock.now())).catch(() => {});
  return false;
}

// Concurrency limits. The slots of streamed calls are counted apart from those of the transactional path, so that neither holds
// up the other. Messages that are not calls have slots of their own, so that waiting calls can't keep out a message they need.

export interface StreamLimitsOptions {
  /** How many calls of one agent may run at once; a function where that changes. */
  readonly agentConcurrency: number | (() => number);
  /** Aborted when no new streams may begin. */
  readonly stopping: AbortSignal;
  readonly waitMs?: number;
}

export function createStreamLimits({ agentConcurrency, stopping, waitMs = MAX.streamWaitMs }: StreamLimitsOptions) {
  const waits = { waitMs, stopping };
  const calls = createStreamSlots({ size: MAX.runningStreams, agentMax: agentConcurrency }, waits);
  const others = createStreamSlots({ size: MAX.mcpConnections, agentMax: MAX.agentMcpConnections }, waits);
  const extra = createFairShare({ size: MAX.resumedStreams });
  return {
    /** Waits up to `waitMs` for a slot. @throws Fault `unavailable` when there is none, or the caller has gone */
    take: (tenant: string, agentId: string, isCall: boolean, signal: AbortSignal) =>
      (isCall ? calls : others).take(tenant, agentId, signal),
    /** To be called when `agentConcurrency` has risen, so that waiting calls get slots. */
    raised: calls.raised,
    /**
     * A slot for a call that was accepted before: an extra one if all are taken, so that it neither waits nor displaces others.
     * @throws Fault `unavailable` when the tenant has very many extra slots
     */
    forResumed(tenant: string, agentId: string): StreamPermit {
      const ordinary = calls.takeNow(tenant, agentId);
      if (ordinary !== null) return ordinary;
      if (extra.take(tenant) !== null) throw full();
      return once(() => extra.giveBack(tenant));
    },
  };
}

export type StreamLimits = ReturnType<typeof createStreamLimits>;

function createStreamSlots(
  size: Pick<FairShareOptions, "size" | "agentMax">,
  { waitMs, stopping }: { readonly waitMs: number; readonly stopping: AbortSignal },
) {
  const queue = createFairQueue(createFairShare(size));
  const waiting = createFairShare({ size: MAX.streamsWaiting, agentMax: MAX.agentStreamsWaiting });

  const permitFor = (tenant: string, agent: string) => once(() => queue.giveBack(tenant, agent, 1));

  return {
    async take(tenant: string, agent: string, callerSignal: AbortSignal): Promise<StreamPermit> {
      if (callerSignal.aborted || stopping.aborted) throw full();
      if (!queue.takeNow(tenant, agent, 1)) {
        if (waiting.take(tenant, agent) !== null) throw full();
        const wanted = { tenant, agent, amount: 1 };
        try {
          await untilFirst([callerSignal, stopping], async (first) => enter(queue, wanted, first), waitMs);
        } catch {
          throw full();
        } finally {
          waiting.giveBack(tenant, agent);
        }
      }
      return permitFor(tenant, agent);
    },
    raised: () => queue.serveEach(),
    takeNow: (tenant: string, agent: string): StreamPermit | null =>
      queue.takeNow(tenant, agent, 1) ? permitFor(tenant, agent) : null,
  };
}

function once(release: () => void): StreamPermit {
  let isHeld = true;
  return {
    release() {
      if (isHeld) release();
      isHeld = false;
    },
  };
}

const full = () => new Fault("unavailable", "too many calls of this agent are running", { retryAfterSeconds: 5 });
