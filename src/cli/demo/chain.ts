// The demo's chain: finds anvil, starts it, installs the real token, and reads balances and receipts. Anvil ends when the demo
// ends, even if the demo is killed: a guard process waits for the end of its input, which comes when the demo's process is
// gone. Token and Multicall3 are the published builds; fiat-token.json and multicall3.json say where they come from.
import { statSync } from "node:fs";
import { join, resolve } from "node:path";
import { encodeFunctionData, type Hex, maxUint256, parseAbi, toHex } from "viem";
import { exchange, hash, receipt, word } from "../../chain/json-rpc.ts";
import { balanceData } from "../../chain/token.ts";
import { fileProblem, writtenPath } from "../../config/values.ts";
import { StartupProblem } from "../../core/startup.ts";
import { createOutbound } from "../../http/client/outbound.ts";
import type { Network } from "../../x402/network.ts";
import { library, token } from "./fiat-token.json" with { type: "json" };
import multicall3 from "./multicall3.json" with { type: "json" };

/** Thrown when the demo can't go on; the message is shown to the reader. */
export class DemoProblem extends Error {
  override readonly name = "DemoProblem";
}

/** Blocks whose state anvil keeps; by default it keeps all of them on disk, at 350 KB each (measured). */
const STATES_KEPT = 64;

/** Finds anvil where the operator says, or else on the PATH or in node_modules. @throws StartupProblem: how to install it */
export function findAnvil(configured: string | null, cwd: string) {
  if (configured !== null) {
    const path = Bun.which(configured, { cwd });
    if (path === null)
      throw new StartupProblem(`TOLLGATE_ANVIL must name an executable program: ${whyNot(configured, cwd)}`);
    return { path, found: "from TOLLGATE_ANVIL" };
  }
  const name = `@foundry-rs/anvil-${process.platform}-${process.arch === "x64" ? "amd64" : process.arch}`;
  const path = Bun.which("anvil") ?? Bun.which(join(cwd, "node_modules", name, "bin", "anvil"));
  if (path !== null) return { path, found: path.includes("node_modules") ? "in node_modules" : "on the PATH" };
  const where = "TOLLGATE_ANVIL is not set, and it is neither on the PATH nor in node_modules here";
  const how = `npm install --no-save ${name}, or https://getfoundry.sh`;
  throw new StartupProblem(`anvil must be installed (${how}): ${where}`);
}

function whyNot(program: string, cwd: string): string {
  if (!program.includes("/")) return "there is none of that name on the PATH";
  try {
    const isFile = statSync(resolve(cwd, program)).isFile();
    return `${writtenPath(program)} is ${isFile ? "not executable" : "not a file"}`;
  } catch (error) {
    return fileProblem(program, error);
  }
}

/** A shell script that, at the end of its input, kills the process and removes the directory that it gets as arguments. */
const GUARD = 'read -r _; kill -KILL "$1"; rm -rf "$2"';

/**
 * Starts anvil on a free loopback port. It mines no blocks yet. Anvil and the guard are not in the terminal's foreground process
 * group, so that Ctrl-C reaches the demo alone, which stops them last.
 * @param dir anvil's own directory, which the guard removes if this process is killed
 * @param opened gets a disposer that stops anvil, even before it listens
 * @returns its URL, and a promise that resolves when anvil has exited
 */
export async function startAnvil(path: string, { chainId }: Network, dir: string, opened: AsyncDisposableStack) {
  const options = ["--port", "0", "--chain-id", `${chainId}`, "--prune-history", `${STATES_KEPT}`];
  const own = { env: { HOME: dir, PATH: "/usr/bin:/bin" }, stderr: "ignore", detached: true } as const;
  const chain = Bun.spawn([path, ...options, "--no-mining", "--color", "never"], { ...own, cwd: dir, stdin: "ignore" });
  const command = ["/bin/sh", "-c", GUARD, "guard", String(chain.pid), dir];
  const guard = Bun.spawn(command, { ...own, stdin: "pipe", stdout: "ignore" });
  void chain.exited.then(() => guard.kill("SIGKILL"));
  opened.defer(async () => {
    // The guard goes first: when anvil has exited, another process may get its ID, and the guard must not kill that one.
    guard.kill("SIGKILL");
    chain.kill("SIGKILL");
    await Promise.all([guard.exited, chain.exited]);
  });
  const port = await announcedPort(chain.stdout);
  if (port === null) throw new DemoProblem(`${path} ended before it listened`);
  return { url: `http://127.0.0.1:${port}`, ended: chain.exited };
}

/** The port that anvil says it listens on; null if it exits before. The rest of its output is read and dropped. */
async function announcedPort(output: ReadableStream<Uint8Array>): Promise<string | null> {
  const reader = output.getReader();
  const decoder = new TextDecoder();
  for (let seen = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return null;
    seen = (seen + decoder.decode(value, { stream: true })).slice(-65_536);
    const port = /Listening on 127\.0\.0\.1:(\d+)\n/.exec(seen)?.[1];
    if (port === undefined) continue;
    reader.releaseLock();
    void output.pipeTo(new WritableStream());
    return port;
  }
}

