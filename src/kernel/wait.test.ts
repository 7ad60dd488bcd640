import { describe, expect, jest, test } from "bun:test";
import fc from "fast-check";
import { settled, useSimulatedClock } from "../../test/support/simulated-clock.ts";
import {
  createEndWaiters,
  createInFlight,
  endsWithin,
  Stop,
  type Stoppable,
  type StopSignal,
  unlessAborted,
  untilFirst,
  withDeadline,
} from "./wait.ts";

describe("a stop", () => {
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

  test("tells the same as the runtime's signal", () => {
    fc.assert(
      fc.property(fc.array(step, { maxLength: 12, size: "max" }), (steps) => {
        expect(seenOf(new Stop(), steps)).toEqual(seenOf(new AbortController(), steps));
      }),
      { numRuns: 2000 },
    );
  });

  test("that comes first of several is the one that counts", async () => {
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

  test("has no listener left after work that several may stop, however that ends", async () => {
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
      const alone = unlessAborted(one, work(one));
      expect(one.listeners).toBe(1);
      await alone.catch(() => {});
      expect(one.listeners).toBe(0);
    }
  });
});

test("who waits until nothing is in flight goes on at that moment and not before, however often one leaves", async () => {
  const step = fc.record({ action: fc.constantFrom("enter", "leave", "change"), at: fc.nat(), waits: fc.boolean() });
  await fc.assert(
    fc.asyncProperty(fc.array(step, { maxLength: 40, size: "max" }), async (steps) => {
      const inFlight = createInFlight();
      const all: { leave: () => void; isIn: boolean }[] = [];
      let [asked, due, wentOn] = [0, 0, 0];
      for (const { action, at, waits } of steps) {
        const one = all[at % Math.max(all.length, 1)];
        if (action !== "enter" && one !== undefined) {
          one.leave();
          one.isIn = false;
        }
        if (action !== "leave") all.push({ leave: inFlight.enter(), isIn: true });
        if (waits) {
          asked++;
          void inFlight.idle().then(() => wentOn++);
        }
        await settled();
        // Those who asked while something was in flight go on when nothing is; the others have gone on at once.
        if (!all.some(({ isIn }) => isIn)) due = asked;
        expect(wentOn).toBe(due);
      }
    }),
  );
});

describe("by a simulated clock,", () => {
  const clock = useSimulatedClock();
  const tens = (most: number) => fc.integer({ min: 0, max: most / 10 }).map((count) => 10 * count);

  test("work is stopped when its time is over, and no timer is left of work that ends before", async () => {
    const [late, kept] = [Promise.withResolvers<unknown>(), Promise.withResolvers<StopSignal>()];
    const forever = (signal: StopSignal) => unlessAborted(signal, new Promise<never>(() => {}));
    void untilFirst([new Stop()], forever, 100).catch(late.resolve);
    void untilFirst([], async (signal) => kept.resolve(signal), 100);
    await clock.pass(90);
    const inTime = jest.getTimerCount();
    const stop = new Stop();
    const stopped = untilFirst([stop], forever, 100).catch((reason: unknown) => reason);
    stop.abort("stop");
    expect([inTime, await stopped, (await kept.promise).aborted]).toEqual([1, "stop", false]);
    await clock.pass(10);
    expect(await late.promise).toMatchObject({ name: "TimeoutError" });
    expect([jest.getTimerCount(), (await kept.promise).aborted]).toEqual([0, false]);
  });

  test("the first of work, its deadline and an abort tells the outcome, and no timer is left", async () => {
    const plan = fc.record({
      takes: tens(300).map((ms) => ms + 5),
      ms: tens(300),
      aborts: tens(300).map((ms) => ms + 2),
      fails: fc.boolean(),
    });
    await fc.assert(
      fc.asyncProperty(plan, async ({ takes, ms, aborts, fails }) => {
        const outcome = fails ? "failed" : "done";
        const work = () =>
          new Promise<string>((resolve, reject) => setTimeout(fails ? reject : resolve, takes, outcome));
        const stop = new AbortController();
        setTimeout(() => stop.abort("aborted"), aborts);
        const both = [
          withDeadline(ms, work(), () => "late"),
          endsWithin(ms, work()),
          unlessAborted(stop.signal, work()),
        ].map((one) => (one as Promise<unknown>).then(String, String));
        await clock.pass(700);
        expect(jest.getTimerCount()).toBe(0);
        expect(await Promise.all(both)).toEqual([
          takes < ms ? outcome : "late",
          takes < ms ? (fails ? "failed" : "true") : "false",
          takes < aborts ? outcome : "aborted",
        ]);
      }),
    );
    // A time that has passed, and a signal that was aborted before.
    const never = new Promise<never>(() => {});
    const late = endsWithin(-5, never);
    await clock.pass(10);
    expect(await late).toBe(false);
    expect(await unlessAborted(AbortSignal.abort("gone"), never).catch(String)).toBe("gone");
  });

  const LOOK_AGAIN_MS = 100;

  test("each who waits for an end is told once: at once of what ends here, by the next look of what ends elsewhere, else in time", async () => {
    const names = fc.constantFrom("a", "b", "c");
    const step = fc.oneof(
      fc.record({ waits: names, ms: tens(2_000), aborts: fc.option(tens(1_000)) }),
      fc.record({ ends: names, isHere: fc.boolean() }),
      fc.record({ passes: tens(500) }),
      fc.record({ isAway: fc.boolean() }),
    );
    await fc.assert(
      fc.asyncProperty(fc.array(step, { maxLength: 20, size: "max" }), fc.boolean(), async (steps, isReleased) => {
        clock.now = 0;
        /** When each ended, and by when those who wait for it have to know. */
        const ended = new Map<string, { at: number; isKnownBy: number }>();
        let isAway = false;
        const waiters = createEndWaiters<string>({
          nameOf: (key) => key,
          lookAgainMs: LOOK_AGAIN_MS,
          async endedAmong(keys) {
            if (isAway) throw new Error("away");
            return keys.filter((key) => ended.has(key));
          },
        });
        interface Waiting {
          readonly key: string;
          readonly until: number;
          told: { at: number; isEnded: boolean } | null;
        }
        const all: Waiting[] = [];

        for (const one of steps) {
          if ("waits" in one) {
            const stop = new AbortController();
            const until = clock.now + Math.min(one.ms, one.aborts ?? one.ms);
            if (one.aborts !== null) setTimeout(() => stop.abort(), one.aborts);
            const waiting: Waiting = { key: one.waits, until, told: null };
            all.push(waiting);
            const wanted = {
              key: one.waits,
              ms: one.ms,
              signal: stop.signal,
              look: async () => ended.has(one.waits),
              isEnded: (found: boolean) => found,
            };
            void waiters.wait(wanted).then((isEnded) => {
              expect(waiting.told).toBeNull();
              waiting.told = { at: clock.now, isEnded };
            });
          } else if ("ends" in one) {
            if (!ended.has(one.ends))
              ended.set(one.ends, { at: clock.now, isKnownBy: clock.now + (one.isHere ? 0 : LOOK_AGAIN_MS) });
            if (one.isHere) waiters.announce(one.ends);
          } else if ("isAway" in one) {
            isAway = one.isAway;
          } else await clock.pass(one.passes);
          await settled();
          // What ended while the store was away is found by the look after that, unless it was announced.
          if (isAway)
            for (const end of ended.values())
              if (end.isKnownBy >= clock.now && end.isKnownBy > end.at) end.isKnownBy = Infinity;
          for (const { key, until, told } of all) {
            const end = ended.get(key);
            const isDue = clock.now > until || (end !== undefined && clock.now > end.isKnownBy);
            if (isDue) expect(told).not.toBeNull();
            if (told === null) continue;
            if (told.isEnded) expect(end?.at).toBeLessThanOrEqual(told.at);
            // Nobody is told before there is something to tell. What ends in the same moment may be seen or not.
            else expect([told.at >= until, (end?.at ?? told.at) >= told.at]).toEqual([true, true]);
          }
        }
        if (isReleased) waiters.release();
        else await clock.pass(2_010);
        await settled();
        expect(all.filter(({ told }) => told === null)).toEqual([]);
        if (isReleased)
          expect(await waiters.wait({ key: "d", ms: 60_000, look: async () => 7, isEnded: () => false })).toBe(7);
        isAway = false;
        await clock.pass(2_010);
        // Nobody waits, so that nothing is looked for.
        expect(jest.getTimerCount()).toBe(0);
      }),
      { numRuns: 60 },
    );
  });
});
