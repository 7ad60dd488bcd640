// What is captured of an answer is its start, byte for byte, whatever length the answer tells.
import { expect, test } from "bun:test";
import fc from "fast-check";
import { MAX } from "../../kernel/limits.ts";
import { createBudget, createResponseRecorder } from "./response-recorder.ts";

const KEPT = { capture: true, receipt: false };

test("the captured start is the answer's own, and its memory is given back", () => {
  const sizes = fc.array(fc.oneof(fc.nat(100), fc.nat(70_000), fc.nat(400_000)), { maxLength: 12 });
  const told = fc.constantFrom("none", "right", "short", "long", "nonsense");
  fc.assert(
    fc.property(sizes, told, (pieces, how) => {
      const all = Buffer.concat(pieces.map((size, at) => new Uint8Array(size).fill(at + 1)));
      const lengths = { right: all.length, short: all.length >> 1, long: 2 * all.length + 1, nonsense: "-1" };
      const memory = createBudget(8 * MAX.capturedBytes)("t");
      const recorder = createResponseRecorder(KEPT, memory);
      const headers = how === "none" ? {} : { "content-length": `${lengths[how as keyof typeof lengths]}` };
      recorder.head(new Response(null, { headers }));
      let at = 0;
      for (const size of pieces) {
        const piece = new Uint8Array(all.subarray(at, at + size));
        recorder.piece(piece);
        // The piece is gone as soon as it has passed.
        piece.fill(0);
        at += size;
      }
      const { response, response_truncated, resp_size } = recorder.whole();
      expect(Buffer.compare(response ?? Buffer.alloc(0), all.subarray(0, MAX.capturedBytes))).toBe(0);
      expect(response?.buffer.byteLength).toBe(response?.byteLength);
      expect([resp_size, response_truncated]).toEqual([all.length, all.length > MAX.capturedBytes]);
      expect(memory.take(7 * MAX.capturedBytes)).toBe(7 * MAX.capturedBytes);
    }),
    { numRuns: 60 },
  );
});

test("a tenant gets the memory that it asks for, up to what it may hold", () => {
  const share = createBudget(1000)("a");
  expect([share.take(500), share.take(500), share.take(1)]).toEqual([500, 375, 0]);
  share.giveBack(400);
  expect(share.take(1000)).toBe(400);
});

test("however much memory others have taken, the next tenant finds some, and all of it comes back", () => {
  const asks = fc.array(fc.tuple(fc.integer({ min: 0, max: 9 }), fc.integer({ min: 0, max: 2_000_000 })));
  fc.assert(
    fc.property(asks, (list) => {
      const budget = createBudget(1_000_000);
      const taken = list.map(([tenant, bytes]) => [tenant, budget(`${tenant}`).take(bytes)] as const);
      const sum = taken.reduce((all, [, bytes]) => all + bytes, 0);
      expect(sum).toBeLessThan(1_000_000);
      const late = budget("late");
      const found = late.take(1_000_000);
      expect(found).toBeGreaterThan(200);
      late.giveBack(found);
      for (const [tenant, bytes] of taken) budget(`${tenant}`).giveBack(bytes);
      expect(late.take(1_000_000)).toBe(875_000);
    }),
  );
});
