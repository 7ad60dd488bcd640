// Signs a wallet's transactions, with a private key in this process or by a remote signer over JSON-RPC (`eth_signTransaction`,
// as in Web3Signer and Clef). A remote signer's result is compared with the request field by field before it is used.
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

export interface Signer {
  /** In lower case. */
  readonly address: Hex;
  /** How many transactions it can sign concurrently. */
  readonly parallel: number;
  /** @throws Error when it can't sign now; no error message contains a secret */
  sign(transaction: Unsigned): Promise<{ readonly raw: Hex; readonly hash: Hex }>;
}

/** Wraps the signers to tell whether one of them failed in the last 30 seconds and has not signed since. */
export function watchSigners(unwatched: readonly Signer[]): { signers: Signer[]; isFailing: () => boolean } {
  const failedAt = new Map<Hex, number>();
  const signers = unwatched.map((signer): Signer => {
    const { address } = signer;
    return {
      ...signer,
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
  // For this long after a failure, other facilitators take over the wallets.
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
      // Signing blocks the only thread for most of a millisecond, so other work gets a turn after each signature.
      await new Promise((resolve) => setImmediate(resolve));
      return { raw: lowerHex(raw), hash: keccak256(raw) };
    },
  };
}

interface RemoteSignerOptions {
  readonly network: Network;
  readonly url: string;
  readonly address: Hex;
  /** An outbound client that allows any address, since the operator chose the signer. */
  readonly outbound: Outbound;
  readonly timeoutMs?: number;
}

export function createRemoteSigner({ timeoutMs = 5_000, ...options }: RemoteSignerOptions): Signer {
  const address = lowerHex(options.address);
  const { chainId } = options.network;
  // A transaction of a hundred payments is 100,000 characters; Clef returns its bytes twice.
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
        // Clef accepts `input` as an alias of `data`, and refuses a request in which the two differ.
        input: transaction.data,
        chainId: hex(chainId),
        type: "0x2",
        maxFeePerGas: hex(transaction.fees.maxFee),
        maxPriorityFeePerGas: hex(transaction.fees.maxPriorityFee),
      };
      const raw = rawOf(await exchange(server, "eth_signTransaction", [request]));
      await requireUnchanged(raw, { ...transaction, chainId }, address);
      return { raw, hash: keccak256(raw) };
    },
  };
}

/** Web3Signer returns the signed bytes, Clef an object with the bytes in `raw`. */
function rawOf(result: unknown): Hex {
  const isObject = typeof result === "object" && result !== null;
  const raw = data(isObject && "raw" in result ? result.raw : result);
  if (raw.length <= "0x02".length) throw new Error("the remote signer returned no transaction");
  return raw;
}

/** @throws Error when `raw` is not the wanted transaction, signed by `address` */
async function requireUnchanged(raw: Hex, wanted: Unsigned & Pick<Network, "chainId">, address: Hex): Promise<void> {
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

/** Parses the bytes. The library's errors quote them, and with them the payer's signature, so they are not passed on. */
async function readSigned(raw: TransactionSerializedEIP1559) {
  try {
    const signer = await recoverTransactionAddress({ serializedTransaction: raw });
    return { signed: parseTransaction(raw), signer };
  } catch {
    throw new Error("the remote signer returned an unreadable transaction");
  }
}

const isType2 = (raw: Hex): raw is TransactionSerializedEIP1559 => raw.startsWith("0x02");
