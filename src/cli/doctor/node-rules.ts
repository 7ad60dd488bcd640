// What is judged good of the chain's nodes, from what each of them has said. Pure.
import type { Block } from "../../chain/rpc-types.ts";
import { CHAIN_ID, TOKEN_NAME, TOKEN_VERSION } from "../../x402/kind.ts";
import type { Hex } from "../../x402/types.ts";
import { type Finding, failure, findings, type Problem, warning } from "./finding.ts";

const BEHIND_BLOCKS = 5;
const BEHIND_SECONDS = 60;
/** Of the token. */
const DECIMALS = 6;
/** The newest blocks may still be replaced. */
const SETTLED_BLOCKS = 4;

export interface Token {
  readonly hasCode: boolean;
  /** Null where there is no such answer. */
  readonly name: string | null;
  readonly version: string | null;
  readonly decimals: number | null;
}

/** What a node says of itself. */
export interface NodeAnswer {
  readonly chainId: bigint;
  readonly newest: Pick<Block, "number" | "timestamp">;
  /** Unix seconds: the time that the next block would have; null where it does not tell. */
  readonly next: number | null;
  readonly token: Token;
  readonly ms: number;
}

export interface NodeLook {
  /** In the list, from 0 as in the log and the metrics: the URL may hold a key. */
  readonly place: number;
  /** Or why there is no usable answer. */
  readonly answer: NodeAnswer | string;
  /** What is wrong with its certificate. */
  readonly certificate: Problem | null;
}

const ELSEWHERE = "TOLLGATE_RPC_URLS must name nodes of Base: the facilitator does not start with it";

export function nodeFindings(nodes: readonly NodeLook[]): Finding[] {
  const good = goodAnswers(nodes);
  const best = Math.max(...good.map(({ newest }) => newest.number));
  const time = chainTime(nodes) ?? 0;
  return nodes.flatMap(({ place, answer, certificate }) => {
    const what = `RPC endpoint ${place}`;
    if (typeof answer === "string") return findings(what, [silent(answer, good.length > 0)], "");
    if (answer.chainId !== BigInt(CHAIN_ID)) {
      return findings(what, [failure(`it is of chain ${answer.chainId}, not ${CHAIN_ID}`, ELSEWHERE)], "");
    }
    const { number } = answer.newest;
    const fine = `it answers in ${answer.ms.toFixed(0)} ms, its newest block is ${number}`;
    return findings(what, [tokenProblem(answer.token), lagProblem(answer, best, time), certificate], fine);
  });
}

export function goodAnswers(nodes: readonly NodeLook[]): NodeAnswer[] {
  return nodes.flatMap(({ answer }) =>
    typeof answer !== "string" && answer.chainId === BigInt(CHAIN_ID) ? [answer] : [],
  );
}

function silent(why: string, othersAnswer: boolean): Problem {
  const text = `it gives no usable answer: ${why}`;
  return othersAnswer
    ? warning(text, "see to it, or take it out of TOLLGATE_RPC_URLS: the others carry on")
    : failure(text, "TOLLGATE_RPC_URLS must name a node that answers: without one no payment is settled");
}

function tokenProblem({ hasCode, name, version, decimals }: Token): Problem | null {
  if (hasCode && name === TOKEN_NAME && version === TOKEN_VERSION && decimals === DECIMALS) return null;
  const text = hasCode
    ? `its token is ${name ?? "without a name"}, version ${version ?? "none"}, with ${decimals ?? "no"} decimals`
    : "there is no token at its address";
  return failure(text, `it must be a node of Base, where ${TOKEN_NAME} has version ${TOKEN_VERSION}`);
}

function lagProblem({ newest }: NodeAnswer, best: number, time: number): Problem | null {
  const [blocks, seconds] = [best - newest.number, time - newest.timestamp];
  if (blocks < BEHIND_BLOCKS && seconds < BEHIND_SECONDS) return null;
  const text = `its newest block is ${blocks} blocks behind the best and ${seconds} s old`;
  return warning(text, "see why it does not follow the chain, or put it behind the others in TOLLGATE_RPC_URLS");
}

/** Unix seconds, by the newest block or by what the next one would have; null when no node tells. */
export function chainTime(nodes: readonly NodeLook[]): number | null {
  const times = goodAnswers(nodes).map(({ newest, next }) => Math.max(newest.timestamp, next ?? 0));
  return times.length === 0 ? null : Math.max(...times);
}

/** The newest block that all of them should have, and that should not change any more; null for fewer than two nodes. */
export function commonBlock(nodes: readonly NodeLook[]): number | null {
  const good = goodAnswers(nodes);
  if (good.length < 2) return null;
  return Math.max(Math.min(...good.map(({ newest }) => newest.number)) - SETTLED_BLOCKS, 0);
}

export interface BlockSaid {
  readonly place: number;
  /** Null when it does not have the block, or does not tell. */
  readonly hash: Hex | null;
}

export function agreementFindings(block: number, said: readonly BlockSaid[]): Finding[] {
  const hashes = Map.groupBy(
    said.filter(({ hash }) => hash !== null),
    ({ hash }) => hash,
  );
  const sides = [...hashes.values()].map((same) => same.map(({ place }) => place).join(" and "));
  const problem = failure(
    `the endpoints have different blocks at height ${block}: ${sides.join(" against ")}`,
    "one of them is on another chain or fork: take it out of TOLLGATE_RPC_URLS",
  );
  return findings("agreement", [sides.length > 1 ? problem : null], `all endpoints have the same block ${block}`);
}
