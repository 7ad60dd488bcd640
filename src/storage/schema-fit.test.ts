import { expect, test } from "bun:test";
import fc from "fast-check";
import { fitOf, type Schema, schemaOf } from "./migrate.ts";

const KNOWN = 30;

/** As later versions have left them: each may raise the floor. */
const later = fc
  .array(fc.integer({ min: 0, max: 10 }), { minLength: 1, maxLength: 10 })
  .map((behind) => behind.map((by, index) => row(KNOWN + 1 + index, by)));

function row(version: number, by: number): Schema {
  return { version, floor: version - by };
}

const own: Schema[] = Array.from({ length: KNOWN }, (_, index) => row(index + 1, 0));

test("what several newer versions have left is used when each of them allows it", () => {
  fc.assert(
    fc.property(later, (rows) => {
      const allowed = rows.every(({ floor }) => floor <= KNOWN);
      expect(fitOf(schemaOf([...rows, ...own]), KNOWN)).toBe(allowed ? "newer" : "too new");
    }),
    { examples: [[[row(31, 1), row(32, 1)]], [[row(31, 0), row(32, 2)]], [[row(31, 0), row(32, 9)]]] },
  );
});

test("what is not newer fits, whatever it says", () => {
  const fitAt = (count: number) => fitOf(schemaOf(own.slice(0, count)), KNOWN);
  expect([0, 1, KNOWN - 1, KNOWN].map(fitAt)).toEqual(["none", "older", "older", "same"]);
  // A row that earlier programs locked on Postgres is no version.
  expect(schemaOf([row(0, 0)])).toEqual({ version: 0, floor: 0 });
  expect(fitOf(schemaOf([row(0, 0), row(22, 0)]), KNOWN)).toBe("older");
});
