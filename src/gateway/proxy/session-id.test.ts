import { expect, test } from "bun:test";
import fc from "fast-check";
import { createSessionIds, type SessionOwner } from "./stream-routes.ts";

const OWNER: SessionOwner = { tenant: "acme", agentId: "agt_1", user: "alice" };
const keyOf = async (tenant: string) => new TextEncoder().encode(`key of ${tenant}`);
const idsOf = createSessionIds(keyOf);
const visible = fc
  .array(fc.integer({ min: 0x21, max: 0x7e }), { minLength: 1, maxLength: 200 })
  .map((codes) => String.fromCharCode(...codes));

test("a session ID leads its owner to the upstream's, whatever visible ASCII that is, and has a bounded length", async () => {
  const ids = await idsOf(OWNER);
  fc.assert(
    fc.property(visible, (id) => {
      const sealed = ids.toCaller(id) ?? "";
      expect(sealed).toMatch(/^[\x21-\x7e]+$/);
      expect(sealed.length).toBe(id.length + 44);
      expect(ids.toUpstream(sealed)).toBe(id);
    }),
  );
  expect(ids.toUpstream(ids.toCaller("x".repeat(1024)) ?? "")).toBe("x".repeat(1024));
});

test("a session ID leads nobody else to it, nor with another agent, tenant or key", async () => {
  const ids = await idsOf(OWNER);
  const others = await Promise.all([
    idsOf({ ...OWNER, user: "bob" }),
    idsOf({ ...OWNER, agentId: "agt_2" }),
    idsOf({ ...OWNER, tenant: "other" }),
    createSessionIds(async () => new Uint8Array(32))(OWNER),
    // Names that only together spell the same.
    idsOf({ ...OWNER, agentId: "agt_1alice", user: "" }),
  ]);
  fc.assert(
    fc.property(visible, (id) => {
      for (const other of others) expect(other.toUpstream(ids.toCaller(id) ?? "")).toBeNull();
    }),
  );
});

test("a session ID that was changed anywhere, cut, or never sealed is none", async () => {
  const ids = await idsOf(OWNER);
  const sealed = ids.toCaller("session-1") ?? "";
  for (let at = 0; at < sealed.length; at++) {
    for (const character of ["A", "a", ".", "~", "é"]) {
      if (sealed[at] === character) continue;
      expect(ids.toUpstream(`${sealed.slice(0, at)}${character}${sealed.slice(at + 1)}`)).toBeNull();
    }
    expect(ids.toUpstream(sealed.slice(0, at))).toBeNull();
    expect(ids.toUpstream(sealed.slice(at + 1))).toBeNull();
  }
  for (const forged of ["", "session-1", `${sealed} `, `${sealed}=`, `${sealed}, ${sealed}`, "é".repeat(60)]) {
    expect(ids.toUpstream(forged)).toBeNull();
  }
  fc.assert(fc.property(fc.string({ maxLength: 80 }), (text) => expect(ids.toUpstream(text)).toBeNull()));
});

test("an upstream's session ID that the protocol does not know is not passed on", async () => {
  const ids = await idsOf(OWNER);
  for (const id of ["", "a b", "a, b", "é", "a\u007f", "x".repeat(1025)]) expect(ids.toCaller(id)).toBeNull();
});

test("the key of a tenant's session IDs is asked for once", async () => {
  let asked = 0;
  const counted = createSessionIds(async (tenant) => {
    asked++;
    return keyOf(tenant);
  });
  for (const user of ["alice", "bob", "carol"]) await counted({ ...OWNER, user });
  expect(asked).toBe(1);
});
