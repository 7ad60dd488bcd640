import { afterAll, describe, expect, test } from "bun:test";
import { concatHex, keccak256, parseTransaction, recoverTransactionAddress, toRlp } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { outbound } from "../../../test/support/chain/wallet.ts";
import { BASE } from "../../../test/support/network.ts";
import type { Hex } from "../../x402/types.ts";
import { createLocalSigner, createRemoteSigner, type Unsigned } from "./signer.ts";

const key = generatePrivateKey();
const account = privateKeyToAccount(key);
const lower = (text: string): Hex => `0x${text.slice(2).toLowerCase()}`;
const address = lower(account.address);
const transaction: Unsigned = {
  nonce: 7,
  to: `0x${"ab".repeat(20)}`,
  data: "0x5ec3e75ec3e7",
  gas: 120_000n,
  fees: { maxFee: 3_000_000_000n, maxPriorityFee: 1_000_000n },
};
const first: Unsigned = { ...transaction, nonce: 0, data: "0x" };

type Request = Readonly<Record<string, Hex>>;
type Fields = Parameters<typeof account.signTransaction>[0] & { type: "eip1559" };

const fieldsOf = (request: Request): Fields => ({
  type: "eip1559",
  chainId: Number(request["chainId"]),
  nonce: Number(request["nonce"]),
  to: request["to"]!,
  data: request["data"]!,
  gas: BigInt(request["gas"]!),
  value: BigInt(request["value"]!),
  maxFeePerGas: BigInt(request["maxFeePerGas"]!),
  maxPriorityFeePerGas: BigInt(request["maxPriorityFeePerGas"]!),
});

/** A stand-in for Web3Signer and Clef: it signs what it is asked for, or what the test makes of it. */
let answer: (request: Request) => unknown;
let seen: Request[] = [];
const server = Bun.serve({
  port: 0,
  hostname: "127.0.0.1",
  async fetch(request) {
    const call = (await request.json()) as { id: number; method: string; params: [Request] };
    if (call.method !== "eth_signTransaction") return new Response(null, { status: 404 });
    seen.push(call.params[0]);
    return Response.json({ jsonrpc: "2.0", id: call.id, result: await answer(call.params[0]) });
  },
});
afterAll(() => server.stop(true));
const remote = createRemoteSigner({
  network: BASE,
  url: `http://127.0.0.1:${server.port}/`,
  address: account.address,
  outbound,
  timeoutMs: 300,
});

test.each([transaction, first])("a local key signs the transaction that it is asked for", async (asked) => {
  const { raw, hash } = await createLocalSigner(BASE, key).sign(asked);
  expect(hash).toBe(keccak256(raw));
  const parsed = parseTransaction(raw);
  expect(parsed).toMatchObject({ chainId: 8453, gas: 120_000n, maxFeePerGas: 3_000_000_000n });
  expect(parsed.nonce ?? 0).toBe(asked.nonce);
  expect(lower(await recoverTransactionAddress({ serializedTransaction: raw as `0x02${string}` }))).toBe(address);
});

describe("a remote signer", () => {
  test.each([transaction, first])(
    "is asked for every field, and gives the bytes that a local key would",
    async (asked) => {
      seen = [];
      const local = await createLocalSigner(BASE, key).sign(asked);
      answer = (request) => account.signTransaction(fieldsOf(request));
      expect(await remote.sign(asked)).toEqual(local);
      answer = async (request) => ({ raw: await account.signTransaction(fieldsOf(request)), tx: {} });
      expect(await remote.sign(asked)).toEqual(local);
      expect(seen[0]).toMatchObject({ from: address, chainId: "0x2105", value: "0x0", gas: "0x1d4c0" });
    },
  );

  const changes: [string, Partial<Fields>][] = [
    ["the nonce", { nonce: 8 }],
    ["the recipient", { to: `0x${"cd".repeat(20)}` }],
    ["the value", { value: 1n }],
    ["the data", { data: "0x1235" }],
    ["the gas", { gas: 120_001n }],
    ["the chain", { chainId: 1 }],
    ["the fee", { maxFeePerGas: 4_000_000_000n }],
    ["the tip", { maxPriorityFeePerGas: 2n }],
    ["the access list", { accessList: [{ address: `0x${"cd".repeat(20)}`, storageKeys: [] }] }],
  ];
  test.each(changes)("is not believed when it changes %s", async (_, change) => {
    answer = (request) => account.signTransaction({ ...fieldsOf(request), ...change } as Fields);
    await expect(remote.sign(transaction)).rejects.toThrow("the remote signer changed");
  });

  test("is not repeated in the error when it leaves fields out, for the payer's signature is in them", async () => {
    answer = (request) => concatHex(["0x02", toRlp([request["chainId"]!, request["data"]!, request["to"]!])]);
    const error = await remote.sign(transaction).catch((thrown) => thrown);
    expect(error).toBeInstanceOf(Error);
    expect(Bun.inspect(error)).not.toContain(transaction.data.slice(2));
  });

  const nonsense: [string, () => unknown][] = [
    [
      "another key's signature",
      () => privateKeyToAccount(generatePrivateKey()).signTransaction(fieldsOf(seen.at(-1)!)),
    ],
    ["a legacy transaction", () => account.signTransaction({ type: "legacy", chainId: 8453, nonce: 7, gasPrice: 1n })],
    ["bytes that are no transaction", () => "0x02ff"],
    ["nothing", () => null],
    ["no bytes", () => "0x"],
    ["a text", () => "signed"],
    ["nothing in time", () => new Promise(() => {})],
  ];
  test.each(nonsense)("is not believed when it gives %s", async (_, given) => {
    answer = given;
    await expect(remote.sign(transaction)).rejects.toThrow(Error);
  });
});
