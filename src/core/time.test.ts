import { expect, test } from "bun:test";
import fc from "fast-check";
import { formatDateTime, parseDateTime } from "./time.ts";

test("a time that is written reads back as it was", () => {
  fc.assert(
    fc.property(fc.integer({ min: 0, max: 253_402_300_799_999 }), (time) => {
      expect(parseDateTime(formatDateTime(time))).toBe(time);
    }),
  );
});

test.each([
  ["2026-01-01T00:00:00Z", Date.UTC(2026, 0, 1)],
  ["2026-01-01t00:00:00.1239z", Date.UTC(2026, 0, 1, 0, 0, 0, 123)],
  ["2026-01-01T02:00:00+02:00", Date.UTC(2026, 0, 1)],
  ["2026-01-01T02:00:00 02:00", Date.UTC(2026, 0, 1)],
  ["2025-12-31T19:30:00-04:30", Date.UTC(2026, 0, 1)],
  ["2024-02-29T00:00:00Z", Date.UTC(2024, 1, 29)],
  ["2016-12-31T23:59:60Z", Date.UTC(2017, 0, 1)],
])("%s is a date-time", (text, time) => {
  expect(parseDateTime(text)).toBe(time);
});

test.each([
  "",
  "now",
  "2026-01-01",
  "2026-01-01T00:00:00",
  "2026-01-01T00:00Z",
  "2026-13-01T00:00:00Z",
  "2026-02-30T00:00:00Z",
  "2025-02-29T00:00:00Z",
  "2026-01-01T24:00:00Z",
  "2026-01-01T00:60:00Z",
  "2026-01-01T00:00:00+24:00",
  "1767225600",
  " 2026-01-01T00:00:00Z",
])("%p is no date-time", (text) => {
  expect(parseDateTime(text)).toBeNull();
});
