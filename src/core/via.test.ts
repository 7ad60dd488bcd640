import { expect, test } from "bun:test";
import fc from "fast-check";
import { pseudonymOf, viaHeader, viaProblem } from "./via.ts";

const OWN = pseudonymOf(new Uint8Array(32).fill(7));
const problemOf = (via: string) => viaProblem(new Headers({ via }), OWN);

test("the pseudonym in Via has the form of a name, and is the same for the same key", () => {
  expect(OWN).toMatch(/^tollgate-[0-9a-f]{16}$/);
  expect(pseudonymOf(new Uint8Array(32).fill(7))).toBe(OWN);
  expect(pseudonymOf(new Uint8Array(32).fill(8))).not.toBe(OWN);
});

test("a request is refused when it comes the fourth time, whatever else Via holds", () => {
  const other = fc.constantFrom(
    "1.1 proxy",
    "HTTP/2 edge:8443 (cache, warm)",
    "1.0 tollgate-0000000000000000",
    OWN + OWN,
  );
  const own = fc.constantFrom(`1.1 ${OWN}`, `1.1  ${OWN.toUpperCase()}`, `HTTP/1.1 ${OWN} (again)`);
  fc.assert(
    fc.property(fc.array(fc.oneof(own, other), { maxLength: 9 }), fc.constantFrom(",", ", ", " ,\t"), (list, comma) => {
      const times = list.filter((element) => element !== OWN + OWN && element.toLowerCase().includes(OWN)).length;
      expect(problemOf(list.join(comma)) !== null).toBe(times >= 4);
    }),
  );
});

test("each hop adds itself to Via behind what came, until it is refused", () => {
  let headers = new Headers({ via: " 1.0 first " });
  const seen: (string | null)[] = [];
  for (; viaProblem(headers, OWN) === null; headers = new Headers([viaHeader(headers, OWN)])) {
    seen.push(headers.get("via"));
  }
  expect(seen).toEqual(["", ...Array(3).keys()].map((_, hops) => `1.0 first${`, 1.1 ${OWN}`.repeat(hops)}`));
  expect(viaHeader(new Headers(), OWN)).toEqual(["via", `1.1 ${OWN}`]);
});

test("a Via that is longer than any honest one is refused", () => {
  expect(problemOf("1.1 a,".repeat(600))).toBeNull();
  expect(problemOf("1.1 a,".repeat(700))).toContain("Via");
});
