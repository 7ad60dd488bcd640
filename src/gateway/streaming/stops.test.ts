// Streams that are stopped: by a caller that goes, by the server that cancels the body, from another replica, for want of
// memory, by the end of the process; in any order, and in the middle of what the upstream sends.
import { expect, test } from "bun:test";
import fc from "fast-check";
import { silentLog } from "../../core/log.ts";
import { Exchange, lost } from "../../http/client/exchange.ts";
import type { OutboundRequest } from "../../http/client/outbound.ts";
import { ResponseParser } from "../../http/client/response-parser.ts";
import { thisMoment } from "../../kernel/time.ts";
import { inTurns } from "../../kernel/turns.ts";
import type { Store } from "../../storage/store.ts";
import type { Ending } from "../invocations/service.ts";
import { createStreams, type OpenedCall } from "./streams.ts";

const turn = () => new Promise<void>((resolve) => setImmediate(resolve));

/** Makes what comes next in this turn of the event loop wait for one of the next. */
function busy(steps: number): void {
  for (let left = steps; left > 0; left--) inTurns(() => false, "acme");
}

const HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

/** One stream: its upstream, its caller, and what was recorded of it. */
interface Stream {
  readonly caller: AbortController;
  exchange: Exchange | null;
  isAnswered: boolean;
  isUpstreamOver: boolean;
  body: Pick<ReadableStreamDefaultReader, "read" | "cancel"> | null;
  /** What the caller was answered: a status, or why there is none. */
  readonly answer: PromiseWithResolvers<number | string>;
  crowd: () => void;
  /** How it may end, by what has happened so far. */
  readonly mayEndAs: Set<string>;
  isStopped: boolean;
  readonly endings: string[];
  /** How the call has ended in the database, as the first to write it says. */
  record: string | null;
  /** Whether the caller has read a clean end, and had not left before. */
  sawCleanEnd: boolean;
  hasLeft: boolean;
  released: number;
  readonly dialledAfterStop: string[];
}

const endingOf = ({ error_class, error_detail }: Ending) =>
  [error_class ?? "whole", error_detail ?? ""].join(" ").trim();

function simulated({ denialTurns, storeTurns }: { readonly denialTurns: number; readonly storeTurns: number }) {
  const streams = new Map<string, Stream>();
  const idOf = (url: string) => url.slice("http://upstream.test/".length);
  const of = (id: string): Stream => streams.get(id) as Stream;
  const store = {
    async execute(_: unknown, { key, ending }: { key: { id: string }; ending: Ending }) {
      const stream = of(key.id);
      stream.endings.push(endingOf(ending));
      for (let left = storeTurns; left > 0; left--) await turn();
      if (stream.record !== null) return false;
      stream.record = endingOf(ending);
      return true;
    },
  };
  const product = createStreams({
    store: store as unknown as Store,
    clock: { now: () => Date.now() },
    log: silentLog,
    claims: { over() {} },
    upstreamTimeoutMs: 60_000,
    async resolveCredential() {
      return { header: null };
    },
    async deniedTools() {
      for (let left = denialTurns; left > 0; left--) await turn();
      return null;
    },
    outbound: {
      async request(url: string, request: OutboundRequest) {
        request.signal.throwIfAborted();
        const stream = of(idOf(url));
        if (stream.isStopped) stream.dialledAfterStop.push(...stream.mayEndAs);
        request.sent?.();
        const socket = { pause() {}, resume() {} };
        const sent = { ...request, tenant: "acme" };
        stream.exchange = new Exchange({ socket, parser: new ResponseParser(), request: sent, over() {} });
        return stream.exchange.response.catch((error: unknown) => {
          request.signal.throwIfAborted();
          throw lost(error);
        });
      },
    },
  });

  function open(id: string): void {
    const stream: Stream = {
      caller: new AbortController(),
      exchange: null,
      isAnswered: false,
      isUpstreamOver: false,
      body: null,
      answer: Promise.withResolvers(),
      crowd() {},
      mayEndAs: new Set(),
      isStopped: false,
      endings: [],
      record: null,
      sawCleanEnd: false,
      hasLeft: false,
      released: 0,
      dialledAfterStop: [],
    };
    streams.set(id, stream);
    void product
      .call(
        openedCall(id, () => stream.released++),
        new Uint8Array(2),
        {
          callerSignal: stream.caller.signal,
          sent() {},
          over() {},
          endBy(end) {
            stream.crowd = end;
          },
        },
      )
      .then((response) => read(stream, response))
      .catch((error: Error) => stream.answer.resolve(error.message));
  }

  return { product, streams, open, of };
}

const openedCall = (id: string, release: () => void): OpenedCall => ({
  tenant: "acme",
  agentId: "agt_1",
  url: `http://upstream.test/${id}`,
  credential_ref: null,
  headers: [],
  request_id: id,
  slot: { release },
  key: { tenant: "acme", id },
  token: id,
  claimedAt: thisMoment(),
  isResumable: false,
  capture: false,
  receipt: false,
  listsTools: { hasCacheHints: false },
  responseHeaders: {},
});

/** As the server does: it reads on, and cancels the body at once when the caller has gone before. */
async function read(stream: Stream, { body, status }: Response): Promise<void> {
  stream.answer.resolve(status);
  if (stream.caller.signal.aborted) return body?.cancel();
  stream.body = body?.getReader() ?? null;
  while ((await stream.body?.read())?.done === false);
  stream.sawCleanEnd = !stream.hasLeft;
}

type Simulated = ReturnType<typeof simulated>;

