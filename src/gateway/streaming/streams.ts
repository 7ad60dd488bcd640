// Streamed exchanges, from the open call to the end of its record. They run on the main thread, beside the caller's
// connection: a stream can't be handed to a worker (Bun 1.4.5 refuses to transfer a ReadableStream), and passing its
// pieces by messages would copy each of them and lose the back-pressure that keeps memory flat.

import { endsWithin } from "../../concurrency/deadline.ts";
import { createUnderWay } from "../../concurrency/under-way.ts";
import { CLAIM_BELIEVED_MS, isOlder } from "../../core/age.ts";
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import { createReadAhead } from "../../http/read-ahead.ts";
import { within } from "../../storage/deadline.ts";
import { untilStored } from "../../storage/persist.ts";
import type { Store } from "../../storage/store.ts";
import { type Claims, type Ending, finish, holdsClaim, release } from "../invocations/service.ts";
import {
  answerOf,
  type ExchangeDeps,
  headOf,
  STOPPED,
  type StreamExchange,
  type UpstreamFailure,
  upstreamFailureOf,
} from "./exchange.ts";
import {
  type ExchangeTimeoutLimits,
  type ExchangeTimeouts,
  startExchangeTimeouts,
} from "./exchange-timeouts.ts";
import { createBudget } from "./memory-budget.ts";
import type { Ended } from "./relay.ts";
import { CAPTURE_BUDGET_BYTES, createResponseRecorder, type ResponseRecorder } from "./response-recorder.ts";
import type { OpenedCall, OpenedConnection } from "./service.ts";
import { FILTER_MEMORY_BYTES } from "./tool-filter.ts";

/** What comes of answers that their callers do not read. */
const AHEAD_BYTES = 64 * 1024 * 1024;
/** How long a caller may leave unread what is there for it. */
const CALLER_SILENCE_MS = 300_000;
/** Who listens for events may hear nothing for hours. A comment shows both ends that the other is there. */
const COMMENT_MS = 30_000;
/** How long an answer's end waits for the record, so that whoever has read it finds it ended. */
const RECORD_WAIT_MS = 1_000;
const LAST_RECORDS_MS = 5_000;

export interface StreamsDeps extends Omit<ExchangeDeps, "filterMemory" | "readAhead"> {
  readonly store: Store;
  readonly clock: Clock;
  readonly claims: Pick<Claims, "over">;
  readonly upstreamTimeoutMs: number;
  /** Which tools of an agent are denied to everyone; null when the tenant has no policy. */
  deniedTools(tenant: string, agentId: string): Promise<((tool: string) => boolean) | null>;
  /** Told of each call that has ended, after it is durable. */
  ended(id: string): void;
}

/** The caller's end of an exchange. */
export interface CallerEnd {
  /** Aborted when the caller has gone. */
  readonly gone: AbortSignal;
  /** Told when the body of the request is not needed any more. */
  sent(): void;
  /** Told what ends the exchange while the body is not sent, should others need the memory that it holds. */
  endBy(end: () => void): void;
  /** Told when the answer is about to end. */
  over(): void;
}

export interface Streams {
  /** Aborted when nothing new is to be begun any more. */
  readonly stopping: AbortSignal;
  /** Says that a call is being admitted, which a drain waits for; what it gives says that it is no more. */
  enter(): () => void;
  /**
   * Makes an open call, and ends its record whatever happens.
   *
   * @throws Fault when the upstream gave nothing
   */
  call(opened: OpenedCall, body: Uint8Array, end: CallerEnd): Promise<Response>;
  /** @throws Fault when the upstream gave nothing */
  connect(opened: OpenedConnection, end: CallerEnd): Promise<Response>;
  /** Stops the call of an invocation that has been ended otherwise, if it runs here. */
  stop(id: string): void;
  /** Lets the calls end for `ms`, then breaks off what still runs. */
  drain(ms: number): Promise<void>;
}

