import { expect, test } from "bun:test";
import { startExchangeTimeouts } from "./exchange.ts";

const here = () => new AbortController();
/** A turn of the event loop. */
const turn = () => new Promise<void>((resolve) => setImmediate(resolve));
const aborted = (signal: AbortSignal) =>
  new Promise((resolve) => signal.addEventListener("abort", () => resolve(signal.reason)));

test("a timeout for silence counts only the side that is waited for", async () => {
  const timeouts = startExchangeTimeouts({ headMs: 60_000, silenceMs: 300, callerMs: 60_000 }, here().signal, "acme");
  timeouts.waitFor("upstream");
  await Bun.sleep(20);
  timeouts.waitFor("caller");
  await Bun.sleep(320);
  expect(timeouts.signal.aborted).toBe(false);
  timeouts.waitFor("upstream");
  const since = performance.now();
  expect(await aborted(timeouts.signal)).toBe("timeout");
  expect(performance.now() - since).toBeGreaterThanOrEqual(298);
});

test("a piece now and then keeps an exchange going", async () => {
  const timeouts = startExchangeTimeouts({ headMs: 60_000, silenceMs: 300, callerMs: 60_000 }, here().signal, "acme");
  for (let piece = 0; piece < 10; piece++) {
    timeouts.waitFor("upstream");
    await Bun.sleep(35);
  }
  expect(timeouts.signal.aborted).toBe(false);
  timeouts.end();
});

test("the head of an answer has its own timeout, and silence has none where no limit is set", async () => {
  const late = startExchangeTimeouts({ headMs: 20, silenceMs: null, callerMs: 60_000 }, here().signal, "acme");
  late.waitFor("head");
  expect(await aborted(late.signal)).toBe("timeout");
  const listening = startExchangeTimeouts({ headMs: 20, silenceMs: null, callerMs: 20 }, here().signal, "acme");
  listening.waitFor("head");
  listening.waitFor("upstream");
  await Bun.sleep(60);
  expect(listening.signal.aborted).toBe(false);
  listening.waitFor("caller");
  expect(await aborted(listening.signal)).toBe("cancelled");
});

test("a caller that has gone stops an exchange, until it has ended", async () => {
  const leaving = here();
  const timeouts = startExchangeTimeouts({ headMs: 1000, silenceMs: 1000, callerMs: 1000 }, leaving.signal, "acme");
  const over = startExchangeTimeouts({ headMs: 1000, silenceMs: 1000, callerMs: 1000 }, leaving.signal, "acme");
  over.end();
  await turn();
  leaving.abort();
  expect([timeouts.signal.reason, over.signal.aborted]).toEqual(["cancelled", false]);
  timeouts.stop("shutdown");
  expect(timeouts.signal.reason).toBe("cancelled");
  const late = startExchangeTimeouts({ headMs: 1, silenceMs: 1, callerMs: 1 }, leaving.signal, "acme");
  expect(() => late.throwIfStopped()).toThrow("cancelled");
});

/** Holds the event loop. */
function work(ms: number): void {
  for (const until = performance.now() + ms; performance.now() < until; );
}

test("of a tenant's streams that all end in one moment, a few milliseconds of work are done in a turn", async () => {
  const STREAMS = 300;
  let stopped = 0;
  const callers = Array.from({ length: STREAMS }, () => {
    const caller = here();
    const { signal } = startExchangeTimeouts({ headMs: 1e6, silenceMs: 1e6, callerMs: 1e6 }, caller.signal, "acme");
    signal.addEventListener("abort", () => {
      stopped++;
      work(1);
    });
    return caller;
  });
  for (const caller of callers) caller.abort();
  let most = stopped;
  for (let before = stopped; stopped < STREAMS; before = stopped) {
    await turn();
    most = Math.max(most, stopped - before);
  }
  expect(most).toBeLessThanOrEqual(16);
});

test("an exchange whose stop waits for its turn begins nothing more, and ends for the reason of the stop", async () => {
  await turn();
  const callers = [here(), here(), here()] as const;
  const [first, second, third] = callers.map(({ signal }) =>
    startExchangeTimeouts({ headMs: 1000, silenceMs: 1000, callerMs: 1000 }, signal, "acme"),
  );
  first?.signal.addEventListener("abort", () => work(10));
  for (const caller of callers) caller.abort();
  expect([first, second, third].map((each) => each?.signal.aborted)).toEqual([true, false, false]);
  expect(() => second?.throwIfStopped()).toThrow("cancelled");
  third?.stop("timeout");
  third?.end();
  expect(third?.signal.reason).toBe("cancelled");
});
