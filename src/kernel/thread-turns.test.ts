import { expect, test } from "bun:test";
import { inThreadTurn, inTurn } from "./turns.ts";
import { actFor, actingTenant } from "./wait.ts";

test("two pieces of work are done at once, of two tenants, and nobody waits for more than one of each other tenant", async () => {
  const begun: string[] = [];
  const ends: (() => void)[] = [];
  const piece = (tenant: string) =>
    inThreadTurn(tenant, () => {
      begun.push(tenant);
      const { promise, resolve } = Promise.withResolvers<void>();
      ends.push(resolve);
      return promise;
    });
  const all = [piece("a"), piece("a"), piece("a"), piece("b"), piece("c")];
  expect(begun).toEqual(["a", "b"]);
  for (let count = 0; count < all.length; count++) {
    ends.shift()?.();
    await new Promise((resolve) => setImmediate(resolve));
  }
  await Promise.all(all);
  expect(begun).toEqual(["a", "b", "a", "c", "a"]);
});

test("a piece of work that fails takes no other one along", async () => {
  const failed = inThreadTurn("a", () => Promise.reject(new Error("corrupt")));
  const next = inThreadTurn("a", async () => "done");
  expect(await failed.catch((error: Error) => error.message)).toBe("corrupt");
  expect(await next).toBe("done");
});

test("work that waited for a slot acts for the request that it is of, and not for the one that left the slot", async () => {
  const seen: (string | null)[] = [];
  const acted = (tenant: string) =>
    actFor(tenant, () =>
      inThreadTurn("a", async () => {
        seen.push(actingTenant());
      }),
    );
  await Promise.all(["acme", "rival", "third"].map(acted));
  expect(seen).toEqual(["acme", "rival", "third"]);
});

test("a piece that waited for a turn acts for the request that it is of, and not for the one that began the turn", async () => {
  const acted = (tenant: string) => actFor(tenant, () => inTurn("a", async () => actingTenant()));
  expect(await Promise.all(["acme", "rival", "third"].map(acted))).toEqual(["acme", "rival", "third"]);
});
