import { describe, expect, test } from "bun:test";
import { createRoom, type Place } from "./room.ts";

const fill = (take: () => Place | null) => {
  const places: Place[] = [];
  for (let place = take(); place !== null; place = take()) places.push(place);
  return places;
};

describe("the places of settlements", () => {
  test("hold a tenant's own back when too many are under way, and come back", () => {
    const room = createRoom();
    const places = Array.from({ length: 2048 }, () => room.enter("t", "one"));
    expect([room.isCrowded("t", "one"), room.isCrowded("u", "one")]).toEqual([true, false]);
    places[0]?.release();
    expect(room.isCrowded("t", "one")).toBe(false);
  });

  test("hold all back from a facilitator at which too many are under way, and from no other", () => {
    const room = createRoom();
    for (let i = 0; i < 4096; i++) room.enter(`t${i % 4}`, "one");
    expect([room.isCrowded("u", "one"), room.isCrowded("u", "two")]).toEqual([true, false]);
  });

  test("are bounded for a tenant, for a facilitator and in all, and come back", () => {
    const room = createRoom();
    const own = fill(() => room.take("a", "one"));
    expect([own.length, room.ofTenant("a")]).toEqual([16, 0]);
    const shared = fill(() => room.take("b", "one"));
    expect([shared.length, room.take("c", "one")]).toEqual([16, null]);
    let serial = 0;
    const rest = fill(() => room.take(`t${++serial}`, `f${serial}`));
    expect([rest.length, room.full()]).toEqual([96, true]);
    for (const place of [...own, ...shared, ...rest]) place.release();
    expect([room.full(), fill(() => room.take("a", "one")).length]).toEqual([false, 16]);
  });

  test("are few at a facilitator that lets attempts run out of time, until one ends in time", () => {
    const room = createRoom();
    room.learn("one", false);
    const few = fill(() => room.take("a", "one"));
    expect([few.length, fill(() => room.take("a", "two")).length]).toEqual([2, 14]);
    room.learn("one", true);
    expect(fill(() => room.take("b", "one")).length).toBe(16);
  });
});
