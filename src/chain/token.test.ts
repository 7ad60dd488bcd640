import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { decodeFunctionData, encodeAbiParameters, encodeEventTopics, parseAbi } from "viem";
import { newPayer, signPayment } from "../../test/support/chain/payments.ts";
import { BASE } from "../../test/support/network.ts";
import type { Authorization, Hex } from "../x402/types.ts";
import { type LogEntry, type Receipt, RpcError } from "./json-rpc.ts";
import * as token from "./token.ts";

const ABI = parseAbi([
  "function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce, uint8 v, bytes32 r, bytes32 s)",
  "function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce, bytes signature)",
  "event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce)",
  "event Transfer(address indexed from, address indexed to, uint256 value)",
]);
const lower = (text: string): Hex => `0x${text.slice(2).toLowerCase()}`;
const hash: Hex = `0x${"ab".repeat(32)}`;

async function signed(options: { form?: "zero"; from?: Hex; signature?: Hex } = {}) {
  const made = await signPayment(newPayer(), { to: newPayer().address, value: 1000n, ...options });
  const { from, to, value, validAfter, validBefore, nonce } = made.authorization;
  const authorization: Authorization = {
    from: lower(from),
    to: lower(to),
    value: BigInt(value),
    validAfter: BigInt(validAfter),
    validBefore: BigInt(validBefore),
    nonce: lower(nonce),
  };
  return { authorization, signature: lower(made.signature) };
}

const decoded = (data: Hex) => decodeFunctionData({ abi: ABI, data }).args.map(String);
const words = (authorization: Authorization) => [
  authorization.value,
  authorization.validAfter,
  authorization.validBefore,
  authorization.nonce,
];

describe("the call of the transfer", () => {
  test("has v, r and s for a plain account", async () => {
    const { authorization, signature } = await signed();
    const args = decoded(token.transferData(authorization, signature));
    expect(args.slice(2, 6)).toEqual(words(authorization).map(String));
    expect(args[6]).toMatch(/^2[78]$/);
    expect(args.slice(7)).toEqual([signature.slice(0, 66), `0x${signature.slice(66, 130)}`]);
  });

  test("has a contract wallet's signature as it is: 65 bytes are not rewritten, longer ones go as bytes", async () => {
    // A Safe's v of 1 means an approved hash, and not 28.
    const { authorization, signature } = await signed({ form: "zero", from: newPayer().address });
    const args = decoded(token.transferData(authorization, signature));
    expect(args[6]).toBe(String(Number.parseInt(signature.slice(130), 16)));
    const long: Hex = `${signature}00ff`;
    expect(decoded(token.transferData(authorization, long)).slice(6)).toEqual([long]);
  });
});

