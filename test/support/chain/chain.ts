// A real chain for tests: anvil with Base's chain ID and Circle's own USDC at its Base address, on a free loopback
// port. A watchdog holds the process: when the test process goes, in whatever way, the chain goes too.

import { mkdtempSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import {
  type Address,
  createPublicClient,
  createWalletClient,
  encodeFunctionData,
  type Hex,
  http,
  type LocalAccount,
  type PublicClient,
  parseAbi,
  parseEventLogs,
  parseSignature,
  type SignedAuthorizationList,
  type TransactionReceipt,
  toHex,
} from "viem";
import { generatePrivateKey, type PrivateKeyAccount, privateKeyToAccount } from "viem/accounts";
import { base } from "viem/chains";
import { callAsAdmin, installToken, mintCall } from "../../../src/cli/demo/chain.ts";
import { BASE } from "../network.ts";
import { temporaryPlace } from "../temporary.ts";
import { until } from "../until.ts";
import type { SignedPayment } from "./payments.ts";

const ANVIL = fileURLToPath(import.meta.resolve("@foundry-rs/anvil-linux-amd64/bin/anvil"));
const START_MS_MAX = 20_000;
/** About what a block of Base takes, so that blocks never fill up in tests. */
const BLOCK_GAS = 200_000_000;

/** More than anybody in a test pays for a place in a block. */
const FIRST_TIP_WEI = 10n ** 12n;
const LEAST_TIP_WEI = 1n;

/** Runs the chain and waits for the end of its own input, which is the end of the test process. */
const WATCHDOG = `
trap '' INT TERM HUP
home=$1; shift
"$@" </dev/null &
chain=$!
exec >/dev/null 2>&1
cat >/dev/null
kill -KILL $chain
wait $chain
rm -rf "$home"
`;

const ABI = parseAbi([
  "function balanceOf(address account) view returns (uint256)",
  "function authorizationState(address authorizer, bytes32 nonce) view returns (bool)",
  "function transferWithAuthorization(address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce, bytes signature)",
  "function cancelAuthorization(address authorizer, bytes32 nonce, uint8 v, bytes32 r, bytes32 s)",
  "function blacklist(address account)",
  "function unBlacklist(address account)",
  "function pause()",
  "function unpause()",
  "event Transfer(address indexed from, address indexed to, uint256 value)",
  "event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce)",
]);

/** Where the code stands that `delegate` delegates to, and the code: it ends at once. */
const DELEGATE = "0x0000000000000000000000000000000000007702";
const STOP = "0x00";

interface Call {
  readonly to: Address;
  readonly data?: Hex;
  readonly authorizationList?: SignedAuthorizationList;
}

/** One `Transfer` event, with the nonce of the `AuthorizationUsed` event before it. */
export interface Transfer {
  /** Addresses and other hex in lower case. */
  readonly from: Hex;
  readonly to: Hex;
  readonly value: bigint;
  /** Null when no authorization moved the money, as for what was minted. */
  readonly nonce: Hex | null;
  readonly transaction_hash: Hex;
  readonly block_number: number;
  readonly block_hash: Hex;
}

export type TestChain = Awaited<ReturnType<typeof startChain>>;

/**
 * Where each transaction makes a block, anvil 1.7.1 sometimes never mines one, nor those that follow it: the previous one of
 * the account was mined while anvil took this one in (1 of 100 runs of a test that sends 40 at once, on a busy machine). No
 * block comes then, and a wallet counts blocks before it replaces a transaction. So a test that sends many of one account at
 * once and does not pause mining needs blocks that come by time, as on a real chain.
 *
 * @param options.blockTimeSeconds makes a block every so many seconds; without it, each transaction makes one
 */
export async function startChain(options: { blockTimeSeconds?: number } = {}) {
  const { url, home, stop } = await launch();
  const client = createPublicClient({
    chain: base,
    transport: http(url, { retryCount: 0 }),
    pollingInterval: 20,
    cacheTime: 0,
  });
  const rpc = (method: string, params: readonly unknown[] = []): Promise<unknown> =>
    client.request({ method, params } as never);
  let paused = true;
  const token: Address = BASE.token.address;

  let seconds: number | undefined;
  const resumeMining = async (blockTimeSeconds = options.blockTimeSeconds) => {
    seconds = blockTimeSeconds;
    if (seconds === undefined) await rpc("evm_setAutomine", [true]);
    else await rpc("evm_setIntervalMining", [seconds]);
    paused = false;
  };
  const mine = async (blocks = 1) => {
    await rpc("anvil_mine", [toHex(blocks)]);
  };
  /**
   * When it is mined. viem's own wait misses a block that comes while it looks at the block before (2.57.1), and where each
   * transaction makes a block no other may come.
   */
  const receiptOf = async (hash: Hex): Promise<TransactionReceipt> => {
    let receipt: TransactionReceipt | undefined;
    await until(async () => {
      receipt = await client.getTransactionReceipt({ hash }).catch(() => undefined);
      return receipt !== undefined;
    });
    return receipt as TransactionReceipt;
  };
  /** Waits until it is mined, unless mining is paused: then it waits for the next block, ahead of all others. */
  const mined = async (hash: Hex) => {
    if (paused) return;
    if (seconds !== undefined) await mine();
    const receipt = await receiptOf(hash);
    if (receipt.status !== "success") throw new Error(`the chain reverted ${hash}`);
  };
  /** Moves the node's recommendations, so it is high only where something waits that has to be overtaken. */
  const tip = () => (paused ? FIRST_TIP_WEI : LEAST_TIP_WEI);
  /** Sends it from an account that nobody knows, and gives its hash. */
  const asStranger = async (transaction: Call) => {
    const account = privateKeyToAccount(generatePrivateKey());
    await rpc("anvil_setBalance", [account.address, toHex(10n ** 24n)]);
    const wallet = createWalletClient({ account, chain: base, transport: http(url) });
    const fees = { maxPriorityFeePerGas: tip(), maxFeePerGas: 2n * FIRST_TIP_WEI };
    const hash = await wallet.sendTransaction({ ...transaction, ...fees, gas: 300_000n, nonce: 0 });
    await mined(hash);
    return hash;
  };
  let sending: Promise<unknown> = Promise.resolve();
  /** One is sent after the other, since the node would give two that come at once one nonce. They are mined together. */
  const asAdmin = async (data: Hex) => {
    const sent = sending.then(() => callAsAdmin(BASE, rpc, data, tip()));
    sending = sent.catch(() => {});
    await mined(await sent);
  };

  try {
    await installToken(BASE, rpc);
    await resumeMining();
  } catch (error) {
    await stop();
    throw error;
  }

  return {
    url,
    token,
    client,
    rpc,
    /** The process's directory: it is gone when the process is. */
    home,
    stop,
    mine,
    receiptOf,
    /** @param blockTimeSeconds as `startChain` has it */
    resumeMining,
    /** No more blocks but those that `mine` makes: transactions wait in the pool. */
    async pauseMining() {
      if (seconds !== undefined) await rpc("evm_setIntervalMining", [0]);
      await rpc("evm_setAutomine", [false]);
      paused = true;
    },
    blockNumber: async () => Number(await client.getBlockNumber()),
    /**
     * Makes a block for each such part of the account's next transactions that has been sent, while mining is paused: a
     * busy machine sends little in the time of a block.
     */
    async mineBySent(address: Address, transactions: number, blocks: number): Promise<void> {
      const count = (blockTag: "latest" | "pending") => client.getTransactionCount({ address, blockTag });
      const before = await count("latest");
      for (let block = 1; block <= blocks; block++) {
        await until(async () => (await count("pending")) >= before + (block * transactions) / blocks);
        await mine();
      }
    },
    /** Sets the balance at once, without a block. */
    async fundEth(address: Address, wei: bigint) {
      await rpc("anvil_setBalance", [address, toHex(wei)]);
    },
    /** Mints that many more smallest units. */
    fundUsdc: (address: Address, units: bigint) => asAdmin(mintCall(address, units)),
    usdcOf: (address: Address) =>
      client.readContract({ address: BASE.token.address, abi: ABI, functionName: "balanceOf", args: [address] }),
    authorizationUsed: (payer: Address, nonce: Hex) =>
      client.readContract({
        address: BASE.token.address,
        abi: ABI,
        functionName: "authorizationState",
        args: [payer, nonce],
      }),
    blacklist: (address: Address) =>
      asAdmin(encodeFunctionData({ abi: ABI, functionName: "blacklist", args: [address] })),
    unblacklist: (address: Address) =>
      asAdmin(encodeFunctionData({ abi: ABI, functionName: "unBlacklist", args: [address] })),
    pauseToken: () => asAdmin(encodeFunctionData({ abi: ABI, functionName: "pause" })),
    unpauseToken: () => asAdmin(encodeFunctionData({ abi: ABI, functionName: "unpause" })),
    async cancelAuthorization(account: LocalAccount, nonce: Hex) {
      const { r, s, yParity } = parseSignature(
        await account.signTypedData({
          domain: {
            name: BASE.token.name,
            version: BASE.token.version,
            chainId: BASE.chainId,
            verifyingContract: BASE.token.address,
          },
          types: {
            CancelAuthorization: [
              { name: "authorizer", type: "address" },
              { name: "nonce", type: "bytes32" },
            ],
          },
          primaryType: "CancelAuthorization",
          message: { authorizer: account.address, nonce },
        }),
      );
      const args = [account.address, nonce, 27 + yParity, r, s] as const;
      await asAdmin(encodeFunctionData({ abi: ABI, functionName: "cancelAuthorization", args }));
    },
    /**
     * Gives the account code by EIP-7702, in a transaction of its own: from then on the token asks that code about
     * signatures and takes the plain one no more. The code here answers nothing.
     */
    async delegate(account: PrivateKeyAccount) {
      await rpc("anvil_setCode", [DELEGATE, STOP]);
      const nonce = await client.getTransactionCount({ address: account.address, blockTag: "pending" });
      const authorization = await account.signAuthorization({ address: DELEGATE, chainId: BASE.chainId, nonce });
      await asStranger({ to: DELEGATE, authorizationList: [authorization] });
    },
    /** Collects a payment as anyone may who has seen it, and gives the transaction's hash. */
    collectAsStranger: ({ authorization: said, signature }: Pick<SignedPayment, "authorization" | "signature">) => {
      const [value, after, before] = [BigInt(said.value), BigInt(said.validAfter), BigInt(said.validBefore)];
      const args = [said.from, said.to, value, after, before, said.nonce, signature] as const;
      const data = encodeFunctionData({ abi: ABI, functionName: "transferWithAuthorization", args });
      return asStranger({ to: BASE.token.address, data });
    },
    /** Puts a contract wallet (ERC-1271) somewhere, which takes what `owner` signed, and gives its address. */
    async contractWallet(owner: Address): Promise<Address> {
      const { address } = privateKeyToAccount(generatePrivateKey());
      await rpc("anvil_setCode", [address, contractWalletCode(owner)]);
      return address;
    },
    /** The same for any signature at all, as long as this holds: EVM code that leaves 1 or 0. */
    async contractWalletIf(condition: string): Promise<Address> {
      const { address } = privateKeyToAccount(generatePrivateKey());
      const answer = `7f1626ba7e${"00".repeat(28)}0260005260206000f3`;
      await rpc("anvil_setCode", [address, `0x${condition}${answer}`]);
      return address;
    },
    /** Holds for the next block; from there it falls by an eighth with each empty block, as fees do. */
    async setBaseFee(wei: bigint) {
      await rpc("anvil_setNextBlockBaseFeePerGas", [toHex(wei)]);
    },
    /**
     * Replaces the newest blocks by as many new ones. What was in them is gone, and in no pool either, but for the
     * transactions in `keep`, which the last of the new blocks includes. What was set without a block since the
     * oldest of the replaced blocks (by `fundEth`, `contractWallet`) is gone too, so set it and `mine` first.
     */
    async reorg(depth: number, keep: readonly Hex[] = []) {
      const raw = await Promise.all(keep.map((hash) => rpc("eth_getRawTransactionByHash", [hash])));
      await rpc("anvil_reorg", [depth, raw.map((transaction) => [transaction, depth - 1])]);
    },
    async transfers(filter: { from?: Address; to?: Address; nonce?: Hex } = {}): Promise<Transfer[]> {
      return (await allTransfers(client)).filter(
        (each) =>
          (filter.from === undefined || each.from === filter.from.toLowerCase()) &&
          (filter.to === undefined || each.to === filter.to.toLowerCase()) &&
          (filter.nonce === undefined || each.nonce === filter.nonce.toLowerCase()),
      );
    },
  };
}

/** Starts the process and waits until it listens. The chain makes no blocks by itself yet. */
async function launch(): Promise<{ url: string; home: string; stop(): Promise<void> }> {
  // Its home is a directory of its own, for it would otherwise keep states under the user's.
  const home = mkdtempSync(join(temporaryPlace(), "tollgate-chain-"));
  const options = ["--port", "0", "--chain-id", `${BASE.chainId}`, "--gas-limit", `${BLOCK_GAS}`];
  const command = [ANVIL, ...options, "--no-mining", "--color", "never"];
  const watchdog = Bun.spawn(["sh", "-c", WATCHDOG, "anvil", home, ...command], {
    cwd: home,
    env: { HOME: home, PATH: "/usr/bin:/bin" },
    stdin: "pipe",
    stdout: "pipe",
    stderr: "ignore",
  });
  watchdog.unref();
  const stop = async () => {
    watchdog.stdin.end();
    await watchdog.exited;
  };
  const timer = setTimeout(() => watchdog.stdin.end(), START_MS_MAX);
  const port = await announcedPort(watchdog.stdout).finally(() => clearTimeout(timer));
  if (port !== null) return { url: `http://127.0.0.1:${port}`, home, stop };
  await stop();
  throw new Error("anvil did not start");
}

/** The port that it says it listens on, or null when it ended before. Its other output is read and dropped. */
async function announcedPort(output: ReadableStream<Uint8Array>): Promise<number | null> {
  const reader = output.getReader();
  const decoder = new TextDecoder();
  let seen = "";
  let port: string | undefined;
  while (port === undefined) {
    const { value, done } = await reader.read();
    if (done) return null;
    seen += decoder.decode(value, { stream: true });
    port = /Listening on 127\.0\.0\.1:(\d+)\n/.exec(seen)?.[1];
  }
  void (async () => {
    while (!(await reader.read()).done);
  })();
  return Number(port);
}

async function allTransfers(client: Pick<PublicClient, "getLogs">): Promise<Transfer[]> {
  const logs = await client.getLogs({ address: BASE.token.address, fromBlock: 0n, toBlock: "latest" });
  const events = parseEventLogs({ abi: ABI, logs });
  return events.flatMap((event, index) => {
    if (event.eventName !== "Transfer") return [];
    // The token notes the nonce right before it moves the money.
    const before = events[index - 1];
    const own = before?.eventName === "AuthorizationUsed" && before.transactionHash === event.transactionHash;
    return {
      from: lower(event.args.from),
      to: lower(event.args.to),
      value: event.args.value,
      nonce: own ? before.args.nonce : null,
      transaction_hash: event.transactionHash,
      block_number: Number(event.blockNumber),
      block_hash: event.blockHash,
    };
  });
}

function lower(address: Address): Hex {
  return `0x${address.slice(2).toLowerCase()}`;
}

/**
 * The code of a wallet with one owner and one function, `isValidSignature(bytes32 hash, bytes signature)`. It takes
 * the first 65 bytes (r, s, v) as the owner's plain signature and ignores the rest, so that longer ones are valid too.
 */
function contractWalletCode(owner: Address): Hex {
  const parts = [
    // memory = hash, v, r, s: the call data at 4, 0xa4 (its first byte), 0x64 and 0x84.
    "600435600052" + "60a43560f81c602052" + "606435604052" + "608435606052",
    // ecrecover is the contract at 1; its answer replaces the hash, and when it finds nobody, the hash stays.
    "602060006080600060015afa50",
    // answer = the selector of the function when that is the owner, else zero.
    `60005173${owner.slice(2).toLowerCase()}14` + `7f1626ba7e${"00".repeat(28)}02600052`,
    "60206000f3",
  ];
  return `0x${parts.join("")}`;
}
