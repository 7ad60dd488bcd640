import { expect, test } from "bun:test";
import { createWatch } from "./keyring.ts";

/** A look that ends when it is told to. */
function heldLook(now?: () => number) {
  const looks: PromiseWithResolvers<void>[] = [];
  const failures: unknown[] = [];
  const begun = () => {
    const look = Promise.withResolvers<void>();
    looks.push(look);
    return look.promise;
  };
  return { looks, failures, watch: createWatch(begun, (error) => failures.push(error), now) };
}

test("a look that was asked for begins after the question, whatever is under way, and is shared", async () => {
  const { looks, watch } = heldLook();
  const first = watch.renewed();
  await Bun.sleep(0);
  expect(looks.length).toBe(1);
  const others = [watch.renewed(), watch.renewed()];
  looks[0]?.resolve();
  await first;
  while (looks.length < 2) await Bun.sleep(5);
  looks[1]?.resolve();
  await Promise.all(others);
  expect(looks.length).toBe(2);
});

test("nobody waits long for a look that hangs", async () => {
  const { watch } = heldLook();
  const startedAt = performance.now();
  await watch.renewed();
  expect(performance.now() - startedAt).toBeGreaterThan(400);
});

test("a look that fails is told of, and keeps nobody", async () => {
  const { looks, failures, watch } = heldLook();
  const asked = watch.renewed();
  while (looks.length === 0) await Bun.sleep(5);
  looks[0]?.reject(new Error("the database is away"));
  await asked;
  expect(failures).toEqual([new Error("the database is away")]);
});

test("what was seen is fresh for two seconds and no longer: then a look is waited for", async () => {
  let time = 0;
  const { looks, watch } = heldLook(() => time);
  watch.start();
  time = 1_999;
  await watch.refreshed();
  expect(watch.isFresh()).toBe(true);
  time = 2_000;
  expect(watch.isFresh()).toBe(false);
  let isOver = false;
  const waiting = watch.refreshed().then(() => {
    isOver = true;
  });
  await Bun.sleep(0);
  expect(isOver).toBe(false);
  looks[0]?.resolve();
  await waiting;
  expect(watch.isFresh()).toBe(true);
  await watch.stop();
});

test("what was seen is gone by for ten seconds and no longer, and again after the next look", async () => {
  let time = 0;
  const { looks, watch } = heldLook(() => time);
  watch.start();
  const states = [watch.isUsable()];
  time = 9_999;
  states.push(watch.isFresh(), watch.isUsable());
  time = 10_000;
  states.push(watch.isUsable());
  // Whoever comes now waits for a look that goes on.
  const waiting = watch.refreshed();
  looks[0]?.resolve();
  await waiting;
  states.push(watch.isUsable(), watch.isFresh());
  await watch.stop();
  expect(states).toEqual([true, false, true, false, true, true]);
});

test("a process that does not watch waits for nothing", async () => {
  const { looks, watch } = heldLook();
  await watch.refreshed();
  expect([watch.isFresh(), looks.length]).toEqual([true, 0]);
});

test("however many want a look, there is one in a tenth of a second at most", async () => {
  let looks = 0;
  const watch = createWatch(
    async () => {
      looks += 1;
    },
    () => {},
  );
  const startedAt = performance.now();
  for (let n = 0; n < 4; n++) await Promise.all(Array.from({ length: 100 }, () => watch.renewed()));
  // A timer of 100 ms may fire a fraction of a millisecond early.
  expect(looks).toBeLessThanOrEqual((performance.now() - startedAt) / 98 + 1);
});
