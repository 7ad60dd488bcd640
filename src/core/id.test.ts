import { expect, test } from "bun:test";
import { idFloor, idTime, isId, newId } from "./id.ts";

test("IDs made in one millisecond rise strictly, however many they are", () => {
  let last = "";
  let fallen = 0;
  for (let made = 0; made < 200_000; made++) {
    const id = newId("inv", 1_790_000_000_000 + Math.floor(made / 50_000));
    if (id <= last) fallen++;
    last = id;
  }
  expect(fallen).toBe(0);
  expect(isId("inv", last)).toBe(true);
});

test("an ID carries its time, and a time window is a range of IDs", () => {
  for (const time of [0, 1, 1_790_000_000_000, 0xffff_ffff_ffff]) {
    const id = newId("agt", time);
    expect([isId("agt", id), isId("inv", id), idTime(id)]).toEqual([true, false, time]);
    expect(id >= idFloor("agt", time)).toBe(true);
    if (time < 0xffff_ffff_ffff) expect(id < idFloor("agt", time + 1)).toBe(true);
  }
});

test("IDs of different milliseconds begin at another random count each", () => {
  const counts = Array.from({ length: 100 }, (_, time) => newId("inv", time).slice(18, 27));
  expect(new Set(counts).size).toBeGreaterThan(95);
});
