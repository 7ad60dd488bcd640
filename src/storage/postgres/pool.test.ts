import { expect, test } from "bun:test";
import { createPermits } from "./pool.ts";

const SOON = 60_000;

/** Permits, and in which order those who ask for one get it. */
function permitsOf(max: number) {
  const permits = createPermits(max);
  const order: string[] = [];
  const ask = (tenant?: string) =>
    void permits.take(performance.now() + SOON, tenant).then(
      () => order.push(tenant ?? "own"),
      () => {},
    );
  const settled = async () => {
    for (let step = 0; step < 20; step++) await null;
    return order.splice(0);
  };
  return { permits, ask, settled };
}

test("a tenant that many wait for holds nearly all connections, and the next tenant gets one at once", async () => {
  const { ask, settled } = permitsOf(7);
  for (let n = 0; n < 1_000; n++) ask("busy");
  expect(await settled()).toEqual(Array(6).fill("busy"));
  ask("quiet");
  expect(await settled()).toEqual(["quiet"]);
});

test("connections that become free go to tenants by turns, and to the process's own work first", async () => {
  const { permits, ask, settled } = permitsOf(1);
  ask("busy");
  for (let n = 0; n < 3; n++) ask("busy");
  ask("quiet");
  ask();
  ask();
  expect(await settled()).toEqual(["busy"]);
  const order: string[] = [];
  for (let last: string | undefined = "busy"; last !== undefined; last = order.at(-1)) {
    permits.give(last === "own" ? undefined : last);
    const next = await settled();
    if (next.length === 0) break;
    order.push(...next);
  }
  expect(order).toEqual(["own", "own", "busy", "quiet", "busy", "busy"]);
});

test("who waits too long is refused, and keeps nobody behind it waiting", async () => {
  const { permits, ask, settled } = permitsOf(1);
  ask("holder");
  const late = permits.take(performance.now() + 5, "late");
  ask("patient");
  await expect(late).rejects.toMatchObject({ kind: "unavailable" });
  permits.give("holder");
  expect(await settled()).toEqual(["holder", "patient"]);
});
