import { expect, test } from "bun:test";
import fc from "fast-check";
import { newKey, open, resealDataKey, seal, unwrap, wrap } from "./envelope.ts";

const bytes = fc.uint8Array({ maxLength: 300 });

test("a value that is sealed opens with the same key and identity", () => {
  fc.assert(
    fc.property(bytes, fc.string(), (secret, identity) => {
      const key = newKey();
      expect(open(key, seal(key, secret, identity), identity)).toEqual(Buffer.from(secret));
      expect(unwrap(key, wrap(key, secret, identity), identity)).toEqual(Buffer.from(secret));
    }),
  );
});

test("any changed byte, cut end or added byte of a sealed value is noticed", () => {
  const key = newKey();
  const sealed = seal(key, Buffer.from("secret"), "cred");
  for (let at = 0; at < sealed.length; at++) {
    const changed = Buffer.from(sealed);
    changed[at] = (changed[at] ?? 0) ^ 1;
    expect(() => open(key, changed, "cred")).toThrow();
    expect(() => open(key, sealed.subarray(0, at), "cred")).toThrow();
  }
  expect(() => open(key, Buffer.concat([sealed, Buffer.of(0)]), "cred")).toThrow();
});

test("another key or identity opens no sealed value, nor do parts of two of them", () => {
  const key = newKey();
  const [a, b] = [seal(key, Buffer.from("a"), "cred a"), seal(key, Buffer.from("b"), "cred a")];
  expect(() => open(newKey(), a, "cred a")).toThrow();
  expect(() => open(key, a, "cred b")).toThrow();
  expect(() => open(key, Buffer.concat([a.subarray(0, 61), b.subarray(61)]), "cred a")).toThrow();
});

test("a secret that is sealed anew opens with the new key alone, for the same identity, and its own bytes stay", () => {
  fc.assert(
    fc.property(bytes, fc.string(), (secret, identity) => {
      const [old, next] = [newKey(), newKey()];
      const before = seal(old, secret, identity);
      const after = resealDataKey(old, next, before, identity);
      expect(open(next, after, identity)).toEqual(Buffer.from(secret));
      expect(() => open(old, after, identity)).toThrow();
      expect(() => open(next, after, `${identity}.`)).toThrow();
      expect(after.subarray(61)).toEqual(before.subarray(61));
      expect(() => resealDataKey(next, old, before, identity)).toThrow();
    }),
  );
});

test("the same secret is never sealed to the same bytes, and shows nowhere in them", () => {
  const key = newKey();
  const secret = Buffer.from("a secret that is long enough to be found");
  const seen = new Set(Array.from({ length: 100 }, () => seal(key, secret, "x").toString("hex")));
  expect(seen.size).toBe(100);
  for (const sealed of seen) expect(sealed).not.toContain(secret.toString("hex"));
});
