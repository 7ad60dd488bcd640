// Checks the nodes of the chain, each on its own: its chain, its token, the age of its newest block, and whether it agrees with
// the others. Also checks the chain's time against the clock, and the balances of the wallets that pay for gas. Findings name a
// node by its index in TOLLGATE_RPC_URLS, since its URL may hold a key.
import { formatEther, toFunctionSelector } from "viem";
import * as wire from "../../chain/json-rpc.ts";
import type { FacilitatorConfig } from "../../config.ts";
import { systemClock } from "../../core/time.ts";
import { createLocalSigner } from "../../facilitator/wallet/signer.ts";
import type { Outbound } from "../../http/client/outbound.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex } from "../../x402/types.ts";
import type { Finding, Problem } from "./findings.ts";
import { failure, findings, inTime, notChecked, observed, seconds, skewProblem, TooLate, warning } from "./findings.ts";

type Ask = (method: string, params: readonly unknown[]) => Promise<unknown>;

type Node = NodeReport & { readonly ask: Ask };

export function queryNodes(network: Network, urls: readonly string[], outbound: Outbound): Promise<Node[]> {
  return Promise.all(
    urls.map(async (url, index): Promise<Node> => {
      const { certificateProblem, ...watched } = observed(outbound);
      const server = { ...watched, url, timeoutMs: 3_000, answerBytesMax: 1024 * 1024 };
      const ask: Ask = (method, params) => wire.exchange(server, method, params);
      try {
        const answer = await inTime(answerOf(network, ask), 4_500);
        return { network, index, ask, answer, certificate: certificateProblem() };
      } catch (error) {
        return { network, index, ask, answer: reasonOf(error), certificate: null };
      }
    }),
  );
}

/** Text for the finding. Only the messages of these errors are known to hold no URL. */
function reasonOf(error: unknown): string {
  const isSafe = error instanceof wire.NoAnswer || error instanceof wire.RpcError || error instanceof TooLate;
  return isSafe ? error.message : "an answer in another form";
}

async function answerOf(network: Network, ask: Ask): Promise<NodeAnswer> {
  const from = performance.now();
  const chainId = wire.quantity(await ask("eth_chainId", []));
  const ms = performance.now() - from;
  const newest = wire.block(await ask("eth_getBlockByNumber", ["latest", false]));
  if (newest === null) throw new wire.NoAnswer("it has no newest block");
  return { chainId, newest, hasToken: await hasToken(network, ask), ms };
}

/** Whether the node's chain has the token: its domain separator hashes the name, version, chain and address that payers sign. */
async function hasToken({ token }: Network, ask: Ask): Promise<boolean> {
  try {
    const call = { to: token.key, data: toFunctionSelector("DOMAIN_SEPARATOR()") };
    return wire.data(await ask("eth_call", [call, "latest"])) === token.domain;
  } catch (error) {
    // A contract without this function is not a failure of the node.
    if (error instanceof wire.RpcError) return false;
    throw error;
  }
}

export async function nodesFindings(opening: Promise<readonly Node[]>): Promise<Finding[]> {
  const nodes = await opening;
  const block = commonBlock(nodes);
  if (block === null) return nodeFindings(nodes);
  const votes = nodes.filter(isGood).map(async ({ index, ask }) => {
    const found = ask("eth_getBlockByNumber", [wire.hex(block), false]).then(wire.block);
    return { index, hash: (await found.catch(() => null))?.hash ?? null };
  });
  return [...nodeFindings(nodes), ...agreementFindings(block, await Promise.all(votes))];
}

export async function chainClockFindings(opening: Promise<readonly Node[]>): Promise<Finding[]> {
  const time = chainTime(await opening);
  if (time === null) return notChecked("chain clock", "a node");
  const aheadMs = time * 1000 - systemClock.now();
  const advice = "set this clock by NTP, or find out why no node has a newer block";
  const problem = skewProblem("the chain's time", aheadMs, advice);
  return findings("chain clock", [problem], `${seconds(aheadMs)} s from the chain's time`);
}

const BEHIND_BLOCKS = 5;
const BEHIND_SECONDS = 60;
/** A block with fewer than this many blocks after it may still be replaced. */
const SETTLED_BLOCKS = 4;

export interface NodeAnswer {
  readonly chainId: bigint;
  readonly newest: Pick<wire.Block, "number" | "timestamp">;
  readonly hasToken: boolean;
  readonly ms: number;
}

export interface NodeReport {
  readonly network: Network;
  /** The index of its URL in TOLLGATE_RPC_URLS, from 0, as in the log and the metrics. */
  readonly index: number;
  /** What the node has answered, or why there is no usable answer. */
  readonly answer: NodeAnswer | string;
  readonly certificate: Problem | null;
}

const noToken = ({ title, token }: Network) =>
  failure(
    `it does not have ${token.name}, version ${token.version}, at ${token.key}`,
    `it must be a node of ${title}: payments are made in this token`,
  );

const otherChain = (found: bigint, { title, chainId }: Network) =>
  failure(
    `it is on chain ${found}, not ${chainId}`,
    `TOLLGATE_RPC_URLS must name nodes of ${title}: the facilitator does not start with another chain`,
  );

