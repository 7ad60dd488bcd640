import { expect, test } from "bun:test";
import fc from "fast-check";
import { getAddress } from "viem";
import { checksummed } from "./address.ts";

test("an address has the one spelling that viem gives it, in whatever case it comes", () => {
  const address = fc.uint8Array({ minLength: 20, maxLength: 20 }).map((bytes) => Buffer.from(bytes).toString("hex"));
  fc.assert(
    fc.property(address, fc.boolean(), (hex, loud) => {
      expect(checksummed(`0x${loud ? hex.toUpperCase() : hex}`)).toBe(getAddress(`0x${hex}`));
    }),
  );
});