export function createStreams(given: StreamsDeps): Streams {
  const filterMemory = createBudget(FILTER_MEMORY_BYTES);
  const deps = { ...given, filterMemory, readAhead: createReadAhead(AHEAD_BYTES) };
  const captureMemory = createBudget(CAPTURE_BUDGET_BYTES);
  const calls = new Map<string, ExchangeTimeouts>();
  const connections = new Set<ExchangeTimeouts>();
  /** Calls that are being admitted, and those of which the record is not made yet. */
  const underWay = createUnderWay();
  const [stopping, givenUp] = [new AbortController(), new AbortController()];

  return {
    stopping: stopping.signal,
    enter: underWay.enter,
    async call(opened, body, end) {
      const timeouts = startExchangeTimeouts(limitsOf(deps), end.gone);
      const leave = underWay.enter();
      calls.set(opened.key.id, timeouts);
      // What is paid for is not given up for others.
      if (!opened.isOwed) end.endBy(() => timeouts.stop("crowded"));
      const recorder = createResponseRecorder(opened, captureMemory(opened.key.tenant));
      async function conclude(ending: Ending, detail: string | null): Promise<void> {
        opened.place.release();
        const recorded = recordEnd(deps, opened, ending, detail, givenUp.signal).finally(() => {
          calls.delete(opened.key.id);
          leave();
        });
        await within(RECORD_WAIT_MS, recorded).catch(() => {});
        end.over();
      }
      return runCall(deps, { opened, end, timeouts, recorder, conclude }, body);
    },

    async connect(opened, end) {
      const timeouts = startExchangeTimeouts(
        { ...limitsOf(deps), ...(opened.method === "GET" && { silenceMs: null }) },
        end.gone,
      );
      connections.add(timeouts);
      function conclude(): void {
        timeouts.end();
        connections.delete(timeouts);
        opened.place.release();
        end.over();
      }
      const recorder = createResponseRecorder(NOTHING_KEPT, captureMemory(opened.tenant));
      return runConnection(deps, { opened, timeouts, recorder, conclude });
    },

    stop: (id) => calls.get(id)?.stop("cancelled"),

    async drain(ms) {
      stopping.abort();
      await endsWithin(ms, underWay.idle());
      for (const timeouts of calls.values()) timeouts.stop("shutdown");
      for (const timeouts of connections) timeouts.stop("shutdown");
      await endsWithin(LAST_RECORDS_MS, underWay.idle());
      givenUp.abort();
    },
  };
}

const STOPPED_CLASSES: ReadonlySet<unknown> = new Set(Object.values(STOPPED));

const NOTHING_KEPT = { capture: false, receipt: false };

type Deps = StreamsDeps & ExchangeDeps;

function limitsOf({ upstreamTimeoutMs: ms }: StreamsDeps): ExchangeTimeoutLimits {
  return { headMs: ms, silenceMs: ms, callerMs: CALLER_SILENCE_MS };
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
  body: Uint8Array,
): Promise<Response> {
  const { tenant, agentId, key, listsTools, request_id } = opened;
  const told = { ...opened.told, "x-service-invocation-id": key.id };
  try {
    const exchange: StreamExchange = {
      opened,
      timeouts,
      recorder,
      method: "POST",
      own: [...ownHeaders(request_id), ["x-service-invocation-id", key.id]],
      isDenied: listsTools ? await deps.deniedTools(tenant, agentId) : null,
      commentMs: null,
      told,
      isOurs: () => isStillClaimed(deps.store, opened),
      ended: (how) => conclude(endingOf(recorder, how, timeouts.signal), how === "whole" ? null : how),
    };
    const response = await headOf(deps, exchange, body, end.sent);
    return await answerOf(deps, exchange, response);
  } catch (error) {
    end.sent();
    timeouts.end();
    const nothing = upstreamFailureOf(error, timeouts.signal);
    await conclude(recorder.broken(nothing.errorClass), nothing.detail);
    throw faultOf(nothing, error, told);
  }
}

