// The demo's chain: where anvil is looked for, how it is started with the real token on it, and what can be read back. It ends
// when the demo ends, even if the demo is killed: a guard process waits for the end of its input, which is the end of the
// demo's process. Token and Multicall3 are the published builds, not imitations of them: fiat-token.json and multicall3.json
// say where they are from.
import { join } from "node:path";
import { decodeFunctionResult, encodeFunctionData, formatUnits, type Hex, maxUint256, parseAbi, toHex } from "viem";
import { StartupProblem } from "../../core/startup.ts";
import { CHAIN_ID, TOKEN, TOKEN_NAME } from "../../x402/kind.ts";
import { ask, at, DemoProblem, textAt } from "./client.ts";
import { library, token } from "./fiat-token.json" with { type: "json" };
import multicall3 from "./multicall3.json" with { type: "json" };

/** As on Base. */
export const BLOCK_SECONDS = 2;
/** Else anvil would keep the state of every block on the disk: 350 KB each (measured). */
const STATES_KEPT = 64;

/** By platform and architecture as Node names them; of each there is a package `@foundry-rs/anvil-…`. */
const PACKAGES: Readonly<Record<string, string>> = {
  "linux-x64": "linux-amd64",
  "linux-arm64": "linux-arm64",
  "darwin-x64": "darwin-amd64",
  "darwin-arm64": "darwin-arm64",
};

export interface Anvil {
  readonly path: string;
  /** In words, for people. */
  readonly found: string;
}

/**
 * Where the operator says, or else on the PATH or among the packages of the working directory.
 *
 * @param configured a path, or the name of a program
 * @throws StartupProblem when it is not there, with how to install it
 */
export function findAnvil(configured: string | null, cwd: string): Anvil {
  if (configured !== null) {
    const path = Bun.which(configured, { cwd });
    if (path === null) throw new StartupProblem("TOLLGATE_ANVIL must name a program that can be run");
    return { path, found: "of TOLLGATE_ANVIL" };
  }
  const onPath = Bun.which("anvil");
  if (onPath !== null) return { path: onPath, found: onPath.includes("node_modules") ? IN_PACKAGES : "on the PATH" };
  const platform = PACKAGES[`${process.platform}-${process.arch}`];
  const name = platform === undefined ? null : `@foundry-rs/anvil-${platform}`;
  const inPackages = name === null ? null : Bun.which(join(cwd, "node_modules", name, "bin", "anvil"));
  if (inPackages !== null) return { path: inPackages, found: IN_PACKAGES };
  const npm = name === null ? "" : `npm install --no-save ${name}, or `;
  throw new StartupProblem(
    `anvil must be installed (${npm}https://getfoundry.sh): it is not at TOLLGATE_ANVIL, on the PATH or in node_modules here`,
  );
}

const IN_PACKAGES = "in node_modules";

type AnvilProcess = Awaited<ReturnType<typeof startAnvil>>;

/** Its arguments are a process and a directory: when the input ends, both go. */
const GUARD = 'read -r _; kill -KILL "$1"; rm -rf "$2"';

/**
 * Starts the chain on a free loopback port; it makes no blocks by itself yet. Neither process is in the terminal's
 * foreground group: Ctrl-C is for the demo, which stops them last.
 *
 * @param home a directory for the files of anvil
 * @param dir removed with the chain should this process be killed
 * @param ended called when it ends without having been stopped
 * @throws DemoProblem when it does not listen; the signal's reason
 */
export async function startAnvil(
  { path }: Anvil,
  { home, dir, ended }: { readonly home: string; readonly dir: string; readonly ended: () => void },
  signal: AbortSignal,
) {
  const options = ["--port", "0", "--chain-id", `${CHAIN_ID}`, "--prune-history", `${STATES_KEPT}`];
  const env = { HOME: home, PATH: "/usr/bin:/bin" };
  const chain = Bun.spawn([path, ...options, "--no-mining", "--color", "never"], {
    cwd: home,
    env,
    stdin: "ignore",
    stdout: "pipe",
    stderr: "ignore",
    detached: true,
  });
  const guard = Bun.spawn(["/bin/sh", "-c", GUARD, "guard", String(chain.pid), dir], {
    env,
    stdin: "pipe",
    stdout: "ignore",
    stderr: "ignore",
    detached: true,
  });
  let isWanted = true;
  const stop = async () => {
    isWanted = false;
    // The guard first: once the chain has ended, its process ID may pass to another process, which must not be killed.
    guard.kill("SIGKILL");
    chain.kill("SIGKILL");
    await Promise.all([guard.exited, chain.exited]);
  };
  const onAbort = () => void stop();
  signal.addEventListener("abort", onAbort);
  const port = await announcedPort(chain.stdout);
  signal.removeEventListener("abort", onAbort);
  if (port === null || signal.aborted) {
    await stop();
    signal.throwIfAborted();
    throw new DemoProblem(`${path} ended before it listened`);
  }
  void chain.exited.then(() => {
    guard.kill("SIGKILL");
    if (isWanted) ended();
  });
  return { url: `http://127.0.0.1:${port}`, stop };
}

