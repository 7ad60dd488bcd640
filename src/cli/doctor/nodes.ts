// The chain's nodes, each asked by itself: which chain, which token, how new its newest block is, and whether it agrees with
// the others. A node is named by its place in the list.
import { decodeFunctionResult, encodeFunctionData, parseAbi } from "viem";
import { exchange, NoAnswer, RpcError } from "../../chain/json-rpc.ts";
import { isMulticall3, MULTICALL3, MULTICALL3_CHECKSUMMED } from "../../chain/multicall.ts";
import * as wire from "../../chain/rpc-types.ts";
import { TOKEN_ADDRESS } from "../../chain/token.ts";
import { systemClock } from "../../core/clock.ts";
import type { Outbound } from "../../http/outbound.ts";
import type { Hex } from "../../x402/types.ts";
import { seconds } from "./database.ts";
import { type Finding, failure, findings, type Problem, warning } from "./finding.ts";
import {
  agreementFindings,
  chainTime,
  commonBlock,
  goodAnswers,
  type NodeAnswer,
  type NodeLook,
  nodeFindings,
  type Token,
} from "./node-rules.ts";
import { observed } from "./observed.ts";
import { skewProblem } from "./rules.ts";
import { inTime, TooLate } from "./run.ts";

const TIMEOUT_MS = 3_000;
/** For all that one is asked at first. */
const NODE_MS_MAX = 4_500;
const ANSWER_BYTES_MAX = 1024 * 1024;

const ABI = parseAbi([
  "function name() view returns (string)",
  "function version() view returns (string)",
  "function decimals() view returns (uint8)",
]);

export interface Node {
  readonly place: number;
  ask<T>(method: string, params: readonly unknown[], read: (result: unknown) => T): Promise<T>;
  certificateProblem(): Problem | null;
}

export interface Nodes {
  readonly looks: readonly NodeLook[];
  /** Of the right chain, the one with the newest block first. */
  readonly good: readonly Node[];
}

export async function lookAtNodes(urls: readonly string[], outbound: Outbound): Promise<Nodes> {
  const nodes = urls.map((url, index) => openNode(url, index, outbound));
  const looks = await Promise.all(nodes.map(lookAtNode));
  const heightOf = (node: Node) => {
    const { answer } = looks[node.place] ?? { answer: "" };
    return typeof answer === "string" || !goodAnswers(looks).includes(answer) ? -1 : answer.newest.number;
  };
  const good = nodes.filter((node) => heightOf(node) >= 0).sort((a, b) => heightOf(b) - heightOf(a));
  return { looks, good };
}

function openNode(url: string, place: number, outbound: Outbound): Node {
  const { certificateProblem, ...watched } = observed(outbound);
  const server = { outbound: watched.outbound, url, timeoutMs: TIMEOUT_MS, answerBytesMax: ANSWER_BYTES_MAX };
  return {
    place,
    ask: async (method, params, read) => read(await exchange(server, method, params)),
    certificateProblem,
  };
}

async function lookAtNode(node: Node): Promise<NodeLook> {
  const { place } = node;
  try {
    const answer = await inTime(answerOf(node), NODE_MS_MAX);
    return { place, answer, certificate: node.certificateProblem() };
  } catch (error) {
    return { place, answer: reasonOf(error), certificate: null };
  }
}

/** These errors never hold a URL. */
export function reasonOf(error: unknown): string {
  const isTold = error instanceof NoAnswer || error instanceof RpcError || error instanceof TooLate;
  return isTold ? error.message : "an answer in another form";
}

async function answerOf(node: Node): Promise<NodeAnswer> {
  const from = performance.now();
  const chainId = await node.ask("eth_chainId", [], wire.quantity);
  const ms = performance.now() - from;
  const [newest, next, token] = await Promise.all([
    node.ask("eth_getBlockByNumber", ["latest", false], wire.block),
    node.ask("eth_getBlockByNumber", ["pending", false], wire.timestamp).catch(() => null),
    tokenOf(node),
  ]);
  if (newest === null) throw new NoAnswer("it has no newest block");
  return { chainId, newest, next, token, ms };
}

async function tokenOf(node: Node): Promise<Token> {
  const code = await node.ask("eth_getCode", [TOKEN_ADDRESS, "latest"], wire.data);
  if (code === "0x") return { hasCode: false, name: null, version: null, decimals: null };
  const call = async <T>(functionName: "name" | "version" | "decimals") => {
    const data = encodeFunctionData({ abi: ABI, functionName });
    const result = await node.ask("eth_call", [{ to: TOKEN_ADDRESS, data }, "latest"], wire.data).catch(revertedOnly);
    return decoded<T>(functionName, result);
  };
  const [name, version, decimals] = await Promise.all([
    call<string>("name"),
    call<string>("version"),
    call<number>("decimals"),
  ]);
  return { hasCode: true, name, version, decimals };
}

/** A contract that does not know the function is no failure of the node. */
function revertedOnly(error: unknown): Hex {
  if (error instanceof RpcError) return "0x";
  throw error;
}

function decoded<T>(functionName: "name" | "version" | "decimals", data: Hex): T | null {
  try {
    return decodeFunctionResult({ abi: ABI, functionName, data }) as T;
  } catch {
    return null;
  }
}

export async function nodesFindings(opening: Promise<Nodes>, batch: number): Promise<Finding[]> {
  const nodes = await opening;
  const [agreement, multicall] = await Promise.all([
    agreementOf(nodes),
    batch > 1 ? multicallFindings(nodes) : Promise.resolve([]),
  ]);
  return [...nodeFindings(nodes.looks), ...agreement, ...multicall];
}

async function agreementOf({ looks, good }: Nodes): Promise<Finding[]> {
  const block = commonBlock(looks);
  if (block === null) return [];
  const said = await Promise.all(
    good.map(async (node) => {
      const found = node.ask("eth_getBlockByNumber", [wire.hex(block), false], wire.block).catch(() => null);
      return { place: node.place, hash: (await found)?.hash ?? null };
    }),
  );
  return agreementFindings(
    block,
    said.toSorted((a, b) => a.place - b.place),
  );
}

async function multicallFindings({ good: [node] }: Nodes): Promise<Finding[]> {
  if (node === undefined) return [];
  const isThere = isMulticall3(await node.ask("eth_getCode", [MULTICALL3, "latest"], wire.data));
  const problem = failure(`there is no Multicall3 at ${MULTICALL3_CHECKSUMMED}`, "TOLLGATE_BATCH must be 0");
  return findings("Multicall3", [isThere ? null : problem], `it stands at ${MULTICALL3_CHECKSUMMED}`);
}

export async function chainClockFindings(opening: Promise<Nodes>): Promise<Finding[]> {
  const time = chainTime((await opening).looks);
  const problem =
    time === null
      ? warning("not looked at without a node", "mend that first")
      : skewProblem(
          "the chain's time",
          time * 1000 - systemClock.now(),
          "set this clock by NTP, or see why no node has a newer block",
        );
  return findings(
    "chain clock",
    [problem],
    `${seconds((time ?? 0) * 1000 - systemClock.now())} s from the chain's time`,
  );
}
