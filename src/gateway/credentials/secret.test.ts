import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { credentialHeader } from "./resolve.ts";
import { maskedHint } from "./service.ts";

describe("the hint of a secret", () => {
  test("shows at most the last four characters, and only of more than eight", () => {
    fc.assert(
      fc.property(fc.array(fc.constantFrom("a", "é", "\u{1f99c}"), { minLength: 1 }), (characters) => {
        const expected = characters.length <= 8 ? "*".repeat(characters.length) : `…${characters.slice(-4).join("")}`;
        expect(maskedHint(characters.join(""))).toBe(expected);
      }),
    );
  });
});

describe("the header of a credential", () => {
  test("carries the secret as its auth_type says", () => {
    expect(credentialHeader("bearer", "s3 cret")).toEqual({ name: "authorization", value: "Bearer s3 cret" });
    expect(credentialHeader("api_key", "s")).toEqual({ name: "x-api-key", value: "s" });
  });

  test("is read by the upstream as it was meant, whatever the secret", () => {
    fc.assert(
      fc.property(fc.string({ unit: "binary" }), (secret) => {
        let header: { readonly name: string; readonly value: string };
        try {
          header = credentialHeader("api_key", secret);
        } catch {
          return;
        }
        expect(new Headers([[header.name, header.value]]).get("x-api-key")).toBe(secret);
      }),
    );
  });

  test.each(["", " ", "a\n", "\na", "a\r\nX-Evil: 1", "a\0", "é", "a ", "\ta", "a\u007f", "-----BEGIN X-----\nA"])(
    "does not exist for %j",
    (secret) => {
      expect(() => credentialHeader("bearer", secret)).toThrow("can't be sent as a header");
    },
  );
});
