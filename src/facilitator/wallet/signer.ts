// Who signs for a wallet: a private key in this process, or another process that is asked by JSON-RPC (`eth_signTransaction`,
// as Web3Signer and Clef have it), whose answer is compared field by field before anything relies on it.
import { keccak256, parseTransaction, recoverTransactionAddress, type TransactionSerializedEIP1559 } from "viem";
import { privateKeyToAccount } from "viem/accounts";
import type { Fees } from "../../chain/fees.ts";
import { data, exchange, hex } from "../../chain/json-rpc.ts";
import type { Outbound } from "../../http/client/outbound.ts";
import type { Network } from "../../x402/network.ts";
import { type Hex, lowerHex } from "../../x402/types.ts";

export interface Unsigned {
  readonly nonce: number;
  readonly to: Hex;
  readonly data: Hex;
  readonly gas: bigint;
  readonly fees: Fees;
}

export interface SignedTransaction {
  readonly raw: Hex;
  readonly hash: Hex;
}

export interface Signer {
  /** Lower case. */
  readonly address: Hex;
  /** How many it signs at a time. */
  readonly parallel: number;
  /** @throws Error when it can't sign now; nothing it throws holds a secret */
  sign(transaction: Unsigned): Promise<SignedTransaction>;
}

/** The signers, watched, and whether one of them failed lately and has not signed since. */
export function watchSigners(those: readonly Signer[]): { signers: Signer[]; isFailing: () => boolean } {
  const failedAt = new Map<Hex, number>();
  const signers = those.map((signer): Signer => {
    const { address, parallel } = signer;
    return {
      address,
      parallel,
      async sign(transaction) {
        try {
          const signed = await signer.sign(transaction);
          failedAt.delete(address);
          return signed;
        } catch (error) {
          failedAt.set(address, performance.now());
          throw error;
        }
      },
    };
  });
  // A signer that has failed is left to other facilitators for so long.
  const isFailing = () => [...failedAt.values()].some((at) => performance.now() - at < 30_000);
  return { signers, isFailing };
}

export function createLocalSigner({ chainId }: Network, privateKey: Hex): Signer {
  const account = privateKeyToAccount(privateKey);
  return {
    address: lowerHex(account.address),
    parallel: 1,
    async sign({ nonce, to, data, gas, fees }) {
      const raw = await account.signTransaction({
        type: "eip1559",
        chainId,
        nonce,
        to,
        data,
        gas,
        value: 0n,
        maxFeePerGas: fees.maxFee,
        maxPriorityFeePerGas: fees.maxPriorityFee,
      });
      // Signing blocks the only thread for most of a millisecond, so other work goes on after each.
      await new Promise((resolve) => setImmediate(resolve));
      return { raw: lowerHex(raw), hash: keccak256(raw) };
    },
  };
}

interface RemoteSignerOptions {
  readonly network: Network;
  readonly url: string;
  readonly address: Hex;
  /** Without the rule about addresses, since the operator chose the signer. */
  readonly outbound: Outbound;
  readonly timeoutMs?: number;
}

export function createRemoteSigner({ timeoutMs = 5_000, ...options }: RemoteSignerOptions): Signer {
  const address = lowerHex(options.address);
  const { chainId } = options.network;
  // A transaction of a hundred payments is 100,000 characters; Clef gives its bytes twice.
  const server = { ...options, timeoutMs, answerBytesMax: 512 * 1024 };
  return {
    address,
    parallel: 16,
    async sign(transaction) {
      const request = {
        from: address,
        to: transaction.to,
        gas: hex(transaction.gas),
        value: "0x0",
        nonce: hex(transaction.nonce),
        data: transaction.data,
        // Clef knows the field by this name as well, and refuses a request that says different things in both.
        input: transaction.data,
        chainId: hex(chainId),
        type: "0x2",
        maxFeePerGas: hex(transaction.fees.maxFee),
        maxPriorityFeePerGas: hex(transaction.fees.maxPriorityFee),
      };
      const raw = rawOf(await exchange(server, "eth_signTransaction", [request]));
      await requireSame(raw, { ...transaction, chainId }, address);
      return { raw, hash: keccak256(raw) };
    },
  };
}

/** Web3Signer answers with the signed bytes, Clef with an object that holds them. */
function rawOf(result: unknown): Hex {
  const isObject = typeof result === "object" && result !== null;
  const raw = data(isObject && "raw" in result ? result.raw : result);
  if (raw.length <= "0x02".length) throw new Error("the remote signer gave no transaction");
  return raw;
}

/** @throws Error when these are not the bytes of that transaction, signed by that address */
async function requireSame(raw: Hex, wanted: Unsigned & Pick<Network, "chainId">, address: Hex): Promise<void> {
  if (!isType2(raw)) throw new Error("the remote signer signed another type of transaction");
  const { signed, signer } = await readSigned(raw);
  const pairs: ReadonlyArray<readonly [name: string, signed: unknown, wanted: unknown]> = [
    ["chainId", signed.chainId, wanted.chainId],
    ["nonce", signed.nonce ?? 0, wanted.nonce],
    ["to", signed.to?.toLowerCase(), wanted.to],
    ["value", signed.value ?? 0n, 0n],
    ["data", (signed.data ?? "0x").toLowerCase(), wanted.data],
    ["gas", signed.gas ?? 0n, wanted.gas],
    ["maxFeePerGas", signed.maxFeePerGas ?? 0n, wanted.fees.maxFee],
    ["maxPriorityFeePerGas", signed.maxPriorityFeePerGas ?? 0n, wanted.fees.maxPriorityFee],
    ["accessList", signed.accessList?.length ?? 0, 0],
  ];
  const wrong = pairs.filter(([, signed, wanted]) => signed !== wanted).map(([name]) => name);
  if (wrong.length > 0) throw new Error(`the remote signer changed ${wrong.join(", ")}`);
  if (lowerHex(signer) !== address) throw new Error("the remote signer signed for another address");
}

/** The library's own errors quote the bytes, and with them the payer's signature. */
async function readSigned(raw: TransactionSerializedEIP1559) {
  try {
    const signer = await recoverTransactionAddress({ serializedTransaction: raw });
    return { signed: parseTransaction(raw), signer };
  } catch {
    throw new Error("the remote signer gave a transaction that can't be read");
  }
}

const isType2 = (raw: Hex): raw is TransactionSerializedEIP1559 => raw.startsWith("0x02");
