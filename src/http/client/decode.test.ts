import { expect, test } from "bun:test";
import { createDecoderShare } from "./body.ts";

const never = new AbortController().signal;

test("a holder of more decoder memory than its part is evicted when others wait, and nobody gives back twice", async () => {
  const share = createDecoderShare(240);
  const held = new Map<string, number>();
  async function hold(tenant: string): Promise<void> {
    const count = (more: number) => held.set(tenant, (held.get(tenant) ?? 0) + more);
    const giveBack = await share.take({ tenant, agent: "agt_1" }, 10, never, () => {
      count(-10);
      giveBack();
      giveBack();
    });
    count(10);
  }
  for (let at = 0; at < 30; at++) for (const tenant of ["a", "b"]) void hold(tenant);
  const began = performance.now();
  await Promise.all([hold("c"), hold("c"), hold("c"), hold("c")]);
  expect(performance.now() - began).toBeLessThan(5_000);
  expect(held.get("c")).toBe(40);
  for (const tenant of ["a", "b"]) expect(held.get(tenant)).toBeGreaterThanOrEqual(70);
  expect([...held.values()].reduce((sum, one) => sum + one)).toBeLessThanOrEqual(240);
});
