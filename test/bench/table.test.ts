import { describe, expect, test } from "bun:test";
import { changes, latency, newRow, percentile, printed, printedChanges, printedRow } from "./table.ts";

describe("percentiles", () => {
  test("are values that were measured, whatever their order", () => {
    const values = Array.from({ length: 100 }, (_, index) => 100 - index);
    expect([percentile(values, 0), percentile(values, 0.5), percentile(values, 0.99)]).toEqual([1, 51, 100]);
    expect(percentile(values, 1)).toBe(100);
    expect(values[0]).toBe(100);
  });

  test("compare numbers, and not their texts", () => {
    expect(percentile([10, 9, 100], 0.5)).toBe(10);
  });

  test("of nothing are none", () => {
    expect(percentile([], 0.5)).toBeNull();
    expect(latency([])).toEqual({});
    expect(latency([7])).toEqual({ p50_ms: 7, p99_ms: 7 });
  });
});

const floor = newRow("accepts", "bare", { rate: 16_000, p50_ms: 4 });
const row = newRow("accepts", "ours", { rate: 4_000, p50_ms: 5.5, written: 3 }, { floor: [floor, "rate"], note: "n" });

describe("a row", () => {
  test("says what it is of its floor", () => {
    expect(row.floor).toEqual({ work: "bare", by: "rate", ratio: 0.25 });
  });

  test("says nothing of a floor that lacks the figure, or has none of it", () => {
    expect(newRow("p", "w", { gas: 5 }, { floor: [floor, "gas"] }).floor).toBeNull();
    expect(newRow("p", "w", { rate: 5 }, { floor: [newRow("p", "f", { rate: 0 }), "rate"] }).floor).toBeNull();
  });
});

test("the table has a column for each figure that any row has, and no other", () => {
  expect(printed([floor, row])).toBe(
    [
      "                  /s  p50 ms  B written",
      "accepts: bare  16000    4.00",
      "accepts: ours   4000    5.50       3.00  0.25 of the /s of bare  n",
    ].join("\n"),
  );
});

test("a row by itself names its figures", () => {
  expect(printedRow(row)).toBe("accepts: ours  /s 4000  p50 ms 5.50  B written 3.00  0.25 of the /s of bare  n");
});

describe("beside an earlier run", () => {
  const earlier = [
    newRow("accepts", "ours", { rate: 2_000, p50_ms: 11, rss_mb: 5 }, { floor: [floor, "rate"] }),
    newRow("accepts", "gone", { rate: 1 }),
    newRow("other", "bare", { rate: 1 }),
  ];
  const changed = changes([floor, row], earlier);

  test("each figure that both runs have is so many times what it was", () => {
    expect(changed.map(({ work, figures }) => [work, figures])).toEqual([["ours", { rate: 2, p50_ms: 0.5 }]]);
  });

  test("the ratio to the floor is compared as well, since it holds on machines that differ", () => {
    expect(changed[0]?.floor?.ratio).toBe(2);
    expect(printedChanges(changed)).toBe(
      ["                  /s  p50 ms", "accepts: ours  ×2.00   ×0.50  ×2.00 what it was of its floor"].join("\n"),
    );
  });

  test("what was nothing has no ratio", () => {
    const [none] = changes([newRow("p", "w", { rate: 3 })], [newRow("p", "w", { rate: 0 })]);
    expect(none?.figures).toEqual({});
  });
});
