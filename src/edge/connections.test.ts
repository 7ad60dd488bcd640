import { expect, test } from "bun:test";
import { ALICE, BOB, TEST_CA } from "../../test/support/certificates.ts";
import { createConnections } from "./connections.ts";

test("one pool for each name, client certificate and set of roots", () => {
  const connections = createConnections(null);
  const identities = [null, { ...ALICE, ca: null }, { ...BOB, ca: null }, { ...ALICE, ca: TEST_CA }];
  const names = [null, "a.test", "b.test"];
  const all = () => names.flatMap((name) => identities.map((identity) => connections(name, identity)));
  expect(new Set(all()).size).toBe(12);
  expect(new Set([...all(), ...all()]).size).toBe(12);
});

test("pools are bounded, and the ones in use stay", () => {
  const connections = createConnections(null);
  const used = connections("used.test", null);
  const unused = connections("unused.test", null);
  for (let i = 0; i < 200; i++) {
    connections(`${i}.test`, null);
    expect(connections("used.test", null)).toBe(used);
  }
  expect(connections("unused.test", null)).not.toBe(unused);
});
