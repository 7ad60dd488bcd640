import { expect, test } from "bun:test";
import fc from "fast-check";
import { firstOf, Stop, type Stoppable } from "./stop.ts";

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

test("the first of several stops is the one that counts", () => {
  const [one, other] = [new Stop(), new AbortController()];
  const first = firstOf(one, other.signal);
  const told: unknown[] = [];
  first.addEventListener("abort", () => told.push(first.reason), { once: true });
  other.abort("other");
  one.abort("one");
  expect([first.aborted, told]).toEqual([true, ["other"]]);
  expect(firstOf(one, new Stop()).reason).toBe("one");
});
