// The demo's chain: where anvil is looked for, how it is started with the real token on it, and what can be read back. It ends
// when the demo ends, even if the demo is killed: a guard process waits for the end of its input, which is the end of the
// demo's process. Token and Multicall3 are the published builds, not imitations of them: fiat-token.json and multicall3.json
// say where they are from.
import { join } from "node:path";
import { encodeFunctionData, formatUnits, type Hex, maxUint256, parseAbi, toHex } from "viem";
import { exchange, hash, receipt, word } from "../../chain/json-rpc.ts";
import { balanceData } from "../../chain/token.ts";
import { StartupProblem } from "../../core/startup.ts";
import { createOutbound } from "../../http/client/outbound.ts";
import type { Network } from "../../x402/network.ts";
import { DemoProblem } from "./client.ts";
import { library, token } from "./fiat-token.json" with { type: "json" };
import multicall3 from "./multicall3.json" with { type: "json" };

/** Else anvil would keep the state of every block on the disk: 350 KB each (measured). */
const STATES_KEPT = 64;

/**
 * Where the operator says, or else on the PATH or among the packages of the working directory.
 *
 * @param configured a path, or the name of a program
 * @returns where it is, as a path and in words
 * @throws StartupProblem when it is not there, with how to install it
 */
export function findAnvil(configured: string | null, cwd: string) {
  if (configured !== null) {
    const path = Bun.which(configured, { cwd });
    if (path === null) throw new StartupProblem("TOLLGATE_ANVIL must name a program that can be run");
    return { path, found: "of TOLLGATE_ANVIL" };
  }
  const name = `@foundry-rs/anvil-${process.platform}-${process.arch === "x64" ? "amd64" : process.arch}`;
  const path = Bun.which("anvil") ?? Bun.which(join(cwd, "node_modules", name, "bin", "anvil"));
  if (path !== null) return { path, found: path.includes("node_modules") ? "in node_modules" : "on the PATH" };
  throw new StartupProblem(
    `anvil must be installed (npm install --no-save ${name}, or https://getfoundry.sh): it is not at TOLLGATE_ANVIL, on the PATH or in node_modules here`,
  );
}

/** Its arguments are a process and a directory: when the input ends, both go. */
const GUARD = 'read -r _; kill -KILL "$1"; rm -rf "$2"';

/**
 * Starts the chain on a free loopback port; it makes no blocks by itself yet. Neither process is in the terminal's
 * foreground group: Ctrl-C is for the demo, which stops them last.
 *
 * @param dir its own directory, removed with the chain should this process be killed
 * @param opened stops the chain, also one that has not begun to listen
 * @returns its URL, and the promise that it has ended
 */
export async function startAnvil(path: string, { chainId }: Network, dir: string, opened: AsyncDisposableStack) {
  const options = ["--port", "0", "--chain-id", `${chainId}`, "--prune-history", `${STATES_KEPT}`];
  const own = { env: { HOME: dir, PATH: "/usr/bin:/bin" }, stderr: "ignore", detached: true } as const;
  const chain = Bun.spawn([path, ...options, "--no-mining", "--color", "never"], { ...own, cwd: dir, stdin: "ignore" });
  const guard = Bun.spawn(["/bin/sh", "-c", GUARD, "guard", String(chain.pid), dir], {
    ...own,
    stdin: "pipe",
    stdout: "ignore",
  });
  void chain.exited.then(() => guard.kill("SIGKILL"));
  opened.defer(async () => {
    // The guard first: once the chain has ended, its process ID may pass to another process, which must not be killed.
    guard.kill("SIGKILL");
    chain.kill("SIGKILL");
    await Promise.all([guard.exited, chain.exited]);
  });
  const port = await announcedPort(chain.stdout);
  if (port === null) throw new DemoProblem(`${path} ended before it listened`);
  return { url: `http://127.0.0.1:${port}`, ended: chain.exited };
}

/** The port that it says it listens on, or null when it ended before. Its other output is read and dropped. */
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

/** Smallest units as USDC, exactly. */
export function usdc(units: bigint): string {
  return formatUnits(units, 6);
}

export type DemoChain = Awaited<ReturnType<typeof furnishChain>>;

/**
 * Puts the token on the chain, gives one account the gas and one the money, and begins to make blocks.
 *
 * @param units smallest units of the token
 */
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
    /** Smallest units. */
    async usdcOf(address: Hex): Promise<bigint> {
      return word(await request("eth_call", [{ to: network.token.address, data: balanceData(address) }, "latest"]));
    },
    /** The number of the block that holds the transaction. @throws DemoProblem when none does */
    async blockOf(transaction: Hex): Promise<number> {
      const found = receipt(await request("eth_getTransactionReceipt", [transaction]));
      if (found === null) throw new DemoProblem(`the chain has no transaction ${transaction}`);
      return found.blockNumber;
    },
  };
}

/** Calls one method of the node, and gives its result or throws its error. */
type CallNode = (method: string, params: readonly unknown[]) => Promise<unknown>;

/** Holds every role of the token: owner, master minter, minter, pauser, blacklister. An impersonated account: no key of it exists. */
const TOKEN_ADMIN: Hex = "0x000000000000000000000000746f6c6c67617465";

/** Almost none: nodes recommend tips by those that they have seen, and this one must not change the recommendation. */
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
 * Installs the token on a fresh chain and mines a block. The contract keeps nothing outside its storage, so its code
 * and the calls that a proxy's deployment makes are all there is to it. Once more on the same chain changes nothing.
 * @throws Error when the node runs another chain, or when what stands there is not its token.
 */
export async function installToken(network: Network, request: CallNode): Promise<void> {
  const { chainId, token: own } = network;
  if (Number(await request("eth_chainId", [])) !== chainId) {
    throw new Error(`the development chain has not the ID ${chainId}`);
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
  // Equal means: same name, version, chain and address.
  if (found !== own.domain) throw new Error(`the token's domain is not ${network.title}'s: ${String(found)}`);
}

/** The call by which the admin mints, in smallest units of the token, by the token's own rules. */
export function mintCall(to: Hex, units: bigint): Hex {
  return encodeFunctionData({ abi: ABI, functionName: "mint", args: [to, units] });
}

/**
 * Sends a call of the token by the holder of its roles.
 * @returns the transaction's hash; it is not mined yet
 */
export async function callAsAdmin(
  { token }: Network,
  request: CallNode,
  data: Hex,
  tipWei = ADMIN_TIP_WEI,
): Promise<Hex> {
  const transaction = {
    from: TOKEN_ADMIN,
    to: token.address,
    data,
    // Not estimated: an estimate would run on the state before the calls that still wait.
    gas: toHex(500_000),
    maxPriorityFeePerGas: toHex(tipWei),
    maxFeePerGas: toHex(2n * 10n ** 12n),
  };
  return hash(await request("eth_sendTransaction", [transaction]));
}
