import { expect, test } from "bun:test";
import { networkOf } from "./socket-options.ts";

const HERE = 0x20010db800010002n;

test("all addresses of a network of IPv6 are one caller's, and each of IPv4 is another's", () => {
  expect(networkOf("2001:db8:1:2::1", HERE)).toBe(networkOf("2001:db8:1:2:ffff:ffff:ffff:ffff", HERE));
  expect(networkOf("2001:db8:1:3::1", HERE + 1n)).not.toBe(networkOf("2001:db8:1:2::1", HERE));
  expect(networkOf("::ffff:192.0.2.1", 0n)).toBe(networkOf("192.0.2.1", 0n));
  expect(networkOf("::ffff:192.0.2.2", 0n)).not.toBe(networkOf("::ffff:192.0.2.1", 0n));
  expect(networkOf("::1", 0n)).not.toBe(networkOf("::ffff:192.0.2.1", 0n));
});
