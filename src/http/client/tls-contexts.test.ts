import { expect, test } from "bun:test";
import { ALICE, BOB, TEST_CA } from "../../../test/support/http/certificates.ts";
import { createTlsContexts } from "./connections.ts";

const alice = { ...ALICE, ca: null };
/** A certificate with other roots each time, as somebody would write it who wants many contexts. */
const another = (at: number) => ({ ...ALICE, ca: `${TEST_CA}${"\n".repeat(at + 1)}` });

test("each tenant, client certificate and set of roots has one TLS context", () => {
  const contextOf = createTlsContexts(null);
  const identities = [alice, { ...BOB, ca: null }, { ...ALICE, ca: TEST_CA }];
  const all = () => ["a", "b"].flatMap((tenant) => identities.map((identity) => contextOf(tenant, identity)));
  expect(new Set(all()).size).toBe(6);
  expect(new Set([...all(), ...all()]).size).toBe(6);
});

test("requests without certificate and roots share the usual TLS context, whichever tenant sends them", () => {
  for (const extraCa of [null, TEST_CA]) {
    const contextOf = createTlsContexts(extraCa);
    expect(contextOf("a", null)).toBe(contextOf("b", null));
    expect(contextOf("a", null).secureContext === undefined).toBe(extraCa === null);
  }
});

test("TLS contexts are bounded, and one tenant's many cost another none of its own", () => {
  const contextOf = createTlsContexts(null);
  const ofNeighbour = contextOf("neighbour", alice);
  const first = contextOf("hostile", another(0));
  for (let at = 1; at < 200; at++) contextOf("hostile", another(at));
  expect(contextOf("neighbour", alice)).toBe(ofNeighbour);
  expect(contextOf("hostile", another(0))).not.toBe(first);
});
