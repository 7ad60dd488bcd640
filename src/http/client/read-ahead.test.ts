import { describe, expect, test } from "bun:test";
import { ReadAhead } from "./exchange.ts";

const KIB = 1024;
const SIZE = 1024 * KIB;

/** An answer whose connection is read or not, as it is told. */
function answer(ahead: ReadAhead, tenant: string) {
  const reader = ahead.of(tenant);
  let isRead = true;
  reader.open({
    pause: () => {
      isRead = false;
    },
    resume: () => {
      isRead = true;
    },
  });
  return Object.assign(reader, { isRead: () => isRead });
}

/** What is resumed is so in the turns that follow. */
async function turns(): Promise<void> {
  for (let turn = 0; turn < 20; turn++) await new Promise((resolve) => setImmediate(resolve));
}

function many(ahead: ReadAhead, tenant: string, count: number) {
  return Array.from({ length: count }, () => answer(ahead, tenant));
}

describe("reading ahead of an answer", () => {
  test("stops for all answers of a tenant that has used up its share, and for nobody else's", () => {
    const ahead = new ReadAhead(SIZE);
    const mine = many(ahead, "a", 10);
    const other = answer(ahead, "b");
    mine[0]?.add(SIZE / 2);
    expect(mine.every(({ isRead }) => isRead())).toBe(true);
    mine[1]?.add(SIZE / 2);
    expect(mine.some(({ isRead }) => isRead())).toBe(false);
    expect(answer(ahead, "a").isRead()).toBe(false);
    expect([other.isRead(), answer(ahead, "b").isRead()]).toEqual([true, true]);
    other.add(64 * KIB);
    expect(other.isRead()).toBe(true);
  });

  test("goes on when some is taken, for a few at a time", async () => {
    const ahead = new ReadAhead(SIZE);
    const [first, ...rest] = many(ahead, "a", 100);
    first?.add(SIZE);
    await turns();
    expect(rest.some(({ isRead }) => isRead())).toBe(false);
    first?.add(-SIZE / 2);
    await new Promise((resolve) => setImmediate(resolve));
    const read = rest.filter(({ isRead }) => isRead());
    expect(read.length).toBeGreaterThan(0);
    expect(read.length).toBeLessThan(50);
    // They bring more than there is room for.
    read[0]?.add(SIZE);
    expect(rest.some(({ isRead }) => isRead())).toBe(false);
    read[0]?.add(-SIZE);
    await turns();
    expect(rest.every(({ isRead }) => isRead())).toBe(true);
  });

  test("goes on when an answer is over, whatever was left of it", async () => {
    const ahead = new ReadAhead(SIZE);
    const [first, second] = many(ahead, "a", 2);
    first?.add(3 * SIZE);
    first?.close();
    await turns();
    expect([second?.isRead(), answer(ahead, "a").isRead()]).toEqual([true, true]);
  });

  test("does not stop when the answer has memory of its own", async () => {
    const ahead = new ReadAhead(SIZE);
    const [first, second, third] = many(ahead, "a", 3);
    first?.exempt();
    second?.add(SIZE);
    third?.exempt();
    expect([first, second, third].map((each) => each?.isRead())).toEqual([true, false, true]);
  });

  test("goes on for a tenant that comes when others have used up all: piece by piece, as it is taken", async () => {
    const ahead = new ReadAhead(SIZE);
    for (let tenant = 0; tenant < 20; tenant++) answer(ahead, `t${tenant}`).add(SIZE);
    const [first, second] = many(ahead, "last", 2);
    for (let time = 0; time < 5; time++) {
      first?.add(200 * KIB);
      expect([first, second].map((each) => each?.isRead())).toEqual([false, false]);
      first?.add(-200 * KIB);
      await turns();
      expect([first, second].map((each) => each?.isRead())).toEqual([true, true]);
    }
  });
});
