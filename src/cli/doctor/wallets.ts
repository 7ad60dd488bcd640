// The wallets that pay for gas, and the process that signs for one, if another does.
import { formatEther } from "viem";
import { exchange, RpcError } from "../../chain/json-rpc.ts";
import * as wire from "../../chain/rpc-types.ts";
import { createLocalSigner } from "../../facilitator/wallet/signer.ts";
import type { Outbound } from "../../http/outbound.ts";
import type { Hex } from "../../x402/types.ts";
import { type Finding, failure, findings, type Problem, warning } from "./finding.ts";
import { type Nodes, reasonOf } from "./nodes.ts";

const SIGNER_TIMEOUT_MS = 4_500;
const ANSWER_BYTES_MAX = 64 * 1024;

export type Signers =
  | { readonly kind: "local"; readonly keys: readonly Hex[] }
  | { readonly kind: "remote"; readonly url: string; readonly address: Hex };

export async function walletFindings(
  signers: Signers,
  lowWaterWei: bigint,
  opening: Promise<Nodes>,
): Promise<Finding[]> {
  const { good } = await opening;
  const [node] = good;
  const addresses =
    signers.kind === "local" ? signers.keys.map((key) => createLocalSigner(key).address) : [signers.address];
  if (node === undefined) return findings("wallets", [warning("not looked at without a node", "mend that first")], "");
  const balances = await Promise.all(
    addresses.map((address) => node.ask("eth_getBalance", [address, "latest"], wire.quantity)),
  );
  const isAnyAble = balances.some((balance) => balance >= lowWaterWei);
  return addresses.flatMap((address, index) => {
    const balance = balances[index] ?? 0n;
    const problem = balance >= lowWaterWei ? null : lowProblem(balance, lowWaterWei, isAnyAble);
    return findings(`wallet ${address}`, [problem], `it has ${formatEther(balance)} ETH`);
  });
}

function lowProblem(balance: bigint, lowWaterWei: bigint, othersAreAble: boolean): Problem {
  const text = `it has ${formatEther(balance)} ETH, less than TOLLGATE_GAS_LOW_WATER_WEI (${formatEther(lowWaterWei)} ETH)`;
  return othersAreAble
    ? warning(text, "send it ETH on Base: the other wallets carry on")
    : failure(text, "send it ETH on Base: no payment is settled before");
}

/**
 * Clef may ask a person before it tells its wallets, and tells its version at once; Web3Signer knows the first question
 * alone. An answer of any kind shows that it is there.
 */
export async function signerFindings(
  { url, address }: Extract<Signers, { kind: "remote" }>,
  outbound: Outbound,
): Promise<Finding[]> {
  const server = { outbound, url, timeoutMs: SIGNER_TIMEOUT_MS, answerBytesMax: ANSWER_BYTES_MAX };
  const [accounts, version] = await Promise.allSettled([
    exchange(server, "eth_accounts", []),
    exchange(server, "account_version", []),
  ]);
  const fine = "it answers, and signs for the wallet";
  if (accounts.status === "fulfilled") {
    return findings("remote signer", [addressProblem(accounts.value, address)], fine);
  }
  const why = reasonOf(accounts.reason);
  const isThere = [accounts, version].some((each) => each.status === "fulfilled" || each.reason instanceof RpcError);
  const problem = isThere
    ? warning(`it does not tell its wallets: ${why}`, "whether it signs for the wallet shows at the first payment")
    : failure(
        `it gives no usable answer: ${why}`,
        "TOLLGATE_REMOTE_SIGNER_URL must be its address, and this machine must reach it",
      );
  return findings("remote signer", [problem], fine);
}

function addressProblem(accounts: unknown, address: Hex): Problem | null {
  const has = Array.isArray(accounts) && accounts.some((each) => String(each).toLowerCase() === address.toLowerCase());
  return has
    ? null
    : failure(`it does not sign for ${address}`, "TOLLGATE_REMOTE_SIGNER_ADDRESS must be a wallet of its own");
}
