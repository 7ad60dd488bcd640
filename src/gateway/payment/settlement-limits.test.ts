import { describe, expect, test } from "bun:test";
import { createSettlementLimits, type SettlementPermit } from "./settlement-limits.ts";

const fill = (take: () => SettlementPermit | null) => {
  const places: SettlementPermit[] = [];
  for (let place = take(); place !== null; place = take()) places.push(place);
  return places;
};

describe("the limits of settlements", () => {
  test("put off a tenant with too many under way, and nobody else, until some have ended", () => {
    const room = createSettlementLimits();
    const places = fill(() => (room.isCrowded("t") ? null : room.enter("t")));
    expect(places.length).toBe(3584);
    expect(room.isCrowded("u")).toBe(false);
    places[0]?.release();
    expect(room.isCrowded("t")).toBe(false);
  });

  test("are shares by tenant in the background, bounded for a facilitator and in all, and come back", () => {
    const room = createSettlementLimits();
    let serial = 0;
    const own = fill(() => (serial < 200 ? room.take("a", `own-${++serial}`) : null));
    expect([own.length, room.ofTenant("a")]).toEqual([112, 0]);
    for (const place of own) place.release();
    const stuck = fill(() => room.take("b", "shared"));
    expect(stuck.length).toBe(28);
    const others = ["c", "d", "e"].map((tenant) => fill(() => room.take(tenant, "shared")).length);
    expect(Math.min(...others)).toBeGreaterThan(0);
    for (const place of stuck) place.release();
    expect(fill(() => room.take("c", "shared")).length).toBeGreaterThan(10);
    expect(room.take("b", "another")).not.toBeNull();
  });

  test("are few at a facilitator that lets attempts run out of time, until one ends in time", () => {
    const room = createSettlementLimits();
    room.learn("one", false);
    const few = fill(() => room.take("a", "one"));
    expect([few.length, fill(() => room.take("a", "two")).length]).toEqual([2, 28]);
    room.learn("one", true);
    expect(fill(() => room.take("b", "one")).length).toBeGreaterThan(20);
  });
});
