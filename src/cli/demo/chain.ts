// The demo's chain as it is used: the real token on it, gas and USDC for the demo's accounts, and what can be read
// back: balances, and the block of a transaction.
import { decodeFunctionResult, encodeFunctionData, formatUnits, type Hex, parseAbi, toHex } from "viem";
import { TOKEN } from "../../x402/kind.ts";
import { type AnvilProcess, BLOCK_SECONDS } from "./anvil.ts";
import { ask, at, textAt } from "./http.ts";
import { DemoProblem } from "./problem.ts";
import { type CallNode, callAsAdmin, installToken, mintCall } from "./token.ts";

const ABI = parseAbi(["function balanceOf(address account) view returns (uint256)"]);
const RPC_MS_MAX = 10_000;
const DECIMALS = 6;

/** Smallest units as USDC, exactly. */
export function usdc(units: bigint): string {
  return formatUnits(units, DECIMALS);
}

/** Puts the token on a fresh chain and gives the accounts what they need; only then blocks come by themselves. */
export async function furnishChain(
  { url }: AnvilProcess,
  needs: {
    readonly gas: readonly { readonly address: Hex; readonly wei: bigint }[];
    readonly usdc: readonly { readonly address: Hex; readonly units: bigint }[];
  },
) {
  const request = rpc(url);
  await installToken(request);
  for (const { address, wei } of needs.gas) await request("anvil_setBalance", [address, toHex(wei)]);
  for (const { address, units } of needs.usdc) await callAsAdmin(request, mintCall(address, units));
  await request("evm_mine", []);
  await request("evm_setIntervalMining", [BLOCK_SECONDS]);
  return {
    url,
    /** Smallest units. */
    async usdcOf(address: Hex): Promise<bigint> {
      const data = encodeFunctionData({ abi: ABI, functionName: "balanceOf", args: [address] });
      const result = await request("eth_call", [{ to: TOKEN, data }, "latest"]);
      return decodeFunctionResult({ abi: ABI, functionName: "balanceOf", data: hex(result) });
    },
    /** The number of the block that holds the transaction. @throws DemoProblem when none does */
    async blockOf(transaction: string): Promise<number> {
      const receipt = await request("eth_getTransactionReceipt", [transaction]);
      return Number(hex(at(receipt, "blockNumber")));
    },
  };
}

export type DemoChain = Awaited<ReturnType<typeof furnishChain>>;

function rpc(url: string): CallNode {
  return async (method, params) => {
    const body = { jsonrpc: "2.0", id: 1, method, params };
    const answer = await ask({ method: "POST", url, body }, AbortSignal.timeout(RPC_MS_MAX));
    if (at(answer.body, "error") !== undefined) {
      throw new DemoProblem(`the chain refused ${method}: ${textAt(answer.body, "error", "message")}`);
    }
    return at(answer.body, "result");
  };
}

function hex(value: unknown): Hex {
  if (typeof value === "string" && /^0x[0-9a-f]*$/i.test(value)) return `0x${value.slice(2)}`;
  throw new DemoProblem("the chain gave another answer than was asked for");
}
