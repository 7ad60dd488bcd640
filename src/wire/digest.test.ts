import { expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { atOnce } from "../concurrency/steps.ts";
import { sha256Of } from "./digest.ts";

test("a hash made in steps is that of the whole, and of the same bytes made once", () => {
  for (const size of [0, 1, 262_143, 262_144, 262_145, 3_000_000]) {
    const bytes = new Uint8Array(size).map((_, at) => at * 7);
    const steps = sha256Of(bytes);
    let made = 0;
    let step = steps.next();
    for (; !step.done; step = steps.next()) made++;
    expect(step.value).toBe(createHash("sha256").update(bytes).digest("hex"));
    expect(made).toBe(Math.max(Math.ceil(size / 262_144) - 1, 0));
    expect(sha256Of(bytes).next().done).toBe(true);
    expect(atOnce(sha256Of(bytes))).toBe(step.value);
  }
});
