import { expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { bodyOf, bodyPartsOf, freeBody, hashOf, judged, LargeBody, PART_BYTES, wholeBodyTask } from "./body.ts";

test("the memory of a body is given back once, of one in one piece, in parts, and joined", async () => {
  const piece = new Uint8Array(10);
  freeBody(piece);
  expect(piece.byteLength).toBe(0);
  const large = () => bodyOf([new Uint8Array(PART_BYTES), new Uint8Array(3)]) as LargeBody;
  const parts = large();
  for (let time = 0; time < 2; time++) freeBody(parts);
  expect(parts.parts.map(({ byteLength }) => byteLength)).toEqual([0, 0]);
  const joined = large();
  const [size, whole] = await judged(
    joined,
    wholeBodyTask("size", ({ length }) => length),
    "t",
  );
  expect(size).toBe(PART_BYTES + 3);
  expect(whole.byteLength).toBe(PART_BYTES + 3);
  for (let time = 0; time < 2; time++) freeBody(joined);
  expect(whole.byteLength).toBe(0);
});

test("a hash is that of the whole, whatever parts it is in, and of a large body made once", async () => {
  for (const size of [0, 1, 65_536, 65_537, PART_BYTES, 3_000_000]) {
    const bytes = new Uint8Array(size).map((_, at) => at * 7);
    const expected = createHash("sha256").update(bytes).digest("hex");
    const copy = (part: Uint8Array) => part.slice();
    for (const body of [bodyOf([copy(bytes)]), bodyOf(bodyPartsOf(bytes).map(copy))]) {
      expect(body instanceof LargeBody).toBe(size > 65_536);
      expect(await hashOf(body, "t")).toBe(expected);
      expect(Buffer.compare(Buffer.concat(bodyPartsOf(body)), bytes)).toBe(0);
      freeBody(body);
      if (body instanceof LargeBody) expect(await hashOf(body, "t")).toBe(expected);
    }
  }
});
