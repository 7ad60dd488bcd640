// Streamed exchanges, from the open call to the end of its record. They run on the main thread, beside the caller's
// connection: a stream can't be handed to a worker (Bun 1.4.5 refuses to transfer a ReadableStream), and passing its
// pieces by messages would copy each of them and lose the back-pressure that keeps memory flat.

import { Fault } from "../../core/fault.ts";
import type { Span, Tracer } from "../../core/tracing.ts";
import { createReadAhead } from "../../http/client/read-ahead.ts";
import { MAX } from "../../kernel/limits.ts";
import { CLAIM_BELIEVED_MS, isOlder } from "../../kernel/time.ts";
import { createUnderWay, endsWithin } from "../../kernel/wait.ts";
import { within } from "../../storage/failures.ts";
import type { Store } from "../../storage/store.ts";
import { type CallBody, freeBody } from "../../wire/body.ts";
import type { DeniedTools } from "../../wire/tool-list.ts";
import { type Ending, holdsClaim, release } from "../invocations/service.ts";
import { beginCallSpan, endCallSpan, spanned } from "../upstream/call-span.ts";
import { type CallStop, stoppedBy, type UpstreamFailure, upstreamFailureOf } from "../upstream/failure.ts";
import { ownHeaders } from "../upstream/headers.ts";
import { type RecordEndOptions, recordEnd } from "../upstream/ownership.ts";
import type { Ended } from "./exchange.ts";
import {
  answerOf,
  type ExchangeDeps,
  type ExchangeTimeoutLimits,
  type ExchangeTimeouts,
  headOf,
  type StreamExchange,
  startExchangeTimeouts,
} from "./exchange.ts";
import { createBudget, createResponseRecorder, type ResponseRecorder } from "./response-recorder.ts";
import type { OpenedCall, OpenedConnection, OpenedRequest } from "./service.ts";

export interface StreamsDeps extends RecordEndOptions, Omit<ExchangeDeps, "filterMemory" | "readAhead"> {
  readonly upstreamTimeoutMs: number;
  /** Which tools of an agent are denied to everyone; null when the tenant has no policy. */
  deniedTools(tenant: string, agentId: string): Promise<((tool: string) => boolean) | null>;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
}

/** The caller's end of an exchange. */
export interface CallerEnd {
  /** Aborted when the caller has gone. */
  readonly callerSignal: AbortSignal;
  /** Called when the body of the request is not needed any more. */
  sent(): void;
  /** Receives a function that ends the exchange, used if others need the memory of a body that is not sent yet. */
  endBy(end: () => void): void;
  /** Called when the answer is about to end. */
  over(): void;
}

