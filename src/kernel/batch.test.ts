import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { createBatcher, createTurnQueue } from "./batch.ts";

const turn = () => new Promise(setImmediate);

describe("a batcher", () => {
  interface Question {
    readonly subject: string;
    readonly count: number;
    answer(first: number): void;
    fail(error: Error): void;
  }

  /** Questions that are answered when the test says so. */
  function questions() {
    const asked: Question[] = [];
    const batcher = createBatcher(
      (subject: string, count) =>
        new Promise<(place: number) => number>((resolve, reject) => {
          asked.push({ subject, count, answer: (first) => resolve((place) => first + place), fail: reject });
        }),
    );
    return { asked, join: (key: string) => batcher.join(key, `about ${key}`) };
  }

  const step = fc.oneof(
    fc.record({ joins: fc.constantFrom("a", "b", "c"), many: fc.constantFrom(1, 1, 3, 100) }),
    fc.record({ turns: fc.constant(true) }),
    fc.record({ ends: fc.nat(2), isFailed: fc.boolean() }),
  );

  test("answers each who joins once and in order, by one question at a time about a key for all who came before it", async () => {
    await fc.assert(
      fc.asyncProperty(fc.array(step, { maxLength: 30, size: "max" }), async (steps) => {
        const { asked, join } = questions();
        const waiting = new Map<string, number[]>();
        /** By key, the question under way and those whom it is for. */
        const open = new Map<string, { question: Question; own: readonly number[] }>();
        const told = new Map<number, unknown>();
        const expected = new Map<number, unknown>();
        let [joined, ended] = [0, 0];

        function lookAtAsked(): void {
          for (const question of asked.splice(0)) {
            const key = question.subject.slice("about ".length);
            const own = waiting.get(key) ?? [];
            expect([open.has(key), question.count]).toEqual([false, own.length]);
            open.set(key, { question, own });
            waiting.delete(key);
          }
        }
        async function end(key: string, isFailed: boolean): Promise<void> {
          const { question, own = [] } = open.get(key) ?? {};
          open.delete(key);
          const first = 1_000 * ++ended;
          if (isFailed) {
            for (const one of [...own, ...(waiting.get(key) ?? [])]) expected.set(one, "away");
            waiting.delete(key);
            question?.fail(new Error("away"));
          } else {
            for (const [place, one] of own.entries()) expected.set(one, first + place);
            question?.answer(first);
          }
          // The last of many are told a few turns of the event loop later.
          for (let turns = 0; turns < 8; turns++) await turn();
          lookAtAsked();
          expect(told).toEqual(expected);
        }

        for (const one of steps) {
          if ("joins" in one) {
            for (let left = one.many; left > 0; left--) {
              const name = joined++;
              waiting.set(one.joins, [...(waiting.get(one.joins) ?? []), name]);
              const tell = (value: unknown) => {
                expect(told.has(name)).toBe(false);
                told.set(name, value);
              };
              void join(one.joins).then(tell, ({ message }) => tell(message));
            }
          } else if ("turns" in one) {
            await turn();
            lookAtAsked();
            // Those with no question of their key before them are asked for by now.
            for (const key of waiting.keys()) expect(open.has(key)).toBe(true);
          } else {
            const key = [...open.keys()][one.ends % Math.max(open.size, 1)];
            if (key !== undefined) await end(key, one.isFailed);
          }
        }
        await turn();
        lookAtAsked();
        for (let [key] = open.keys(); key !== undefined; [key] = open.keys()) await end(key, false);
        expect(told.size).toBe(joined);
      }),
      { numRuns: 100 },
    );
  });

  test("asks at the end of the turn in which the first one came, each key by itself", async () => {
    const { asked, join } = questions();
    const all = Promise.all([join("a"), join("b"), join("a"), join("a")]);
    expect(asked).toEqual([]);
    await turn();
    expect(asked.map(({ subject, count }) => [subject, count])).toEqual([
      ["about a", 3],
      ["about b", 1],
    ]);
    asked[0]?.answer(10);
    asked[1]?.answer(20);
    expect(await all).toEqual([10, 20, 11, 12]);
  });
});

describe("a queue by turns of tenants", () => {
  interface Item {
    readonly tenant: string;
    readonly n: number;
  }

  /** Somebody comes, or some are taken, of which the last ones are put back. */
  const steps = fc.array(
    fc.oneof(
      fc.record({ tenant: fc.constantFrom("a", "b", "c", "d") }),
      fc.record({ most: fc.integer({ min: 1, max: 6 }), back: fc.integer({ min: 0, max: 6 }) }),
    ),
    { maxLength: 80, size: "max" },
  );

  test("keeps the order of each tenant, passes over no tenant, and gives what is put back next", () => {
    fc.assert(
      fc.property(steps, (all) => {
        const queue = createTurnQueue<Item>();
        const waiting = new Map<string, Item[]>();
        const of = (tenant: string) => waiting.get(tenant) ?? [];
        let size = 0;
        let back: readonly Item[] = [];
        for (const [n, step] of all.entries()) {
          if ("tenant" in step) {
            queue.add({ ...step, n });
            waiting.set(step.tenant, [...of(step.tenant), { ...step, n }]);
            size++;
            continue;
          }
          const taken = queue.take(step.most);
          expect(taken).toHaveLength(Math.min(step.most, size));
          const counts = Map.groupBy(taken, ({ tenant }) => tenant);
          for (const [tenant, own] of counts) expect(own).toEqual(of(tenant).slice(0, own.length));
          // A tenant that still waits got as many of this batch as any other tenant, or one fewer.
          const most = Math.max(0, ...[...counts.values()].map((own) => own.length));
          for (const [tenant, own] of waiting) {
            const count = counts.get(tenant)?.length ?? 0;
            if (count < own.length) expect(count).toBeGreaterThanOrEqual(most - 1);
          }
          // Tenants whose pieces came back have the next turns.
          const first = [...new Set(back.map(({ tenant }) => tenant))].slice(0, taken.length);
          if (taken.length < size) expect([...counts.keys()].slice(0, first.length)).toEqual(first);
          const done = taken.slice(0, Math.max(taken.length - step.back, 0));
          back = taken.slice(done.length);
          queue.putBack(back);
          for (const { tenant } of done) waiting.set(tenant, of(tenant).slice(1));
          size -= done.length;
          expect(queue.size).toBe(size);
        }
        const rest = queue.take(Number.MAX_SAFE_INTEGER);
        for (const [tenant, own] of waiting) expect(rest.filter((item) => item.tenant === tenant)).toEqual(own);
      }),
      { numRuns: 500 },
    );
  });

  test("gives what is taken together in the order of its arrival", () => {
    const queue = createTurnQueue<Item>();
    const items = ["a", "a", "b", "a"].map((tenant, n) => ({ tenant, n }));
    for (const item of items) queue.add(item);
    expect(queue.take(4)).toEqual(items);
    expect([queue.size, queue.take(4)]).toEqual([0, []]);
  });
});
