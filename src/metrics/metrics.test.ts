// The parts behind the metrics: which route a path is counted for, what is kept and for how long, and who waits for what.
import { describe, expect, spyOn, test } from "bun:test";
import fc from "fast-check";
import { Registry } from "prom-client";
import type { GaugeSources } from "../core/meters.ts";
import { pathPattern } from "../http/elysia.ts";
import { createLoopLag, createMeters, createRouteTemplates, OTHER_ROUTE, staleCache, statusLabel } from "./metrics.ts";

describe("the template of a path", () => {
  const ROUTES = ["/", "/a", "/a/b", "/a/:id", "/a/:id/c", "/a/:id/c/:other", "/b/*", "/c/:id/*"];
  const templates = createRouteTemplates(ROUTES.map((path) => ({ path })));

  test("is that of the route which the router would take", () => {
    const segment = fc.constantFrom("", "a", "b", "c", "x", "%2f", "é");
    fc.assert(
      fc.property(fc.array(segment, { maxLength: 5 }), (segments) => {
        const path = `/${segments.join("/")}`;
        const fitting = ROUTES.filter((route) => pathPattern(route).test(path));
        const found = templates.of(path);
        if (fitting.length === 0) expect(found).toBe(OTHER_ROUTE);
        else expect(fitting.map((route) => route.replaceAll(/:(\w+)/g, "{$1}"))).toContain(found);
        // A route without parameters goes first, as at the router.
        if (ROUTES.includes(path)) expect(found).toBe(path);
        expect(templates.all).toContain(found);
      }),
    );
  });

  test("names parameters as the document of the interface does", () => {
    expect(templates.of("/a/1/c/2")).toBe("/a/{id}/c/{other}");
    expect(templates.all).toHaveLength(ROUTES.length + 1);
  });
});

test("a status has a label of its own only where it has a meaning", () => {
  expect([200, 202, 404, 429, 503].map(statusLabel)).toEqual(["200", "202", "404", "429", "503"]);
  expect([299, 418, 599].map(statusLabel)).toEqual(["2xx", "4xx", "5xx"]);
  const labels = new Set(Array.from({ length: 500 }, (_, at) => statusLabel(at + 100)));
  expect(labels.size).toBeLessThan(75);
});

test("a gateway that has only begun to start does not say that nothing waits, and a facilitator does", async () => {
  const told = async (endpoints: number | null, gauges: GaugeSources) => {
    const registry = new Registry();
    createMeters(registry, endpoints).gauges(gauges);
    return /^tollgate_queue_depth .*$/m.exec(await registry.metrics())?.[0];
  };
  expect(await told(null, {})).toBeUndefined();
  expect(await told(null, { queue: async () => ({ calls: 3, oldestMs: 1 }) })).toBe("tollgate_queue_depth 3");
  expect(await told(2, {})).toBe("tollgate_queue_depth 0");
});

describe("a value that is kept for a while", () => {
  test("is found out once for all who ask, and not anew right after", async () => {
    let times = 0;
    const { promise, resolve } = Promise.withResolvers<number>();
    const known = staleCache(() => {
      times++;
      return promise;
    });
    const asked = Promise.all([known(), known()]);
    resolve(7);
    expect([...(await asked), await known(), times]).toEqual([7, 7, 7, 1]);
  });

  test("is not known when it fails or hangs, and found out by the next who asks", async () => {
    const tries = [Promise.reject(new Error("away")), Promise.withResolvers<number>().promise];
    const known = staleCache(async () => tries.shift() ?? 7);
    expect(await known()).toBeNull();
    expect(await known()).toBeNull();
    // The second one hangs on, and is asked no second time meanwhile.
    expect(await known()).toBeNull();
    expect(tries).toEqual([]);
  });
});

test("a value that is slow to find out is kept longer, and while it is found out again the last one holds", async () => {
  const tries = [() => Bun.sleep(60).then(() => 7), () => Promise.withResolvers<number>().promise];
  const known = staleCache(() => tries.shift()?.() ?? Promise.resolve(8));
  const monotonic = spyOn(performance, "now");
  try {
    let now = 0;
    monotonic.mockImplementation(() => now);
    const first = known();
    now = 2_000;
    expect(await first).toBe(7);
    // It took two seconds, so it is kept for forty.
    now = 41_000;
    expect([await known(), tries.length]).toEqual([7, 1]);
    now = 43_000;
    expect([await known(), tries.length]).toEqual([7, 0]);
    now = 49_000;
    expect(await known()).toBeNull();
  } finally {
    monotonic.mockRestore();
  }
});

test("the longest pause is told for half a minute at least, and for a minute at most", () => {
  let now = 0;
  const lag = createLoopLag(() => now);
  lag.late(70);
  now = 29_000;
  lag.late(5);
  expect(lag.longest()).toBe(70);
  now = 31_000;
  expect(lag.longest()).toBe(70);
  lag.late(3);
  now = 61_000;
  expect(lag.longest()).toBe(3);
  now = 300_000;
  expect(lag.longest()).toBe(0);
});