export function createStreams(options: StreamsDeps) {
  const filterMemory = createBudget(MAX.toolListBytes);
  const deps = { ...options, filterMemory, readAhead: createReadAhead(MAX.streamAheadBytes) };
  const captureMemory = createBudget(MAX.streamCaptureBytes);
  const calls = new Map<string, ExchangeTimeouts>();
  const connections = new Set<ExchangeTimeouts>();
  /** Calls that are being admitted, and calls whose end is not recorded yet. */
  const underWay = createUnderWay();
  const [stopping, givenUp] = [new AbortController(), new AbortController()];

  return {
    /** Aborted when nothing new is to be begun any more. */
    stopping: stopping.signal,
    /** Marks a call as being admitted, so that a drain waits for it. Returns a function that ends this. */
    enter: underWay.enter,
    /**
     * Makes an open call, and ends its record whatever happens.
     *
     * @throws Fault when the upstream gave nothing
     */
    async call(opened: OpenedCall, body: CallBody, end: CallerEnd): Promise<Response> {
      const timeouts = startExchangeTimeouts(limitsOf(deps), end.callerSignal);
      const leave = underWay.enter();
      calls.set(opened.key.id, timeouts);
      // A paid call is not stopped because others need its memory.
      if (!opened.isResumable) end.endBy(() => timeouts.stop("crowded"));
      const recorder = createResponseRecorder(opened, captureMemory(opened.key.tenant));
      const span = spanOf(deps, opened, "POST", opened.key.id);
      async function conclude(ending: Ending, detail: string | null): Promise<void> {
        if (span !== null) endCallSpan(span, ending);
        opened.place.release();
        const recorded = conclusionOf(deps, opened, { ...ending, detail }, givenUp.signal).finally(() => {
          calls.delete(opened.key.id);
          leave();
        });
        // How long the end of an answer waits for the record, so that a caller who polls right after it sees the end.
        await within(1_000, recorded).catch(() => {});
        end.over();
      }
      return runCall(deps, { opened: spanned(opened, span), end, timeouts, recorder, conclude }, body);
    },

    /** @throws Fault when the upstream gave nothing */
    async connect(opened: OpenedConnection, end: CallerEnd): Promise<Response> {
      const timeouts = startExchangeTimeouts(
        { ...limitsOf(deps), ...(opened.method === "GET" && { silenceMs: null }) },
        end.callerSignal,
      );
      connections.add(timeouts);
      const span = spanOf(deps, opened, opened.method, null);
      function conclude(ending: Ending): void {
        if (span !== null) endCallSpan(span, ending);
        timeouts.end();
        connections.delete(timeouts);
        opened.place.release();
        end.over();
      }
      const recorder = createResponseRecorder(NOTHING_KEPT, captureMemory(opened.tenant));
      return runConnection(deps, { opened: spanned(opened, span), timeouts, recorder, conclude });
    },

    /** How many calls are made here now. */
    running: () => calls.size,
    /** Of the rows of kernel/limits.ts. */
    inUse: () => ({
      runningStreams: calls.size,
      streamCaptureBytes: captureMemory.inUse(),
      toolListBytes: filterMemory.inUse(),
      streamAheadBytes: deps.readAhead.inUse(),
    }),

    /** Stops the call of an invocation that was ended elsewhere, if it runs here. */
    stop: (id: string) => calls.get(id)?.stop("cancelled"),

    /** Lets the calls end for `ms`, then breaks off what still runs. */
    async drain(ms: number) {
      stopping.abort();
      await endsWithin(ms, underWay.idle());
      for (const timeouts of calls.values()) timeouts.stop("shutdown");
      for (const timeouts of connections) timeouts.stop("shutdown");
      await endsWithin(5_000, underWay.idle());
      givenUp.abort();
    },
  };
}

export type Streams = ReturnType<typeof createStreams>;

/** Error classes of calls that this process has stopped. */
const STOPPED_CLASSES: ReadonlySet<unknown> = new Set(["timeout", "cancelled", "internal"]);

const NOTHING_KEPT = { capture: false, receipt: false };

type Deps = StreamsDeps & ExchangeDeps;

function limitsOf({ upstreamTimeoutMs: ms }: StreamsDeps): ExchangeTimeoutLimits {
  return { headMs: ms, silenceMs: ms, callerMs: MAX.callerSilenceMs };
}

function spanOf(
  { tracer = null }: StreamsDeps,
  { tenant, agentId, url, headers }: OpenedRequest,
  method: OpenedConnection["method"] | "POST",
  invocationId: string | null,
): Span | null {
  return tracer === null ? null : beginCallSpan(tracer, { tenant, agentId, invocationId, method, url, headers });
}

interface CallRun {
  readonly opened: OpenedCall;
  readonly end: CallerEnd;
  readonly timeouts: ExchangeTimeouts;
  readonly recorder: ResponseRecorder;
  conclude(ending: Ending, detail: string | null): Promise<void>;
}

async function runCall(
  deps: Deps,
  { opened, end, timeouts, recorder, conclude }: CallRun,
  body: CallBody,
): Promise<Response> {
  const { tenant, agentId, key, listsTools, request_id } = opened;
  const responseHeaders = { ...opened.responseHeaders, "x-service-invocation-id": key.id };
  try {
    const exchange: StreamExchange = {
      opened,
      timeouts,
      recorder,
      method: "POST",
      own: ownHeaders(request_id, key.id),
      isDenied: listsTools === null ? null : asList(await deps.deniedTools(tenant, agentId), listsTools),
      commentMs: null,
      responseHeaders,
      isOurs: () => isStillClaimed(deps.store, opened),
      ended: (how) => conclude(endingOf(recorder, how, timeouts.signal), how === "whole" ? null : how),
    };
    const response = await headOf(deps, exchange, body, () => {
      // Its start is stored by now, and a POST is never sent twice, so nobody needs it any more.
      freeBody(body);
      end.sent();
    });
    return await answerOf(deps, exchange, response);
  } catch (error) {
    end.sent();
    timeouts.end();
    const failure = upstreamFailureOf(error, timeouts.signal);
    await conclude(recorder.broken(failure.errorClass), failure.detail);
    throw faultOf(failure, error, responseHeaders);
  }
}

