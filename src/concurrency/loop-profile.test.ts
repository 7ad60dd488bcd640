import { expect, test } from "bun:test";
import { during, mostSpent } from "./loop-profile.ts";

/** Holds the event loop. */
function hold(ms: number): void {
  const until = performance.now() + ms;
  while (performance.now() < until);
}

test("the work that took most time is told, without what it did under other names", () => {
  mostSpent();
  const result = during("outer", () => {
    hold(5);
    during("inner", () => hold(150));
    during("inner", () => hold(150));
    return 7;
  });
  expect(result).toBe(7);
  const most = mostSpent();
  expect(most?.work).toBe("inner");
  expect(most?.ms).toBeGreaterThanOrEqual(300);
  expect(mostSpent()).toBeNull();
});

test("work that throws has taken its time as well", () => {
  mostSpent();
  const fail = () =>
    during("failing", () => {
      hold(150);
      throw new Error("no");
    });
  expect(() => during("outer", fail)).toThrow("no");
  expect(mostSpent()?.work).toBe("failing");
  during("next", () => hold(1));
  expect(mostSpent()?.work).toBe("next");
});
