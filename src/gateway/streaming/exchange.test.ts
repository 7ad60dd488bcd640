import { expect, test } from "bun:test";
import { startExchangeTimeouts } from "./exchange.ts";

const here = () => new AbortController();
const aborted = (signal: AbortSignal) =>
  new Promise((resolve) => signal.addEventListener("abort", () => resolve(signal.reason)));

test("a timeout for silence counts only the side that is waited for", async () => {
  const timeouts = startExchangeTimeouts({ headMs: 60_000, silenceMs: 300, callerMs: 60_000 }, here().signal);
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
  const timeouts = startExchangeTimeouts({ headMs: 60_000, silenceMs: 300, callerMs: 60_000 }, here().signal);
  for (let piece = 0; piece < 10; piece++) {
    timeouts.waitFor("upstream");
    await Bun.sleep(35);
  }
  expect(timeouts.signal.aborted).toBe(false);
  timeouts.end();
});

test("the head of an answer has its own timeout, and silence has none where no limit is set", async () => {
  const late = startExchangeTimeouts({ headMs: 20, silenceMs: null, callerMs: 60_000 }, here().signal);
  late.waitFor("head");
  expect(await aborted(late.signal)).toBe("timeout");
  const listening = startExchangeTimeouts({ headMs: 20, silenceMs: null, callerMs: 20 }, here().signal);
  listening.waitFor("head");
  listening.waitFor("upstream");
  await Bun.sleep(60);
  expect(listening.signal.aborted).toBe(false);
  listening.waitFor("caller");
  expect(await aborted(listening.signal)).toBe("cancelled");
});

test("a caller that has gone stops an exchange, until it has ended", async () => {
  const leaving = here();
  const timeouts = startExchangeTimeouts({ headMs: 1000, silenceMs: 1000, callerMs: 1000 }, leaving.signal);
  const over = startExchangeTimeouts({ headMs: 1000, silenceMs: 1000, callerMs: 1000 }, leaving.signal);
  over.end();
  leaving.abort();
  expect([timeouts.signal.reason, over.signal.aborted]).toEqual(["cancelled", false]);
  timeouts.stop("shutdown");
  expect(timeouts.signal.reason).toBe("cancelled");
  expect(startExchangeTimeouts({ headMs: 1, silenceMs: 1, callerMs: 1 }, leaving.signal).signal.reason).toBe(
    "cancelled",
  );
});