export function nodeFindings(nodes: readonly NodeReport[]): Finding[] {
  const good = goodAnswers(nodes);
  const best = Math.max(...good.map(({ newest }) => newest.number));
  const time = chainTime(nodes) ?? 0;
  return nodes.flatMap(({ network, index, answer, certificate }) => {
    const what = `RPC endpoint ${index}`;
    if (typeof answer === "string") return findings(what, [silent(answer, good.length > 0)], "");
    if (answer.chainId !== BigInt(network.chainId)) return findings(what, [otherChain(answer.chainId, network)], "");
    const fine = `it answers in ${answer.ms.toFixed(0)} ms, its newest block is ${answer.newest.number}`;
    const token = answer.hasToken ? null : noToken(network);
    return findings(what, [token, lagProblem(answer, best, time), certificate], fine);
  });
}

/** Whether the node answers and is on the right chain. */
const isGood = <T extends NodeReport>(node: T): node is T & { readonly answer: NodeAnswer } =>
  typeof node.answer !== "string" && node.answer.chainId === BigInt(node.network.chainId);

const goodAnswers = (nodes: readonly NodeReport[]): NodeAnswer[] => nodes.filter(isGood).map(({ answer }) => answer);

function silent(why: string, othersAnswer: boolean): Problem {
  const text = `it gives no usable answer: ${why}`;
  return othersAnswer
    ? warning(text, "fix it, or remove it from TOLLGATE_RPC_URLS: the others carry on")
    : failure(text, "TOLLGATE_RPC_URLS must name a node that answers: without one no payment is settled");
}

function lagProblem({ newest }: NodeAnswer, best: number, time: number): Problem | null {
  const [blocks, seconds] = [best - newest.number, time - newest.timestamp];
  if (blocks < BEHIND_BLOCKS && seconds < BEHIND_SECONDS) return null;
  const text = `its newest block is ${blocks} blocks behind the best and ${seconds} s old`;
  return warning(text, "find out why it does not follow the chain, or move it to the end of TOLLGATE_RPC_URLS");
}

/** The time of the newest block in Unix seconds; null if no node of the right chain has answered. */
export function chainTime(nodes: readonly NodeReport[]): number | null {
  const times = goodAnswers(nodes).map(({ newest }) => newest.timestamp);
  return times.length === 0 ? null : Math.max(...times);
}

/** The newest block that all nodes should have and that should not change any more; null for fewer than two nodes. */
export function commonBlock(nodes: readonly NodeReport[]): number | null {
  const good = goodAnswers(nodes);
  if (good.length < 2) return null;
  return Math.max(Math.min(...good.map(({ newest }) => newest.number)) - SETTLED_BLOCKS, 0);
}

/** @param votes the hash of the block at each node; null where a node does not have it or does not answer */
export function agreementFindings(block: number, votes: readonly { index: number; hash: Hex | null }[]): Finding[] {
  const known = votes.filter(({ hash }) => hash !== null);
  const hashes = Map.groupBy(known, ({ hash }) => hash);
  const sides = [...hashes.values()].map((same) => same.map(({ index }) => index).join(" and "));
  const problem = failure(
    `the endpoints have different blocks at height ${block}: ${sides.join(" against ")}`,
    "one of them is on another chain or fork: remove it from TOLLGATE_RPC_URLS",
  );
  return findings("agreement", [sides.length > 1 ? problem : null], `all endpoints have the same block ${block}`);
}

export async function walletFindings(
  { network, signers, limits: { gasLowWaterWei } }: Pick<FacilitatorConfig, "network" | "signers" | "limits">,
  opening: Promise<readonly Node[]>,
): Promise<Finding[]> {
  const [node] = (await opening).filter(isGood).sort((a, b) => b.answer.newest.number - a.answer.newest.number);
  if (node === undefined) return notChecked("wallets", "a node");
  const addressOf = (key: Hex) => createLocalSigner(network, key).address;
  const addresses = signers.kind === "local" ? signers.keys.map(addressOf) : [signers.address];
  const balanceOf = (address: Hex) => node.ask("eth_getBalance", [address, "latest"]).then(wire.quantity);
  const balances = await Promise.all(addresses.map(balanceOf));
  const isAnyAble = balances.some((balance) => balance >= gasLowWaterWei);
  return addresses.flatMap((address, index) => {
    const balance = balances[index] ?? 0n;
    const problem = balance >= gasLowWaterWei ? null : lowProblem(network, balance, gasLowWaterWei, isAnyAble);
    return findings(`wallet ${address}`, [problem], `it has ${formatEther(balance)} ETH`);
  });
}

function lowProblem({ title }: Network, balance: bigint, lowWaterWei: bigint, othersAreAble: boolean): Problem {
  const text = `it has ${formatEther(balance)} ETH, less than TOLLGATE_GAS_LOW_WATER_WEI (${formatEther(lowWaterWei)} ETH)`;
  return othersAreAble
    ? warning(text, `send it ETH on ${title}: the other wallets carry on`)
    : failure(text, `send it ETH on ${title}: until then no payment is settled`);
}
