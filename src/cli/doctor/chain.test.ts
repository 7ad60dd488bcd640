import { expect, test } from "bun:test";
import fc from "fast-check";
import { BASE } from "../../../test/support/network.ts";
import { agreementFindings, chainTime, commonBlock, type NodeAnswer, type NodeReport, nodeFindings } from "./chain.ts";

const node = (index: number, number: number, timestamp: number, more: Partial<NodeAnswer> = {}): NodeReport => ({
  network: BASE,
  index,
  answer: { chainId: 8453n, newest: { number, timestamp }, hasToken: true, ms: 1, ...more },
  certificate: null,
});
const silent = (index: number): NodeReport => ({ network: BASE, index, answer: "no answer", certificate: null });
const states = (nodes: readonly NodeReport[]) => nodeFindings(nodes).map(({ state }) => state);

test("a node warns from 5 blocks or 60 s behind the best on, and never the best one", () => {
  fc.assert(
    fc.property(fc.integer({ min: 0, max: 20 }), fc.integer({ min: 0, max: 200 }), (blocks, seconds) => {
      const found = states([node(1, 1_000_000, 5_000), node(2, 1_000_000 - blocks, 5_000 - seconds)]);
      expect(found).toEqual(["ok", blocks >= 5 || seconds >= 60 ? "warn" : "ok"]);
    }),
    {
      examples: [
        [4, 59],
        [5, 0],
        [0, 60],
      ],
    },
  );
});

test("the chain's time is that of the newest block of any node", () => {
  expect(chainTime([node(1, 100, 5_000), node(2, 101, 5_002), silent(3)])).toBe(5_002);
  expect(chainTime([silent(1)])).toBeNull();
});

test("a silent node warns while another one answers, of the right chain", () => {
  expect(states([silent(1), node(2, 100, 5_000)])).toEqual(["warn", "ok"]);
  expect(states([silent(1), silent(2)])).toEqual(["fail", "fail"]);
  expect(states([silent(1), node(2, 100, 5_000, { chainId: 1n })])).toEqual(["fail", "fail"]);
});

test("a node without the token fails", () => {
  expect(states([node(1, 100, 5_000, { hasToken: false })])).toEqual(["fail"]);
});

test("nodes are compared at a block that all have, and that is not the newest; those of another chain are not", () => {
  expect(commonBlock([node(1, 100, 0)])).toBeNull();
  expect(commonBlock([node(1, 100, 0), node(2, 90, 0), silent(3)])).toBe(86);
  expect(commonBlock([node(1, 100, 0), node(2, 2, 0)])).toBe(0);
  expect(commonBlock([node(1, 100, 0), node(2, 90, 0, { chainId: 1n })])).toBeNull();
  const votes = (...hashes: (`0x${string}` | null)[]) =>
    agreementFindings(
      86,
      hashes.map((hash, index) => ({ index: index + 1, hash })),
    )[0];
  expect(votes("0xa", "0xa", null)?.state).toBe("ok");
  expect(votes("0xa", "0xb", "0xa")).toMatchObject({
    state: "fail",
    text: "the endpoints have different blocks at height 86: 1 and 3 against 2",
  });
});