export type DemoChain = Awaited<ReturnType<typeof furnishChain>>;

/** Installs the token, funds the signer and the payer, and starts mining. @param units the payer's USDC, in smallest units */
export async function furnishChain(network: Network, url: string, signer: Hex, payer: Hex, units: bigint) {
  const outbound = createOutbound({ rules: null, extraCa: null });
  const request: CallNode = (method, params) =>
    exchange({ outbound, url, timeoutMs: 10_000, answerBytesMax: 1024 * 1024 }, method, params);
  await installToken(network, request);
  await request("anvil_setBalance", [signer, toHex(10n ** 18n)]);
  await callAsAdmin(network, request, mintCall(payer, units));
  await request("evm_mine", []);
  await request("evm_setIntervalMining", [network.blockSeconds]);
  return {
    network,
    url,
    async usdcOf(address: Hex): Promise<bigint> {
      return word(await request("eth_call", [{ to: network.token.address, data: balanceData(address) }, "latest"]));
    },
    /** The number of the block that holds the transaction. @throws DemoProblem if no block does */
    async blockOf(transaction: Hex): Promise<number> {
      const found = receipt(await request("eth_getTransactionReceipt", [transaction]));
      if (found === null) throw new DemoProblem(`the chain has no transaction ${transaction}`);
      return found.blockNumber;
    },
  };
}

type CallNode = (method: string, params: readonly unknown[]) => Promise<unknown>;

/** Has every role of the token: owner, master minter, minter, pauser, blacklister. Anvil impersonates it; it has no key. */
const TOKEN_ADMIN: Hex = "0x000000000000000000000000746f6c6c67617465";

/** So small that it does not raise the tip that the node recommends, which follows the tips that it has seen. */
const ADMIN_TIP_WEI = 1n;

const ABI = parseAbi([
  "function initialize(string tokenName, string tokenSymbol, string tokenCurrency, uint8 tokenDecimals, address newMasterMinter, address newPauser, address newBlacklister, address newOwner)",
  "function initializeV2(string newName)",
  "function initializeV2_1(address lostAndFound)",
  "function initializeV2_2(address[] accountsToBlacklist, string newSymbol)",
  "function configureMinter(address minter, uint256 minterAllowedAmount) returns (bool)",
  "function mint(address to, uint256 amount) returns (bool)",
  "function DOMAIN_SEPARATOR() view returns (bytes32)",
]);

/**
 * Installs the token on a fresh chain and mines a block: sets the contract's code, then makes the calls that its deployment
 * behind a proxy makes. A second run changes nothing.
 * @throws Error when the node runs another chain, or when the installed token differs from the network's
 */
export async function installToken(network: Network, request: CallNode): Promise<void> {
  const { chainId, token: own } = network;
  if (Number(await request("eth_chainId", [])) !== chainId) {
    throw new Error(`the development chain must have the ID ${chainId}`);
  }
  await request("anvil_setCode", [library.address, library.code]);
  await request("anvil_setCode", [own.address, token.code]);
  await request("anvil_setCode", [multicall3.address, multicall3.code]);
  await request("anvil_impersonateAccount", [TOKEN_ADMIN]);
  await request("anvil_setBalance", [TOKEN_ADMIN, toHex(10n ** 24n)]);
  const named = [own.name, own.symbol] as const;
  const roles = [TOKEN_ADMIN, TOKEN_ADMIN, TOKEN_ADMIN, TOKEN_ADMIN] as const;
  const calls = [
    encodeFunctionData({ abi: ABI, functionName: "initialize", args: [...named, "USD", own.decimals, ...roles] }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2", args: [own.name] }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2_1", args: [TOKEN_ADMIN] }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2_2", args: [[], own.symbol] }),
    encodeFunctionData({ abi: ABI, functionName: "configureMinter", args: [TOKEN_ADMIN, maxUint256] }),
  ];
  for (const data of calls) await callAsAdmin(network, request, data);
  await request("evm_mine", []);
  const separator = encodeFunctionData({ abi: ABI, functionName: "DOMAIN_SEPARATOR" });
  const found = await request("eth_call", [{ to: own.address, data: separator }, "latest"]);
  // The separator hashes the token's name, version, chain and address.
  if (found !== own.domain) throw new Error(`the token's domain is not ${network.title}'s: ${String(found)}`);
}

/** The data of a call that mints tokens, in smallest units; for `callAsAdmin`. */
export const mintCall = (to: Hex, units: bigint): Hex =>
  encodeFunctionData({ abi: ABI, functionName: "mint", args: [to, units] });

/** Sends a call of the token from its admin. @returns the hash of the transaction, which is not mined yet */
export async function callAsAdmin({ token }: Network, request: CallNode, data: Hex, tipWei = ADMIN_TIP_WEI) {
  const transaction = {
    from: TOKEN_ADMIN,
    to: token.address,
    data,
    // Not estimated, since an estimate ignores the earlier calls that are not mined yet.
    gas: toHex(500_000),
    maxPriorityFeePerGas: toHex(tipWei),
    maxFeePerGas: toHex(2n * 10n ** 12n),
  };
  return hash(await request("eth_sendTransaction", [transaction]));
}
