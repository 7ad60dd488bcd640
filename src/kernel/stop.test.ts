import { expect, test } from "bun:test";
import fc from "fast-check";
import { Stop, type Stoppable, type StopSignal, untilFirst } from "./wait.ts";

const step = fc.record({
  what: fc.constantFrom("add", "remove", "abort", "look"),
  listener: fc.integer({ min: 0, max: 3 }),
});

/** What listeners and readers see. */
function seenOf(stop: Stoppable, steps: readonly { what: string; listener: number }[]): unknown[] {
  const seen: unknown[] = [];
  const listeners = [0, 1, 2, 3].map((n) => () => {
    seen.push(n);
    // One that goes away while the others are told.
    if (n === 1) stop.signal.removeEventListener("abort", listeners[0] as () => void);
  });
  for (const [n, { what, listener }] of steps.entries()) {
    const chosen = listeners[listener] as () => void;
    if (what === "add") stop.signal.addEventListener("abort", chosen, { once: true });
    else if (what === "remove") stop.signal.removeEventListener("abort", chosen);
    else if (what === "abort") stop.abort(`reason ${n}`);
    else seen.push(stop.signal.aborted, stop.signal.reason);
  }
  try {
    stop.signal.throwIfAborted();
  } catch (reason) {
    seen.push(reason);
  }
  return seen;
}

test("a stop tells the same as the runtime's signal", () => {
  fc.assert(
    fc.property(fc.array(step, { maxLength: 12 }), (steps) => {
      expect(seenOf(new Stop(), steps)).toEqual(seenOf(new AbortController(), steps));
    }),
    { numRuns: 2000 },
  );
});

test("the first of several stops is the one that counts", async () => {
  const [one, other] = [new Stop(), new AbortController()];
  const told: unknown[] = [];
  const first = await untilFirst([one, other.signal], async (either) => {
    either.addEventListener("abort", () => told.push(either.reason), { once: true });
    other.abort("other");
    one.abort("one");
    return either;
  });
  expect([first.aborted, told]).toEqual([true, ["other"]]);
  expect(await untilFirst([one, new Stop()], async (either) => either.reason)).toBe("one");
});

/** A stop with how many listen to it. */
class Counted extends Stop {
  listeners = 0;

  override addEventListener(type: "abort", listener: () => void): void {
    this.listeners++;
    super.addEventListener(type, listener);
  }

  override removeEventListener(type: "abort", listener: () => void): void {
    this.listeners--;
    super.removeEventListener(type, listener);
  }
}

test("work that several may stop leaves nothing at them, however it ends", async () => {
  const ends: Array<(either: StopSignal) => Promise<unknown>> = [
    async () => "done",
    async () => {
      throw new Error("failed");
    },
  ];
  for (const work of ends) {
    const [one, other] = [new Counted(), new Counted()];
    const during = untilFirst([one, other], work);
    expect([one.listeners, other.listeners]).toEqual([1, 1]);
    await during.catch(() => {});
    expect([one.listeners, other.listeners]).toEqual([0, 0]);
  }
});
