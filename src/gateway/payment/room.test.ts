import { describe, expect, test } from "bun:test";
import { createRoom, type Place } from "./room.ts";

const fill = (take: () => Place | null) => {
  const places: Place[] = [];
  for (let place = take(); place !== null; place = take()) places.push(place);
  return places;
};

describe("the places of settlements", () => {
  test("hold a tenant's own back when too many are under way, and nobody else's, and come back", () => {
    const room = createRoom();
    const places = fill(() => (room.isCrowded("t") ? null : room.enter("t")));
    expect(places.length).toBe(3584);
    expect(room.isCrowded("u")).toBe(false);
    places[0]?.release();
    expect(room.isCrowded("t")).toBe(false);
  });

  test("are shared out by tenant in the background, bounded for a facilitator and in all, and come back", () => {
    const room = createRoom();
    let serial = 0;
    const own = fill(() => (serial < 200 ? room.take("a", `own-${++serial}`) : null));
    expect([own.length, room.ofTenant("a")]).toEqual([112, 0]);
    const others = ["b", "c", "d"].map((tenant) => fill(() => room.take(tenant, "shared")).length);
    expect(others.every((count) => count > 0)).toBe(true);
    for (const place of own) place.release();
    const shared = fill(() => room.take("e", "shared"));
    expect(shared.length + others.reduce((sum, count) => sum + count)).toBe(32);
    expect(room.take("f", "shared")).toBeNull();
    expect(room.take("f", "another")).not.toBeNull();
  });

  test("are few at a facilitator that lets attempts run out of time, until one ends in time", () => {
    const room = createRoom();
    room.learn("one", false);
    const few = fill(() => room.take("a", "one"));
    expect([few.length, fill(() => room.take("a", "two")).length]).toEqual([2, 32]);
    room.learn("one", true);
    expect(fill(() => room.take("b", "one")).length).toBe(30);
  });
});