/** The port that it says it listens on, or null when it ended before. Its other output is read and dropped. */
async function announcedPort(output: ReadableStream<Uint8Array>): Promise<string | null> {
  const reader = output.getReader();
  const decoder = new TextDecoder();
  let seen = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return null;
    seen = (seen + decoder.decode(value, { stream: true })).slice(-65_536);
    const port = /Listening on 127\.0\.0\.1:(\d+)\n/.exec(seen)?.[1];
    if (port !== undefined) {
      reader.releaseLock();
      void output.pipeTo(new WritableStream());
      return port;
    }
  }
}

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
    const answer = await ask({ method: "POST", url, body }, AbortSignal.timeout(10_000));
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

/** Calls one method of the node, and gives its result or throws its error. */
type CallNode = (method: string, params: readonly unknown[]) => Promise<unknown>;

/** Holds every role of the token: owner, master minter, minter, pauser, blacklister. An impersonated account: no key of it exists. */
const TOKEN_ADMIN: Hex = "0x000000000000000000000000746f6c6c67617465";

/** The token's `DOMAIN_SEPARATOR()` on Base. Equal here means: same name, version, chain and address. */
const BASE_DOMAIN_SEPARATOR = "0x02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f";

const ADMIN_WEI = 10n ** 24n;
const ADMIN_GAS = 500_000n;
const ADMIN_MAX_FEE_WEI = 2n * 10n ** 12n;
/** Almost none: nodes recommend tips by those that they have seen, and this one must not change the recommendation. */
const ADMIN_TIP_WEI = 1n;

const ABI = parseAbi([
  "function initialize(string tokenName, string tokenSymbol, string tokenCurrency, uint8 tokenDecimals, address newMasterMinter, address newPauser, address newBlacklister, address newOwner)",
  "function initializeV2(string newName)",
  "function initializeV2_1(address lostAndFound)",
  "function initializeV2_2(address[] accountsToBlacklist, string newSymbol)",
  "function configureMinter(address minter, uint256 minterAllowedAmount) returns (bool)",
  "function mint(address to, uint256 amount) returns (bool)",
  "function balanceOf(address account) view returns (uint256)",
  "function DOMAIN_SEPARATOR() view returns (bytes32)",
]);

/**
 * Installs the token on a fresh chain and mines a block. The contract keeps nothing outside its storage, so its code
 * and the calls that a proxy's deployment makes are all there is to it. Once more on the same chain changes nothing.
 * @throws Error when the node runs another chain, or when what stands there is not Base's token.
 */
export async function installToken(request: CallNode): Promise<void> {
  if (Number(await request("eth_chainId", [])) !== CHAIN_ID) {
    throw new Error(`the development chain has not the ID ${CHAIN_ID}`);
  }
  await request("anvil_setCode", [library.address, library.code]);
  await request("anvil_setCode", [TOKEN, token.code]);
  await request("anvil_setCode", [multicall3.address, multicall3.code]);
  await request("anvil_impersonateAccount", [TOKEN_ADMIN]);
  await request("anvil_setBalance", [TOKEN_ADMIN, toHex(ADMIN_WEI)]);
  const roles = [TOKEN_ADMIN, TOKEN_ADMIN, TOKEN_ADMIN, TOKEN_ADMIN] as const;
  const calls = [
    encodeFunctionData({
      abi: ABI,
      functionName: "initialize",
      args: [TOKEN_NAME, "USDC", "USD", 6, ...roles],
    }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2", args: [TOKEN_NAME] }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2_1", args: [TOKEN_ADMIN] }),
    encodeFunctionData({ abi: ABI, functionName: "initializeV2_2", args: [[], "USDC"] }),
    encodeFunctionData({ abi: ABI, functionName: "configureMinter", args: [TOKEN_ADMIN, maxUint256] }),
  ];
  for (const data of calls) await callAsAdmin(request, data);
  await request("evm_mine", []);
  const separator = encodeFunctionData({ abi: ABI, functionName: "DOMAIN_SEPARATOR" });
  const found = await request("eth_call", [{ to: TOKEN, data: separator }, "latest"]);
  if (found !== BASE_DOMAIN_SEPARATOR) throw new Error(`the token's domain is not Base's: ${String(found)}`);
}

/** The call by which the admin mints, in smallest units of the token, by the token's own rules. */
export function mintCall(to: Hex, units: bigint): Hex {
  return encodeFunctionData({ abi: ABI, functionName: "mint", args: [to, units] });
}

/**
 * Sends a call of the token by the holder of its roles.
 * @returns the transaction's hash; it is not mined yet
 */
export async function callAsAdmin(request: CallNode, data: Hex, tipWei = ADMIN_TIP_WEI): Promise<Hex> {
  const hash = await request("eth_sendTransaction", [
    {
      from: TOKEN_ADMIN,
      to: TOKEN,
      data,
      // Not estimated: an estimate would run on the state before the calls that still wait.
      gas: toHex(ADMIN_GAS),
      maxPriorityFeePerGas: toHex(tipWei),
      maxFeePerGas: toHex(ADMIN_MAX_FEE_WEI),
    },
  ]);
  if (typeof hash !== "string" || !/^0x[0-9a-f]{64}$/.test(hash)) throw new Error("the node gave no hash");
  return hash as Hex;
}