/** The policy may change, and another caller's may differ: no cache may give this list to others. */
function asList(isDenied: DeniedTools | null, { isNewest }: { readonly isNewest: boolean }): DeniedTools | null {
  if (isDenied === null || !isNewest) return isDenied;
  return Object.assign((tool: string) => isDenied(tool), { listIsPrivate: true });
}

interface ConnectionRun {
  readonly opened: OpenedConnection;
  readonly timeouts: ExchangeTimeouts;
  readonly recorder: ResponseRecorder;
  conclude(ending: Ending): void;
}

async function runConnection(deps: Deps, { opened, timeouts, recorder, conclude }: ConnectionRun): Promise<Response> {
  const { tenant, agentId, method, request_id } = opened;
  try {
    const exchange: StreamExchange = {
      opened,
      timeouts,
      recorder,
      method,
      own: ownHeaders(request_id, null),
      // A resumed stream replays answers that the caller has missed, lists of tools among them.
      isDenied: method === "GET" ? await deps.deniedTools(tenant, agentId) : null,
      // An event stream may be silent for hours. A comment shows each end that the other is still there.
      commentMs: method === "GET" ? 30_000 : null,
      responseHeaders: {},
      isOurs: async () => true,
      ended: async (how) => conclude(endingOf(recorder, how, timeouts.signal)),
    };
    return await answerOf(deps, exchange, await headOf(deps, exchange, null));
  } catch (error) {
    const failure = upstreamFailureOf(error, timeouts.signal);
    conclude(recorder.broken(failure.errorClass));
    throw faultOf(failure, error, {});
  }
}

/** Asks the store only when the claim is so old that others may have ended the call. */
async function isStillClaimed({ read }: Store, { key, token, claimedAt }: OpenedCall): Promise<boolean> {
  return !isOlder(claimedAt, CLAIM_BELIEVED_MS) || holdsClaim(read, key, token);
}

function endingOf(recorder: ResponseRecorder, how: Ended, signal: AbortSignal): Ending {
  if (how === "whole") return recorder.whole();
  if (signal.aborted) return recorder.broken(stoppedBy(signal.reason as CallStop).errorClass);
  return recorder.broken(how === "broken" ? "upstream_5xx" : "internal");
}

function faultOf({ kind, message }: UpstreamFailure, cause: unknown, headers: Readonly<Record<string, string>>): Fault {
  const retryAfterSeconds = cause instanceof Fault ? cause.retryAfterSeconds : undefined;
  return new Fault(kind, message, {
    answer: { body: { error: message }, headers },
    ...(retryAfterSeconds !== undefined && { retryAfterSeconds }),
    ...(kind === "internal" && { cause }),
  });
}

/** A paid call that was stopped before the upstream was dialled stays pending, and its caller may come back for it. */
function isStillResumable({ isResumable }: OpenedCall, { latency_ms, error_class }: Ending): boolean {
  return isResumable && latency_ms === null && STOPPED_CLASSES.has(error_class);
}

/** Ends the record of a call, or gives it back to its caller. Never rejects. */
async function conclusionOf(
  deps: StreamsDeps,
  opened: OpenedCall,
  ending: Ending,
  givenUp: AbortSignal,
): Promise<void> {
  if (!isStillResumable(opened, ending)) return recordEnd(deps, opened, ending, () => givenUp.aborted);
  const { store, clock, claims } = deps;
  const { key, token } = opened;
  // If this write fails, the regular comparison of claims with the database gives the claim back.
  claims.over(token);
  await store.write((tx) => release(tx, key, token, clock.now())).catch(() => {});
}
