import { expect, test } from "bun:test";
import fc from "fast-check";
import { atOnce } from "../concurrency/steps.ts";
import { freeMemory, gather } from "./body-buffer.ts";

const MIB = 1024 * 1024;

test("a body comes out as it came in, in however many pieces, and little more than that is held", () => {
  const sizes = fc.array(fc.oneof(fc.nat(5000), fc.nat(600_000), fc.nat(3 * MIB)), { maxLength: 12 });
  fc.assert(
    fc.property(sizes, fc.boolean(), (pieces, isExact) => {
      const sizeMax = pieces.reduce((sum, size) => sum + size, 0);
      const body = gather(sizeMax, isExact);
      const all = Buffer.alloc(sizeMax);
      let at = 0;
      for (const [number, size] of pieces.entries()) {
        const piece = new Uint8Array(size).fill(number + 1);
        all.set(piece, at);
        at += size;
        body.add(piece);
        expect(body.held).toBeGreaterThanOrEqual(at);
        expect(body.held).toBeLessThanOrEqual(Math.min(sizeMax, 2 * at, at + MIB));
      }
      const whole = atOnce(body.whole());
      expect(Buffer.compare(whole, all)).toBe(0);
      expect(whole.buffer.byteLength).toBe(sizeMax);
    }),
    { numRuns: 60 },
  );
});

test("no step of putting a body together copies more than one part, and nothing is left of it when it is dropped", () => {
  const body = gather(20 * MIB, false);
  for (let at = 0; at < 10; at++) body.add(new Uint8Array(2 * MIB));
  expect([...body.whole()].length).toBe(19);
  for (const isExact of [false, true]) {
    const dropped = gather(20 * MIB, isExact);
    dropped.add(new Uint8Array(5 * MIB));
    dropped.drop();
    expect(dropped.held).toBe(0);
  }
});

test("a large body whose length is known is in one piece as soon as it has come", () => {
  const body = gather(20 * MIB, true);
  body.add(new Uint8Array(2 * MIB).fill(1));
  expect(body.held).toBe(2 * MIB);
  // From here on it is believed.
  body.add(new Uint8Array(MIB).fill(2));
  expect(body.held).toBe(3 * MIB);
  for (let at = 3; at < 20; at++) body.add(new Uint8Array(MIB).fill(at));
  const steps = body.whole();
  const { done, value } = steps.next();
  expect(done).toBe(true);
  const bytes = value as Uint8Array;
  expect(Array.from({ length: 20 }, (_, at) => bytes[at * MIB])).toEqual([
    1,
    1,
    2,
    ...Array.from({ length: 17 }, (_, at) => at + 3),
  ]);
});

test("one that ends early has nothing of the memory that was reserved for the rest", () => {
  const body = gather(20 * MIB, true);
  body.add(new Uint8Array(5 * MIB).fill(1));
  const whole = atOnce(body.whole());
  expect([whole.byteLength, whole.buffer.byteLength]).toEqual([5 * MIB, 5 * MIB]);
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
