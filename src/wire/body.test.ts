import { expect, test } from "bun:test";
import { bodyOf, freeBody, type LargeBody, PART_BYTES, wholeOf } from "./body.ts";

test("the memory of a body is given back once, of one in one piece, in parts, and joined", async () => {
  const piece = new Uint8Array(10);
  freeBody(piece);
  expect(piece.byteLength).toBe(0);
  const large = () => bodyOf([new Uint8Array(PART_BYTES), new Uint8Array(3)]) as LargeBody;
  const parts = large();
  for (let time = 0; time < 2; time++) freeBody(parts);
  expect(parts.parts.map(({ byteLength }) => byteLength)).toEqual([0, 0]);
  const joined = large();
  const whole = await wholeOf(joined, "t");
  expect(whole.byteLength).toBe(PART_BYTES + 3);
  for (let time = 0; time < 2; time++) freeBody(joined);
  expect(whole.byteLength).toBe(0);
});
