import { expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { atOnce } from "../kernel/turns.ts";
import { bodyOf, bodyPartsOf, freeBody, LargeBody, PART_BYTES, sha256Of, wholeOf } from "./body.ts";

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

test("a hash made in steps is that of the whole, and of a large body made once", () => {
  for (const size of [0, 1, 262_143, 262_144, 262_145, 3_000_000]) {
    const bytes = new Uint8Array(size).map((_, at) => at * 7);
    const steps = sha256Of(bytes);
    let made = 0;
    let step = steps.next();
    for (; !step.done; step = steps.next()) made++;
    expect(step.value).toBe(createHash("sha256").update(bytes).digest("hex"));
    expect(made).toBe(Math.max(Math.ceil(size / 262_144) - 1, 0));
    const body = bodyOf(bodyPartsOf(bytes));
    expect(atOnce(sha256Of(body))).toBe(step.value);
    if (body instanceof LargeBody) expect(sha256Of(body).next().done).toBe(true);
  }
});
