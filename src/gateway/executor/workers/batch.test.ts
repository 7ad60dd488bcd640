import { expect, test } from "bun:test";
import fc from "fast-check";
import { batchOf, itemsOf, type WithBody } from "./batch.ts";

const LONG = 64 * 1024;

const anyBody = fc.oneof(
  fc.constant(null),
  fc.uint8Array({ maxLength: 40 }),
  fc.constantFrom(LONG - 1, LONG, LONG + 1).map((length) => new Uint8Array(length).fill(7)),
  // A view on a larger buffer.
  fc.constantFrom(3, LONG).map((length) => new Uint8Array(2 * LONG).fill(9).subarray(5, 5 + length)),
);

const anyItem: fc.Arbitrary<WithBody<{ id: string; size: number | null }>> = fc.record({
  head: fc.record({ id: fc.string({ unit: "binary" }), size: fc.option(fc.integer()) }),
  body: anyBody,
});

test("messages that are posted in a batch arrive as they were, those with long texts last, and take nothing else along", () => {
  fc.assert(
    fc.property(fc.array(anyItem, { maxLength: 12 }), (items) => {
      const copies = items
        .toSorted((a, b) => Number(a.head.size === null) - Number(b.head.size === null))
        .map(({ head, body }) => ({ head, body: body === null ? null : body.slice() }));
      const { batch, transfer } = batchOf(items, ({ size }) => size === null);
      const arrived = itemsOf(structuredClone(batch, { transfer }));
      expect(arrived).toEqual(copies);
      for (const { body } of arrived) expect(body?.buffer.byteLength).toBe(body?.byteLength);
    }),
  );
});
