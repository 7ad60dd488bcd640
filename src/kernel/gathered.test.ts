import { expect, test } from "bun:test";
import { createGathering } from "./batch.ts";

/** Questions that are answered when the test says so. */
function questions() {
  const asked: { subject: string; count: number; answer(first: number): void; fail(error: Error): void }[] = [];
  const gathering = createGathering(
    (subject: string, count) =>
      new Promise<(place: number) => number>((resolve, reject) => {
        asked.push({ subject, count, answer: (first) => resolve((place) => first + place), fail: reject });
      }),
  );
  return { asked, join: (key: string) => gathering.join(key, `about ${key}`) };
}

const turn = () => new Promise(setImmediate);
const counts = (asked: readonly { subject: string; count: number }[]) =>
  asked.map(({ subject, count }) => [subject, count]);

test("those who come in one turn are asked for together, each key by itself, and answered in their order", async () => {
  const { asked, join } = questions();
  const all = Promise.all([join("a"), join("b"), join("a"), join("a")]);
  expect(asked).toEqual([]);
  await turn();
  expect(counts(asked)).toEqual([
    ["about a", 3],
    ["about b", 1],
  ]);
  asked[0]?.answer(10);
  asked[1]?.answer(20);
  expect(await all).toEqual([10, 20, 11, 12]);
});

test("those who come during a question are asked for together when it has been answered", async () => {
  const { asked, join } = questions();
  const first = join("a");
  await turn();
  const later = Promise.all(Array.from({ length: 500 }, () => join("a")));
  for (let turns = 0; turns < 3; turns++) await turn();
  expect(counts(asked)).toEqual([["about a", 1]]);
  asked[0]?.answer(0);
  expect(await first).toBe(0);
  await turn();
  expect(counts(asked)).toEqual([
    ["about a", 1],
    ["about a", 500],
  ]);
  asked[1]?.answer(1);
  expect(await later).toEqual(Array.from({ length: 500 }, (_, i) => i + 1));
  const last = join("a");
  await turn();
  asked[2]?.answer(7);
  expect(await last).toBe(7);
});

test("a question that fails refuses those who have waited behind it, and the next one is asked", async () => {
  const { asked, join } = questions();
  const told = (answer: Promise<number>) => answer.catch((error: Error) => error.message);
  const first = told(join("a"));
  await turn();
  const behind = told(join("a"));
  asked[0]?.fail(new Error("away"));
  expect([await first, await behind]).toEqual(["away", "away"]);
  const next = told(join("a"));
  await turn();
  expect(counts(asked)).toHaveLength(2);
  asked[1]?.answer(3);
  expect(await next).toBe(3);
});
