import { expect, test } from "bun:test";
import fc from "fast-check";
import { bodyPartsOf, freeMemory, PART_BYTES, startOf, wholeOf } from "../wire/body.ts";
import { createBodyBuffer } from "./body-buffer.ts";

const MIB = 1024 * 1024;

test("a body comes out as it came in, in however many pieces, and little more than that is held", () => {
  const sizes = fc.array(fc.oneof(fc.nat(5000), fc.nat(600_000), fc.nat(3 * MIB)), { maxLength: 12 });
  fc.assert(
    fc.property(sizes, (pieces) => {
      const sizeMax = pieces.reduce((sum, size) => sum + size, 0);
      const body = createBodyBuffer(sizeMax);
      const all = Buffer.alloc(sizeMax);
      let at = 0;
      for (const [number, size] of pieces.entries()) {
        const piece = new Uint8Array(size).fill(number + 1);
        all.set(piece, at);
        at += size;
        body.add(piece);
        expect(body.held).toBeGreaterThanOrEqual(at);
        expect(body.held).toBeLessThanOrEqual(Math.min(sizeMax, 2 * at, at + PART_BYTES));
      }
      const parts = bodyPartsOf(body.body());
      expect(Buffer.compare(Buffer.concat(parts), all)).toBe(0);
      for (const part of parts.slice(0, -1)) expect(part.buffer.byteLength).toBe(PART_BYTES);
      expect(parts.at(-1)?.buffer.byteLength).toBe(sizeMax - (parts.length - 1) * PART_BYTES);
    }),
    { numRuns: 60 },
  );
});

test("what is not stored is kept in the pieces in which it came, where they are large and nobody else's", () => {
  const size = fc.oneof(fc.nat(5000), fc.integer({ min: 60_000, max: 700_000 }), fc.nat(2 * MIB));
  const pieces = fc.array(fc.record({ size, isOwn: fc.boolean() }), { maxLength: 12 });
  fc.assert(
    fc.property(pieces, fc.nat(3), (asked, storedParts) => {
      const sizeMax = asked.reduce((sum, piece) => sum + piece.size, 0);
      const body = createBodyBuffer(sizeMax, storedParts * PART_BYTES);
      const all: Uint8Array[] = [];
      let at = 0;
      for (const [number, { size, isOwn }] of asked.entries()) {
        const piece = new Uint8Array(isOwn ? size : size + 1).subarray(0, size).fill(number + 1);
        all.push(piece.slice());
        const isStored = at < storedParts * PART_BYTES;
        expect(body.add(piece)).toBe(!isStored && isOwn && size >= 64 * 1024);
        at += size;
        expect(body.held).toBeGreaterThanOrEqual(at);
        expect(body.held).toBeLessThanOrEqual(Math.min(sizeMax, at + PART_BYTES));
      }
      const whole = body.body();
      expect(whole.byteLength).toBe(sizeMax);
      expect(body.held).toBe(0);
      const parts = bodyPartsOf(whole);
      expect(Buffer.compare(Buffer.concat(parts), Buffer.concat(all))).toBe(0);
      const stored = bodyPartsOf(startOf(whole, storedParts * PART_BYTES));
      expect(Buffer.concat(stored).byteLength).toBe(Math.min(sizeMax, storedParts * PART_BYTES));
      for (const part of stored.slice(0, -1)) expect(part.byteLength).toBe(PART_BYTES);
      expect(Buffer.compare(wholeOf(whole), Buffer.concat(all))).toBe(0);
    }),
    { numRuns: 60 },
  );
});

test("nothing is left of a body when it is dropped", () => {
  const dropped = createBodyBuffer(20 * MIB);
  dropped.add(new Uint8Array(5 * MIB));
  dropped.drop();
  expect(dropped.held).toBe(0);
});

test("memory is given back once, and that of something larger not at all", () => {
  const piece = new Uint8Array(100);
  for (let time = 0; time < 2; time++) freeMemory(piece);
  expect(piece.byteLength).toBe(0);
  const part = new Uint8Array(100).subarray(1);
  freeMemory(part);
  freeMemory(Buffer.from("pooled"));
  expect(part.byteLength).toBe(99);
});