const stopped = (stream: Stream, as: string) => {
  if (!stream.isStopped && stream.endings.length === 0) stream.mayEndAs.add(as);
  stream.isStopped = true;
};

function fromUpstream(stream: Stream, bytes: string): void {
  if (stream.exchange === null || stream.isUpstreamOver) return;
  stream.exchange.arrived(Buffer.from(stream.isAnswered ? bytes : `${HEAD}${bytes}`));
  stream.isAnswered = true;
}

const EVENTS = {
  head: (stream: Stream) => fromUpstream(stream, ""),
  piece: (stream: Stream) => fromUpstream(stream, "2\r\n:\n\r\n"),
  end(stream: Stream) {
    if (stream.exchange === null) return;
    fromUpstream(stream, "0\r\n\r\n");
    if (!stream.isStopped && !stream.isUpstreamOver) stream.mayEndAs.add("whole");
    stream.isUpstreamOver = true;
  },
  breaks(stream: Stream) {
    if (stream.exchange === null) return;
    stream.exchange.connectionEnded("broken");
    if (!stream.isStopped && !stream.isUpstreamOver) stream.mayEndAs.add("upstream_5xx connection_reset");
    stream.isUpstreamOver = true;
  },
  goes(stream: Stream) {
    stopped(stream, "cancelled");
    stream.hasLeft = true;
    stream.caller.abort();
    // The server does so in the moment in which it tells of the caller that has gone.
    void stream.body?.cancel().catch(() => {});
  },
  cancels(stream: Stream) {
    if (stream.body === null) return;
    stopped(stream, "cancelled");
    stream.hasLeft = true;
    void stream.body.cancel().catch(() => {});
  },
  /** The cancel is recorded. The gateway that runs the stream is told later. */
  cancelRecorded(stream: Stream) {
    stream.record ??= "cancelled";
  },
  elsewhere(stream: Stream, { product }: Simulated, id: string) {
    EVENTS.cancelRecorded(stream);
    stopped(stream, "cancelled");
    product.stop(id);
  },
  crowds(stream: Stream) {
    stopped(stream, "internal");
    stream.crowd();
  },
  drains(_: Stream, { product, streams }: Simulated) {
    // It comes a moment later, so another stop may still be the first.
    for (const stream of streams.values()) if (!stream.isStopped) stream.mayEndAs.add("internal process_ended");
    void product.drain(0);
  },
};

const GAPS = {
  none() {},
  promises: async () => {
    for (let steps = 0; steps < 50; steps++) await null;
  },
  fewPromises: async () => {
    for (let steps = 0; steps < 3; steps++) await null;
  },
  turn,
  busy: () => busy(40),
};

const step = fc.record({
  stream: fc.nat({ max: 3 }),
  event: fc.oneof(
    { weight: 20, arbitrary: fc.constantFrom("head", "piece", "end") },
    { weight: 10, arbitrary: fc.constantFrom("breaks", "goes", "cancels") },
    { weight: 5, arbitrary: fc.constantFrom("elsewhere", "cancelRecorded", "crowds") },
    { weight: 1, arbitrary: fc.constant("drains") },
  ) as fc.Arbitrary<keyof typeof EVENTS>,
  gap: fc.constantFrom(...(Object.keys(GAPS) as (keyof typeof GAPS)[])),
});

test("a stream that was opened ends once, for what stopped it first, as its record says, and is not sent after that", async () => {
  const plan = fc.record({
    steps: fc.array(step, { maxLength: 24, size: "max" }),
    denialTurns: fc.nat({ max: 2 }),
    storeTurns: fc.nat({ max: 2 }),
  });
  await fc.assert(
    fc.asyncProperty(plan, async ({ steps, ...delays }) => {
      const world = simulated(delays);
      const ids = ["0", "1", "2", "3"];
      for (const id of ids) world.open(id);
      for (const { stream, event, gap } of steps) {
        EVENTS[event](world.of(`${stream}`), world, `${stream}`);
        const passed = GAPS[gap]();
        if (passed !== undefined) await passed;
      }
      for (const id of ids) EVENTS.goes(world.of(id));
      for (let turns = 0; turns < 1_000 && world.product.running() > 0; turns++) await turn();
      // What would end a second time has its turn.
      for (let turns = 0; turns < 10; turns++) await turn();
      for (const id of ids) {
        const { endings, mayEndAs, released, dialledAfterStop, sawCleanEnd, record } = world.of(id);
        expect({ endings: endings.length, released, dialledAfterStop }).toEqual({
          endings: 1,
          released: 1,
          dialledAfterStop: [],
        });
        expect([...mayEndAs]).toContain(endings[0] ?? "");
        if (sawCleanEnd) expect(record).toBe("whole");
      }
      expect(world.product.running()).toBe(0);
    }),
    { numRuns: 1_000 },
  );
}, 60_000);

test("a response without a body is not passed on when its call was cancelled before it was recorded", async () => {
  const world = simulated({ denialTurns: 0, storeTurns: 0 });
  for (const id of ["kept", "cancelled"]) world.open(id);
  await turn();
  EVENTS.cancelRecorded(world.of("cancelled"));
  const answered = ["kept", "cancelled"].map((id) => {
    world.of(id).exchange?.arrived(Buffer.from("HTTP/1.1 204 No Content\r\n\r\n"));
    return world.of(id).answer.promise;
  });
  expect(await Promise.all(answered)).toEqual([204, "the call was ended before its response was recorded"]);
  for (const id of ["kept", "cancelled"]) expect(world.of(id)).toMatchObject({ endings: ["whole"], released: 1 });
});
