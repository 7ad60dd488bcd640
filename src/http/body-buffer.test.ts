import { expect, test } from "bun:test";
import fc from "fast-check";
import { atOnce } from "../concurrency/steps.ts";
import { createSpareParts, gather } from "./body-buffer.ts";

const MIB = 1024 * 1024;
/** Of all bodies, so that each comes to parts that hold bytes of others. */
const spare = createSpareParts();

test("a body comes out as it came in, in however many pieces, and little more than that is held", () => {
  const sizes = fc.array(fc.oneof(fc.nat(5000), fc.nat(600_000), fc.nat(3 * MIB)), { maxLength: 12 });
  fc.assert(
    fc.property(sizes, (pieces) => {
      const sizeMax = pieces.reduce((sum, size) => sum + size, 0);
      const body = gather(sizeMax, spare);
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
  const body = gather(20 * MIB, spare);
  for (let at = 0; at < 10; at++) body.add(new Uint8Array(2 * MIB));
  expect([...body.whole()].length).toBe(19);
  const dropped = gather(20 * MIB, spare);
  dropped.add(new Uint8Array(5 * MIB));
  dropped.drop();
  expect(dropped.held).toBe(0);
});

test("a body that is dropped while it is put together, or after that, gives each part back once", () => {
  for (const steps of [1, Number.POSITIVE_INFINITY]) {
    const own = createSpareParts();
    const body = gather(8 * MIB, own);
    body.add(new Uint8Array(3 * MIB + 1));
    const joining = body.whole();
    for (let step = 0; step < steps && !joining.next().done; step++);
    body.drop();
    const taken = Array.from({ length: 16 }, () => own.take());
    expect(new Set(taken).size).toBe(taken.length);
  }
});
