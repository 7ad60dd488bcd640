import { expect, test } from "bun:test";
import fc from "fast-check";
import { atOnce } from "../concurrency/steps.ts";
import { gather } from "./body-buffer.ts";

const MIB = 1024 * 1024;

test("a body comes out as it came in, in however many pieces, and little more than that is held", () => {
  const sizes = fc.array(fc.oneof(fc.nat(5000), fc.nat(600_000), fc.nat(3 * MIB)), { maxLength: 12 });
  fc.assert(
    fc.property(sizes, (pieces) => {
      const sizeMax = pieces.reduce((sum, size) => sum + size, 0);
      const body = gather(sizeMax);
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
  const body = gather(20 * MIB);
  for (let at = 0; at < 10; at++) body.add(new Uint8Array(2 * MIB));
  expect([...body.whole()].length).toBe(19);
  const dropped = gather(20 * MIB);
  dropped.add(new Uint8Array(5 * MIB));
  dropped.drop();
  expect(dropped.held).toBe(0);
});
