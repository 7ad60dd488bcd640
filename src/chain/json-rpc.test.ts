import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import * as wire from "./json-rpc.ts";

const HASH = `0x${"Ab".repeat(32)}`;
const block = {
  number: "0x10",
  hash: HASH,
  parentHash: HASH,
  timestamp: "0x6747d0b1",
  baseFeePerGas: "0x3b9aca00",
  transactions: [],
};
const log = {
  address: `0x${"Cd".repeat(20)}`,
  topics: [HASH],
  data: "0x00FF",
  transactionHash: HASH,
};
const receipt = { transactionHash: HASH, blockNumber: "0x1", blockHash: HASH, status: "0x1", logs: [log] };

describe("an answer in the form of the protocol", () => {
  test("is read as a block, in lower case", () => {
    expect(wire.block(block)).toEqual({
      number: 16,
      hash: `0x${"ab".repeat(32)}`,
      parentHash: `0x${"ab".repeat(32)}`,
      timestamp: 0x6747d0b1,
      baseFee: 10n ** 9n,
    });
    expect(wire.block(null)).toBeNull();
  });

  test("is read as a receipt, in lower case", () => {
    expect(wire.receipt(receipt)).toMatchObject({
      succeeded: true,
      blockNumber: 1,
      logs: [{ data: "0x00ff" }],
    });
    expect(wire.receipt({ ...receipt, status: "0x0" })?.succeeded).toBe(false);
    expect(wire.receipt(null)).toBeNull();
  });

  test("tells what a receipt's transaction cost, with what the chain below takes; what is not said counts as nothing", () => {
    const gas = { gasUsed: "0x5208", effectiveGasPrice: "0x3b9aca00" };
    expect(wire.receipt({ ...receipt, ...gas })?.gasWei).toBe(21_000n * 10n ** 9n);
    expect(wire.receipt({ ...receipt, ...gas, l1Fee: "0x7" })?.gasWei).toBe(21_000n * 10n ** 9n + 7n);
    expect(wire.receipt({ ...receipt, ...gas, l1Fee: null })?.gasWei).toBe(21_000n * 10n ** 9n);
    expect(wire.receipt(receipt)?.gasWei).toBe(0n);
    expect(() => wire.receipt({ ...receipt, gasUsed: 21_000 })).toThrow(TypeError);
  });

  test("is read as logs, less those of blocks that are gone", () => {
    expect(wire.logEntries([log, { ...log, removed: true }])).toHaveLength(1);
  });

  test("is read as a quantity of any size", () => {
    fc.assert(
      fc.property(fc.bigInt({ min: 0n, max: 2n ** 256n - 1n }), (value) => {
        return wire.quantity(`0x${value.toString(16)}`) === value;
      }),
    );
  });
});

describe("an answer of another form is refused:", () => {
  test.each([undefined, null, 1, "", "0x", "12", "0x00", "0x01", "0xg", "-0x1", [["0x1"]], {}, `0x1${"0".repeat(64)}`])(
    "a quantity like %p",
    (value) => {
      expect(() => wire.quantity(value)).toThrow(TypeError);
    },
  );

  const fields = Object.keys(block).filter((name) => name !== "transactions");
  test.each(fields)("a block without %s", (name) => {
    expect(() => wire.block({ ...block, [name]: undefined })).toThrow(TypeError);
    expect(() => wire.block({ ...block, [name]: "nonsense" })).toThrow(TypeError);
  });

  test.each(Object.keys(receipt))("a receipt without %s", (name) => {
    expect(() => wire.receipt({ ...receipt, [name]: undefined })).toThrow(TypeError);
    expect(() => wire.receipt({ ...receipt, [name]: "nonsense" })).toThrow(TypeError);
  });

  test("anything but an object", () => {
    for (const value of [undefined, "0x1", 7, true, "null"]) {
      expect(() => wire.block(value)).toThrow(TypeError);
      expect(() => wire.receipt(value)).toThrow(TypeError);
      expect(() => wire.logEntries(value)).toThrow(TypeError);
    }
    expect(() => wire.receipt({ ...receipt, status: "0x2" })).toThrow(TypeError);
    expect(() => wire.count("0x20000000000001")).toThrow(TypeError);
  });
});
