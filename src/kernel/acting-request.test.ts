import { expect, test } from "bun:test";
import { until } from "../../test/support/until.ts";
import { createBatcher } from "./batch.ts";
import { createLimiter } from "./share.ts";
import { ActingRequest, actFor, actingRequest, actingTenant, createEndWaiters, outlastRequest } from "./wait.ts";

test("a request may wait for so long in all: waits at the same time count once, short ones not at all", () => {
  const request = new ActingRequest("a", 9_000);
  expect(request.beginWait(0)).toBe(9_000);
  expect(request.beginWait(1_000)).toBe(9_000);
  request.endWait(3_000);
  request.endWait(4_000);
  expect(request.beginWait(50_000)).toBe(55_000);
  request.endWait(50_050);
  expect(request.beginWait(60_000)).toBe(65_000);
  request.endWait(64_950);
  expect(request.isOverdue()).toBe(false);
  // The last of its time, however little.
  expect(request.beginWait(70_000)).toBe(70_050);
  request.endWait(70_050);
  expect(request.isOverdue()).toBe(true);
  expect(request.beginWait(80_000)).toBe(80_000);
  request.liftBound();
  request.endWait(90_000);
  expect(request.beginWait(90_000)).toBe(Number.POSITIVE_INFINITY);
  expect(request.isOverdue()).toBe(false);
});

test("a request counts its wait in line for a slot", async () => {
  const limit = createLimiter({ size: 1, tooMany: "too many" });
  const { promise: gone, resolve: leave } = Promise.withResolvers<void>();
  const first = limit("b", () => gone);
  const request = new ActingRequest("a", 200);
  const second = actFor(request, () => limit("a", async () => request.isOverdue()));
  await until(() => request.isOverdue());
  leave();
  await first;
  expect(await second).toBe(true);
});

test("a request neither bounds the work that outlasts it, nor what others ask with it, nor a look for all", async () => {
  const request = new ActingRequest("a");
  const seen = () => [actingRequest(), actingTenant()];
  const batcher = createBatcher(async () => {
    const within = seen();
    return () => within;
  });
  const looked = Promise.withResolvers<unknown>();
  const waiters = createEndWaiters<string>({
    nameOf: (key) => key,
    lookAgainMs: 1,
    async endedAmong(keys) {
      looked.resolve(seen());
      return keys;
    },
  });
  await actFor(request, async () => {
    expect(seen()).toEqual([request, "a"]);
    expect(outlastRequest(seen)).toEqual([null, "a"]);
    expect(await batcher.join("key", null)).toEqual([null, "a"]);
    expect(actFor(null, () => outlastRequest(seen))).toEqual([null, null]);
    let looks = 0;
    await waiters.wait({ key: "k", ms: 60_000, look: async () => looks++, isEnded: (found) => found > 0 });
    expect(await looked.promise).toEqual([null, null]);
  });
});
