import { expect, test } from "bun:test";
import { ALICE, BOB, TEST_CA } from "../../test/support/certificates.ts";
import { createSessions } from "./sessions.ts";

test("one pool for each name, client certificate and set of roots", () => {
  const sessions = createSessions(null);
  const identities = [null, { ...ALICE, ca: null }, { ...BOB, ca: null }, { ...ALICE, ca: TEST_CA }];
  const names = [null, "a.test", "b.test"];
  const all = () => names.flatMap((name) => identities.map((identity) => sessions(name, identity)));
  expect(new Set(all()).size).toBe(12);
  expect(new Set([...all(), ...all()]).size).toBe(12);
});

test("pools are bounded, and the ones in use stay", () => {
  const sessions = createSessions(null);
  const used = sessions("used.test", null);
  const unused = sessions("unused.test", null);
  for (let i = 0; i < 200; i++) {
    sessions(`${i}.test`, null);
    expect(sessions("used.test", null)).toBe(used);
  }
  expect(sessions("unused.test", null)).not.toBe(unused);
});
