import { expect, test } from "bun:test";
import { fairWrites } from "./fair-writes.ts";
import type { Tx } from "./store.ts";

const turn = () => new Promise((resolve) => setImmediate(resolve));

test("a tenant's many writes leave room for another tenant's, and go on one after the other", async () => {
  const begun: string[] = [];
  const held = Promise.withResolvers<void>();
  const write = fairWrites({ dialect: "postgres", write: (work) => work({} as Tx) });
  const start = (name: string) =>
    write(name, async () => {
      begun.push(name);
      await held.promise;
      return name;
    });
  const many = Array.from({ length: 50 }, () => start("many"));
  await turn();
  const alone = begun.length;
  expect(alone).toBeLessThan(4);
  const one = start("one");
  await turn();
  expect(begun.slice(alone)).toEqual(["one"]);
  held.resolve();
  expect(await one).toBe("one");
  expect(await Promise.all(many)).toHaveLength(50);
});

test("a write that fails gives its place back", async () => {
  const write = fairWrites({ dialect: "postgres", write: (work) => work({} as Tx) });
  const refusal = new Error("no");
  for (let i = 0; i < 10; i++) {
    const failing = write("acme", async () => {
      throw refusal;
    });
    await expect(failing).rejects.toBe(refusal);
  }
  expect(await write("acme", async () => "done")).toBe("done");
});
