import { expect, test } from "bun:test";
import { Fault } from "../core/fault.ts";
import { createLimiter } from "./share.ts";

test("a few run at once, another tenant goes before those that wait of one that has its share, and each gives its place back", async () => {
  const few = createLimiter({ size: 2, tooMany: "too many" });
  const order: string[] = [];
  let [running, most] = [0, 0];
  const work = (tenant: string, name: string) =>
    few(tenant, async () => {
      order.push(name);
      most = Math.max(most, ++running);
      await new Promise((resolve) => setImmediate(resolve));
      running--;
      if (name === "a2") throw new Error("failed");
    }).catch(({ message }) => message);
  const all = await Promise.all([work("a", "a1"), work("a", "a2"), work("a", "a3"), work("b", "b1")]);
  expect(all).toEqual([undefined, "failed", undefined, undefined]);
  expect([order, most]).toEqual([["a1", "b1", "a2", "a3"], 2]);
});

test("as many wait as may, and one more is refused", async () => {
  const few = createLimiter({ size: 1, waitingMax: 8, tooMany: "too many" });
  const { promise, resolve } = Promise.withResolvers<void>();
  const works = Array.from({ length: 10 }, () => few("a", () => promise));
  for (const refused of works.slice(8)) {
    const fault = await refused.catch((error) => error);
    expect(fault).toBeInstanceOf(Fault);
    expect([fault.kind, fault.message, fault.retryAfterSeconds]).toEqual(["unavailable", "too many", 1]);
  }
  // Another tenant still may.
  const other = few("b", () => promise);
  resolve();
  await Promise.all([...works.slice(0, 8), other]);
});
