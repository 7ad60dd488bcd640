// The chain's nodes, each asked by itself: which chain, which token, how new its newest block is, whether it agrees with the
// others; and the wallets that pay for gas. A node is named by its place in the list, since its URL may hold a key.
// In one file, since the rules judge what the questions found.
import { formatEther, toFunctionSelector } from "viem";
import * as wire from "../../chain/json-rpc.ts";
import { type Block, exchange, NoAnswer, RpcError } from "../../chain/json-rpc.ts";
import type { FacilitatorConfig } from "../../config.ts";
import { systemClock } from "../../core/time.ts";
import { createLocalSigner } from "../../facilitator/wallet/signer.ts";
import type { Outbound } from "../../http/client/outbound.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex } from "../../x402/types.ts";
import {
  type Finding,
  failure,
  findings,
  inTime,
  notLookedAt,
  observed,
  type Problem,
  seconds,
  skewProblem,
  TooLate,
  warning,
} from "./findings.ts";

type Ask = (method: string, params: readonly unknown[]) => Promise<unknown>;

/** A node, and what it says. */
type Node = NodeLook & { readonly ask: Ask };

export function lookAtNodes(network: Network, urls: readonly string[], outbound: Outbound): Promise<Node[]> {
  return Promise.all(
    urls.map(async (url, place): Promise<Node> => {
      const { certificateProblem, ...watched } = observed(outbound);
      const server = { ...watched, url, timeoutMs: 3_000, answerBytesMax: 1024 * 1024 };
      const ask: Ask = (method, params) => exchange(server, method, params);
      try {
        const answer = await inTime(answerOf(network, ask), 4_500);
        return { network, place, ask, answer, certificate: certificateProblem() };
      } catch (error) {
        return { network, place, ask, answer: reasonOf(error), certificate: null };
      }
    }),
  );
}

/** The messages of these errors never hold a URL. */
function reasonOf(error: unknown): string {
  const isTold = error instanceof NoAnswer || error instanceof RpcError || error instanceof TooLate;
  return isTold ? error.message : "an answer in another form";
}

async function answerOf(network: Network, ask: Ask): Promise<NodeAnswer> {
  const from = performance.now();
  const chainId = wire.quantity(await ask("eth_chainId", []));
  const ms = performance.now() - from;
  const newest = wire.block(await ask("eth_getBlockByNumber", ["latest", false]));
  if (newest === null) throw new NoAnswer("it has no newest block");
  return { chainId, newest, hasToken: await hasToken(network, ask), ms };
}

/** Payers sign for this hash of the token's name and version, the chain and the token's address. */
async function hasToken({ token }: Network, ask: Ask): Promise<boolean> {
  try {
    const call = { to: token.key, data: toFunctionSelector("DOMAIN_SEPARATOR()") };
    return wire.data(await ask("eth_call", [call, "latest"])) === token.domain;
  } catch (error) {
    // A contract that does not know the function is no failure of the node.
    if (error instanceof RpcError) return false;
    throw error;
  }
}

export async function nodesFindings(opening: Promise<readonly Node[]>): Promise<Finding[]> {
  const nodes = await opening;
  const block = commonBlock(nodes);
  if (block === null) return nodeFindings(nodes);
  const said = nodes.filter(isGood).map(async ({ place, ask }) => {
    const found = ask("eth_getBlockByNumber", [wire.hex(block), false]).then(wire.block);
    return { place, hash: (await found.catch(() => null))?.hash ?? null };
  });
  return [...nodeFindings(nodes), ...agreementFindings(block, await Promise.all(said))];
}

export async function chainClockFindings(opening: Promise<readonly Node[]>): Promise<Finding[]> {
  const time = chainTime(await opening);
  if (time === null) return notLookedAt("chain clock", "a node");
  const aheadMs = time * 1000 - systemClock.now();
  const advice = "set this clock by NTP, or see why no node has a newer block";
  const problem = skewProblem("the chain's time", aheadMs, advice);
  return findings("chain clock", [problem], `${seconds(aheadMs)} s from the chain's time`);
}

const BEHIND_BLOCKS = 5;
const BEHIND_SECONDS = 60;
/** The newest blocks may still be replaced. */
const SETTLED_BLOCKS = 4;

/** What a node says of itself. */
export interface NodeAnswer {
  readonly chainId: bigint;
  readonly newest: Pick<Block, "number" | "timestamp">;
  readonly hasToken: boolean;
  readonly ms: number;
}

export interface NodeLook {
  readonly network: Network;
  /** Its place in the list, from 0 as in the log and the metrics: the URL may hold a key. */
  readonly place: number;
  /** What the node says, or why there is no usable answer. */
  readonly answer: NodeAnswer | string;
  /** What is wrong with the certificate of the node. */
  readonly certificate: Problem | null;
}

