import { expect, test } from "bun:test";
import fc from "fast-check";
import { createCallPlaces } from "./call-places.ts";

const call = (tenant: string, id: string, body_bytes = 0) => ({ tenant, id, body_bytes });

test("of places an agent has its own limit, and what its calls give back is free for the next", () => {
  const places = createCallPlaces({ places: 64, agentPlaces: 2, bodyBytes: 1000 });
  for (const id of ["1", "2"]) expect(places.take("a", call("t", id))).toBeNull();
  expect(places.take("a", call("t", "3"))).toBe("own");
  expect(places.take("b", call("t", "4"))).toBeNull();
  expect([places.heldBy("t"), places.heldBy("t", "a")]).toEqual([3, 2]);
  places.giveBack("a", call("t", "1"));
  expect(places.take("a", call("t", "3"))).toBeNull();
});

test("a call whose body finds no memory takes no place either", () => {
  const places = createCallPlaces({ places: 64, agentPlaces: 8, bodyBytes: 900 });
  expect(places.take("a", call("t", "1", 700))).toBeNull();
  expect(places.take("b", call("t", "2", 700))).toBe("tenant");
  expect([places.heldBy("t"), places.heldBy("t", "b")]).toEqual([1, 0]);
});

test("of a tenant that holds no memory one large body runs beside the limit, and is given back beside it", () => {
  const places = createCallPlaces({ places: 64, agentPlaces: 8, bodyBytes: 900 });
  expect(places.take("a", call("stuck", "1", 780))).toBeNull();
  const [first, second] = [call("good", "2", 300), call("good", "3", 300)];
  expect(places.take("b", first)).toBeNull();
  expect(places.take("b", second)).not.toBeNull();
  places.giveBack("b", first);
  expect(places.take("b", second)).toBeNull();
  places.giveBack("b", second);
  places.giveBack("a", call("stuck", "1", 780));
  // Whole again: an amount above anybody's share can be had only while nobody holds anything.
  expect(places.take("a", call("stuck", "4", 900))).toBeNull();
});

test("whatever is taken and given back, in the end all of it is there again", () => {
  const someCall = fc.record({
    tenant: fc.constantFrom("a", "b", "c"),
    agent: fc.constantFrom("1", "2"),
    body_bytes: fc.nat(900),
    gives: fc.boolean(),
  });
  fc.assert(
    fc.property(fc.array(someCall, { maxLength: 60 }), (steps) => {
      const places = createCallPlaces({ places: 16, agentPlaces: 3, bodyBytes: 900 });
      const held: { agent: string; item: ReturnType<typeof call> }[] = [];
      for (const [at, { tenant, agent, body_bytes, gives }] of steps.entries()) {
        const given = gives ? held.shift() : undefined;
        if (given !== undefined) places.giveBack(given.agent, given.item);
        const item = call(tenant, String(at), body_bytes);
        if (places.take(`${tenant}${agent}`, item) === null) held.push({ agent: `${tenant}${agent}`, item });
        expect(held.length).toBeLessThanOrEqual(16);
      }
      for (const { agent, item } of held) places.giveBack(agent, item);
      for (const tenant of ["a", "b", "c"]) expect(places.heldBy(tenant)).toBe(0);
      for (const id of ["x", "y", "z"]) {
        const whole = call("a", id, 900);
        expect(places.take("a1", whole)).toBeNull();
        places.giveBack("a1", whole);
      }
    }),
  );
});
