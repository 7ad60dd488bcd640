import { expect, test } from "bun:test";
import fc from "fast-check";
import { atOnce } from "../../../kernel/turns.ts";
import { bodyPartsOf, type CallBody, LargeBody, PART_BYTES } from "../../../wire/body.ts";
import { batchOf, itemsOf, type WithBody } from "./messages.ts";

const LONG = 64 * 1024;

const partOf = (size: number) => new Uint8Array(size < 8 ? PART_BYTES : size).fill(size);
const bytesOf = (body: CallBody | null) => (body === null ? null : Buffer.concat(bodyPartsOf(body)));

const anyBody = fc.oneof(
  fc.constant(null),
  fc.uint8Array({ maxLength: 40 }),
  fc.constantFrom(LONG - 1, LONG, LONG + 1).map((length) => new Uint8Array(length).fill(7)),
  // A view on a larger buffer.
  fc.constantFrom(3, LONG).map((length) => new Uint8Array(2 * LONG).fill(9).subarray(5, 5 + length)),
  fc.constantFrom(1, LONG, PART_BYTES).map((last) => new LargeBody([3, 4, last].map(partOf))),
  fc.constantFrom(1, LONG, PART_BYTES).map((last) => {
    const joined = new LargeBody([5, last].map(partOf));
    atOnce(joined.joined());
    return joined;
  }),
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
        .map(({ head, body }) => ({ head, body: bytesOf(body) }));
      const { batch, transfer } = batchOf(items, ({ size }) => size === null);
      const arrived = itemsOf(structuredClone(batch, { transfer }));
      expect(arrived.map(({ head, body }) => ({ head, body: bytesOf(body) }))).toEqual(copies);
      for (const part of arrived.flatMap(({ body }) =>
        body instanceof LargeBody ? body.parts : [body ?? new Uint8Array()],
      )) {
        expect(part.buffer.byteLength).toBe(part.byteLength);
      }
    }),
  );
});
