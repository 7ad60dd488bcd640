import { expect, test } from "bun:test";
import { networkInterfaces } from "node:os";
import { isSame, parseAddress } from "../core/ip-ranges.ts";
import { ownAddresses } from "./interfaces.ts";

test("every address of the machine's interfaces is known as its own", () => {
  const own = ownAddresses()();
  const listed = Object.values(networkInterfaces()).flatMap((addresses = []) => addresses);
  const missing = listed.filter(({ address }) => {
    const parsed = parseAddress(address);
    return parsed === null || !own.some((each) => isSame(each, parsed));
  });
  expect(missing).toEqual([]);
  expect(own.length).toBe(listed.length);
});

test("the machine's interfaces are read again after a while, and not for each question", () => {
  let time = 0;
  const own = ownAddresses(() => time);
  const first = own();
  time = 4_999;
  expect(own()).toBe(first);
  time = 5_000;
  expect(own()).not.toBe(first);
  expect(own()).toEqual(first);
});