const noToken = ({ title, token }: Network) =>
  failure(
    `it has not ${token.name}, version ${token.version}, at ${token.key}`,
    `it must be a node of ${title}: payments are made in this token`,
  );

const elsewhere = (found: bigint, { title, chainId }: Network) =>
  failure(
    `it is of chain ${found}, not ${chainId}`,
    `TOLLGATE_RPC_URLS must name nodes of ${title}: the facilitator does not start with it`,
  );

export function nodeFindings(nodes: readonly NodeLook[]): Finding[] {
  const good = goodAnswers(nodes);
  const best = Math.max(...good.map(({ newest }) => newest.number));
  const time = chainTime(nodes) ?? 0;
  return nodes.flatMap(({ network, place, answer, certificate }) => {
    const what = `RPC endpoint ${place}`;
    if (typeof answer === "string") return findings(what, [silent(answer, good.length > 0)], "");
    if (answer.chainId !== BigInt(network.chainId)) return findings(what, [elsewhere(answer.chainId, network)], "");
    const fine = `it answers in ${answer.ms.toFixed(0)} ms, its newest block is ${answer.newest.number}`;
    const token = answer.hasToken ? null : noToken(network);
    return findings(what, [token, lagProblem(answer, best, time), certificate], fine);
  });
}

/** Of a node that answers, and of the right chain. */
function isGood<T extends NodeLook>(node: T): node is T & { readonly answer: NodeAnswer } {
  return typeof node.answer !== "string" && node.answer.chainId === BigInt(node.network.chainId);
}

function goodAnswers(nodes: readonly NodeLook[]): NodeAnswer[] {
  return nodes.filter(isGood).map(({ answer }) => answer);
}

function silent(why: string, othersAnswer: boolean): Problem {
  const text = `it gives no usable answer: ${why}`;
  return othersAnswer
    ? warning(text, "see to it, or take it out of TOLLGATE_RPC_URLS: the others carry on")
    : failure(text, "TOLLGATE_RPC_URLS must name a node that answers: without one no payment is settled");
}

function lagProblem({ newest }: NodeAnswer, best: number, time: number): Problem | null {
  const [blocks, seconds] = [best - newest.number, time - newest.timestamp];
  if (blocks < BEHIND_BLOCKS && seconds < BEHIND_SECONDS) return null;
  const text = `its newest block is ${blocks} blocks behind the best and ${seconds} s old`;
  return warning(text, "see why it does not follow the chain, or put it behind the others in TOLLGATE_RPC_URLS");
}

/** Unix seconds, by the newest block; null when no node tells. */
export function chainTime(nodes: readonly NodeLook[]): number | null {
  const times = goodAnswers(nodes).map(({ newest }) => newest.timestamp);
  return times.length === 0 ? null : Math.max(...times);
}

/** The newest block that all of them should have, and that should not change any more; null for fewer than two nodes. */
export function commonBlock(nodes: readonly NodeLook[]): number | null {
  const good = goodAnswers(nodes);
  if (good.length < 2) return null;
  return Math.max(Math.min(...good.map(({ newest }) => newest.number)) - SETTLED_BLOCKS, 0);
}

/** @param said null for a node that does not have the block, or does not tell */
export function agreementFindings(block: number, said: readonly { place: number; hash: Hex | null }[]): Finding[] {
  const told = said.filter(({ hash }) => hash !== null);
  const hashes = Map.groupBy(told, ({ hash }) => hash);
  const sides = [...hashes.values()].map((same) => same.map(({ place }) => place).join(" and "));
  const problem = failure(
    `the endpoints have different blocks at height ${block}: ${sides.join(" against ")}`,
    "one of them is on another chain or fork: take it out of TOLLGATE_RPC_URLS",
  );
  return findings("agreement", [sides.length > 1 ? problem : null], `all endpoints have the same block ${block}`);
}

export async function walletFindings(
  { network, signers, limits: { gasLowWaterWei } }: Pick<FacilitatorConfig, "network" | "signers" | "limits">,
  opening: Promise<readonly Node[]>,
): Promise<Finding[]> {
  const [node] = (await opening).filter(isGood).sort((a, b) => b.answer.newest.number - a.answer.newest.number);
  if (node === undefined) return notLookedAt("wallets", "a node");
  const addresses =
    signers.kind === "local" ? signers.keys.map((key) => createLocalSigner(network, key).address) : [signers.address];
  const balances = await Promise.all(
    addresses.map((address) => node.ask("eth_getBalance", [address, "latest"]).then(wire.quantity)),
  );
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
    : failure(text, `send it ETH on ${title}: no payment is settled before`);
}
