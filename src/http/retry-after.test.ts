import { expect, test } from "bun:test";
import fc from "fast-check";
import { retryAfterMs } from "./retry-after.ts";

const NOW = Date.parse("2026-11-23T18:00:00Z");
const MOST = 30_000;

test("seconds and dates are read, and nothing is longer than the bound", () => {
  const read = [
    null,
    "0",
    "2",
    " 7 ",
    "86400",
    "Mon, 23 Nov 2026 18:00:09 GMT",
    "Mon, 23 Nov 2026 17:00:00 GMT",
    "Tue, 24 Nov 2026 18:00:00 GMT",
    "soon",
    "",
  ].map((value) => retryAfterMs(value, NOW, MOST));
  expect(read).toEqual([null, 0, 2_000, 7_000, MOST, 9_000, 0, MOST, null, null]);
});

test("whatever a server sends, it is nothing or within the bound", () => {
  const value = fc.oneof(fc.string(), fc.integer().map(String), fc.bigInt().map(String));
  fc.assert(
    fc.property(value, fc.nat(), (sent, now) => {
      const ms = retryAfterMs(sent, now, MOST);
      expect(ms === null || (ms >= 0 && ms <= MOST)).toBe(true);
    }),
  );
});