interface ConnectionRun {
  readonly opened: OpenedConnection;
  readonly timeouts: ExchangeTimeouts;
  readonly recorder: ResponseRecorder;
  conclude(): void;
}

async function runConnection(
  deps: Deps,
  { opened, timeouts, recorder, conclude }: ConnectionRun,
): Promise<Response> {
  const { tenant, agentId, method, request_id } = opened;
  try {
    const exchange: StreamExchange = {
      opened,
      timeouts,
      recorder,
      method,
      own: ownHeaders(request_id),
      // A stream that is resumed brings the answers that its caller has missed.
      isDenied: method === "GET" ? await deps.deniedTools(tenant, agentId) : null,
      commentMs: method === "GET" ? COMMENT_MS : null,
      told: {},
      isOurs: async () => true,
      ended: async () => conclude(),
    };
    return await answerOf(deps, exchange, await headOf(deps, exchange, null));
  } catch (error) {
    conclude();
    throw faultOf(upstreamFailureOf(error, timeouts.signal), error, {});
  }
}

/** Asked of the store only when others may have ended the call meanwhile. */
async function isStillClaimed({ read }: Store, { key, token, claimedAt }: OpenedCall): Promise<boolean> {
  return !isOlder(claimedAt, CLAIM_BELIEVED_MS) || (await holdsClaim(read, key, token));
}

function ownHeaders(requestId: string): [string, string][] {
  return [["x-request-id", requestId]];
}

function endingOf(recorder: ResponseRecorder, how: Ended, signal: AbortSignal): Ending {
  if (how === "whole") return recorder.whole();
  if (signal.aborted) return recorder.broken(STOPPED[signal.reason as keyof typeof STOPPED]);
  return recorder.broken(how === "broken" ? "upstream_5xx" : "internal");
}

function faultOf(
  { kind, message }: UpstreamFailure,
  cause: unknown,
  headers: Readonly<Record<string, string>>,
): Fault {
  const retryAfterSeconds = cause instanceof Fault ? cause.retryAfterSeconds : undefined;
  return new Fault(kind, message, {
    answer: { body: { error: message }, headers },
    ...(retryAfterSeconds !== undefined && { retryAfterSeconds }),
    ...(kind === "internal" && { cause }),
  });
}

/** It was stopped before anything was dialled: what is paid for waits on for its caller. */
function isStillOwed({ isOwed }: OpenedCall, { latency_ms, error_class }: Ending): boolean {
  return isOwed && latency_ms === null && STOPPED_CLASSES.has(error_class);
}

/** Ends the record of a call. Never rejects: what can't be stored is ended by whoever finds this process gone. */
async function recordEnd(
  { store, clock, log, claims, ended }: StreamsDeps,
  opened: OpenedCall,
  ending: Ending,
  detail: string | null,
  givenUp: AbortSignal,
): Promise<void> {
  const { key, token, agentId, request_id } = opened;
  const named = { tenant: key.tenant, agent_id: agentId, invocation_id: key.id, request_id };
  const write = (what: Ending) =>
    untilStored(
      () => store.write((tx) => finish(tx, { key, token }, what, clock.now())),
      () => givenUp.aborted,
    );
  if (isStillOwed(opened, ending)) {
    // Whoever runs a comparison with the database gives the claim back.
    claims.over(token);
    await store.write((tx) => release(tx, key, token, clock.now())).catch(() => {});
    return;
  }
  try {
    const recorded = await write(ending).catch((error) => {
      if (givenUp.aborted) throw error;
      log.error("outcome_not_recorded", { ...named, error });
      return write({ ...ending, status: "failed", error_class: "internal", response: null });
    });
    const { response: _body, resp_sha256: _hash, ...shown } = ending;
    // False: it was cancelled, or taken for dead, and ended before.
    if (recorded) log.info("invocation_ended", { ...named, ...shown, detail });
    claims.over(token);
  } catch (error) {
    log.error("invocation_left_open", { ...named, error });
    claims.over(token, true);
  }
  ended(key.id);
}