describe("a receipt", () => {
  const log = (topics: readonly unknown[], data: Hex = "0x"): LogEntry => ({
    address: BASE.token.key,
    topics: topics.map((topic) => lower(String(topic))),
    data,
    transactionHash: hash,
  });
  async function paid() {
    const { authorization } = await signed();
    const { from, to, value, nonce } = authorization;
    const used = log(
      encodeEventTopics({ abi: ABI, eventName: "AuthorizationUsed", args: { authorizer: from, nonce } }),
    );
    const amount = encodeAbiParameters([{ type: "uint256" }], [value]);
    const moved = log(encodeEventTopics({ abi: ABI, eventName: "Transfer", args: { from, to } }), amount);
    const receipt: Receipt = {
      hash,
      from: null,
      blockNumber: 1,
      blockHash: hash,
      succeeded: true,
      gasWei: 0n,
      logs: [used, moved],
    };
    return { authorization, receipt, used, moved };
  }

  test("proves a payment by both events, anywhere among others", async () => {
    const { authorization, receipt, used, moved } = await paid();
    expect(token.isPaidBy(BASE, authorization, receipt)).toBe(true);
    expect(token.isPaidBy(BASE, authorization, { ...receipt, logs: [moved, used, moved, used] })).toBe(true);
    const other = { ...used, topics: [hash] };
    expect(token.isPaidBy(BASE, authorization, { ...receipt, logs: [used, other, other, moved] })).toBe(true);
  });

  test("proves no more of several authorizations of one payer than there are transfers after them", async () => {
    const { authorization, receipt, used, moved } = await paid();
    const nonces = [0, 1, 2].map((index): Hex => `0x${String(index).repeat(64)}`);
    const entries = [
      ...nonces.map((nonce) => ({ ...used, topics: used.topics.with(2, nonce) })),
      moved,
      { ...moved, data: hash },
      { ...used, address: `0x${"11".repeat(20)}` as const },
    ];
    fc.assert(
      fc.property(fc.array(fc.nat(entries.length - 1), { maxLength: 12 }), (picks) => {
        // An authorization is used once at most.
        const once = picks.filter((pick, index) => pick > 2 || picks.indexOf(pick) === index);
        const logs = once.flatMap((pick) => entries[pick] ?? []);
        const proven = nonces.filter((nonce) =>
          token.isPaidBy(BASE, { ...authorization, nonce }, { ...receipt, logs }),
        );
        for (const nonce of proven) {
          const at = logs.findIndex((log) => log.address === BASE.token.key && log.topics[2] === nonce);
          expect(at).toBeGreaterThanOrEqual(0);
          expect(logs.indexOf(moved, at)).toBeGreaterThan(at);
        }
        expect(proven.length).toBeLessThanOrEqual(logs.filter((log) => log === moved).length);
        // One whose transfer comes right after it is proven, whatever else there is.
        for (const [index, log] of logs.entries()) {
          const nonce = log.topics[2];
          const isUse = nonces.some((each) => each === nonce) && log.address === BASE.token.key;
          if (isUse && nonce !== undefined && logs[index + 1] === moved) expect(proven).toContain(nonce);
        }
      }),
    );
  });

  test("proves nothing when an event is missing, of another payment, or of a transaction that failed", async () => {
    const { authorization, receipt, used, moved } = await paid();
    const other = (entry: LogEntry, change: Partial<LogEntry>) => ({ ...entry, ...change });
    const stranger: Hex = `0x${"11".repeat(32)}`;
    const wrong: (readonly LogEntry[])[] = [
      [],
      [used],
      [moved],
      [moved, used],
      [other(used, { address: `0x${"11".repeat(20)}` }), moved],
      [used, other(moved, { address: `0x${"11".repeat(20)}` })],
      [used, other(moved, { data: `0x${"0".repeat(63)}1` })],
      ...[0, 1, 2].flatMap((place) => [
        [other(used, { topics: used.topics.with(Math.min(place, 2), stranger) }), moved],
        [used, other(moved, { topics: moved.topics.with(place, stranger) })],
      ]),
    ];
    for (const logs of wrong) expect(token.isPaidBy(BASE, authorization, { ...receipt, logs })).toBe(false);
    expect(token.isPaidBy(BASE, authorization, { ...receipt, succeeded: false })).toBe(false);
  });
});

describe("an error of a simulation", () => {
  test.each([
    [3, "execution reverted: FiatTokenV2: invalid signature", "FiatTokenV2: invalid signature"],
    [-32_000, "execution reverted", "execution reverted"],
    [-32_015, "VM execution error.", "VM execution error."],
    [
      -32_003,
      "Out of gas: gas required exceeds allowance: 500000",
      "Out of gas: gas required exceeds allowance: 500000",
    ],
  ])("refuses the payment: %i %s", (code, message, reason) => {
    const error = new RpcError(code, message);
    expect(token.isRefusal(error)).toBe(true);
    expect(token.refusalReason(error)).toBe(reason);
  });

  test.each([
    [-32_000, "header not found"],
    [-32_603, "internal error"],
    [-32_005, "rate limit exceeded"],
    [-32_601, "the method eth_estimateGas does not exist"],
  ])("says nothing of the payment: %i %s", (code, message) => {
    expect(token.isRefusal(new RpcError(code, message))).toBe(false);
  });

  test.each([
    [-32_000, "gas required exceeds allowance (12000)", true],
    [-32_003, "Out of gas: gas required exceeds allowance: 0", true],
    [-32_000, "insufficient funds for gas * price + value: address 0x1 have 1 want 2", true],
    [-32_000, "max fee per gas less than block base fee: address 0x1", true],
    [-32_000, "gas required exceeds allowance (500000)", false],
    [3, "execution reverted: insufficient funds", false],
    [-32_000, "execution reverted", false],
  ])("is told from one about the price: %i %s, %p", (code, message, isIt) => {
    expect(token.isAboutPrice(new RpcError(code, message), 500_000n)).toBe(isIt);
  });

  test("is kept in one short line", () => {
    const { message } = new RpcError(3, `a\r\nb${"x".repeat(1000)}`);
    expect(message).toStartWith("a bx");
    expect(message.length).toBeLessThan(310);
  });
});
