// A JSON-RPC client with failover over the chain's nodes: each request goes to the first working endpoint, and to the next
// when there is no usable answer. An endpoint that failed is used again only after a test in the background, so that a dead
// one costs its timeout once and not on each request.
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { inSpan, type Tracer } from "../core/tracing.ts";
import type { Outbound } from "../http/client/outbound.ts";
import { createSlots } from "../kernel/share.ts";
import type { Network } from "../x402/network.ts";
import { type Block, block, exchange, hex, NoAnswer, quantity, RpcError } from "./json-rpc.ts";

export type Rpc = ReturnType<typeof createRpc>;
/** All nodes with failover, or a single one. */
export type NodeClient = Pick<Rpc, "ask" | "network">;

export interface RpcOptions {
  readonly network: Network;
  /** Tried in order. */
  readonly urls: readonly string[];
  /** Without the host rules for tenants, since the operator chose the nodes. */
  readonly outbound: Outbound;
  readonly log: Log;
  /** Called for each failed request, with the endpoint's position in `urls`. */
  readonly onError?: (endpoint: number) => void;
  readonly timeoutMs?: number;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
}

/** What the endpoints asked so far have answered. */
interface FailoverProgress<T> {
  behind: StaleNode | null;
  last: unknown;
  /** The first answer that a node which is behind would give too. */
  doubted: EndpointAnswer<T> | null;
}

/** An endpoint's answer: a value, or an error about the question itself. */
interface EndpointAnswer<T> {
  readonly answer: T | RpcError;
}

/** The newest block of a node. */
export interface Head {
  readonly endpoint: Endpoint;
  readonly block: Block;
}

export function createRpc(options: RpcOptions) {
  const { network } = options;
  const endpoints = options.urls.map((url, index) => createEndpoint(url, index, options));

  let isContradicted = false;
  let isBlockUnknown = false;

  /** The working endpoints. Others that are due are tested in the background, if there is a working one. */
  function workingEndpoints(): Endpoint[] {
    const working = endpoints.filter((each) => each.state() === "good");
    if (working.length > 0) for (const each of endpoints) if (each.isTestDue()) void each.test();
    return working;
  }

  return {
    network,
    /** @throws RpcError as the answer; StaleNode when all that answer are behind; Fault `unavailable` when no answer is usable */
    async ask<T>(question: Question<T>): Promise<T> {
      const progress: FailoverProgress<T> = { behind: null, last: undefined, doubted: null };
      const working = workingEndpoints();
      const certain = await askInTurn(working, question, progress);
      if (certain !== null && progress.doubted !== null) isContradicted = true;
      const first = certain ?? progress.doubted;
      if (first !== null) return unwrapAnswer(first);
      // If an endpoint answers, even with an error about itself, there is no reason to wait for those that are down.
      const isAnswered = progress.last instanceof RpcError || progress.behind !== null;
      const others = endpoints.filter((each) => !working.includes(each) && !(isAnswered && each.state() === "down"));
      const second = (await askInTurn(others, question, progress)) ?? progress.doubted;
      if (second !== null) return unwrapAnswer(second);
      if (question.at !== undefined) isBlockUnknown = true;
      throw progress.behind ?? unreachable(progress.last);
    },
    /** Since the last call: whether one endpoint knew less than another, and whether none answered for some block. */
    doubts() {
      const were = { isContradicted, isBlockUnknown };
      isContradicted = false;
      isBlockUnknown = false;
      return were;
    },
    /** The newest blocks of all working endpoints; if none works, all that are down are tested first. */
    async heads(): Promise<Head[]> {
      const isAnyGood = workingEndpoints().length > 0;
      const found = await Promise.all(
        endpoints.map(async (endpoint) => {
          const state = endpoint.state();
          if (state === "untested" || (state === "down" && !isAnyGood)) await endpoint.test();
          if (endpoint.state() !== "good") return [];
          const block = await endpoint.ask(NEWEST).catch(() => null);
          return block === null ? [] : [{ endpoint, block }];
        }),
      );
      return found.flat();
    },
    /** Asks every working endpoint and returns the first value in their order; throws only when none gives a value. */
    async askAll<T>(question: Question<T>): Promise<T> {
      const working = workingEndpoints();
      if (working.length === 0) return this.ask(question);
      const answers = await Promise.allSettled(working.map((endpoint) => endpoint.ask(question)));
      for (const answer of answers) if (answer.status === "fulfilled") return answer.value;
      const errors = answers.map((answer) => (answer.status === "rejected" ? answer.reason : undefined));
      throw errors.find((error) => isAnswer(question, error)) ?? unreachable(errors[0]);
    },
    /** Checks the chain ID of all endpoints that answer; the others are checked before their first use. @throws StartupProblem */
    async check(): Promise<void> {
      await Promise.all(endpoints.map((each) => each.test()));
      const wrongChain = endpoints.find((each) => each.state() === "wrongChain");
      if (wrongChain === undefined) return;
      const found = `endpoint ${wrongChain.index} (counted from 0) is not of chain ${network.chainId} (${network.title})`;
      throw new StartupProblem(`TOLLGATE_RPC_URLS: ${found}`);
    },
  };
}

const isAnswer = <T>(question: Question<T>, error: unknown): error is RpcError =>
  error instanceof RpcError && question.isAnswer?.(error) === true;

/** @throws the error that is the answer */
function unwrapAnswer<T>({ answer }: EndpointAnswer<T>): T {
  if (answer instanceof RpcError) throw answer;
  return answer;
}

/** Null when no endpoint gives a certain answer; `progress` tells why. An endpoint not known to work is tested first. */
async function askInTurn<T>(
  endpoints: readonly Endpoint[],
  question: Question<T>,
  progress: FailoverProgress<T>,
): Promise<EndpointAnswer<T> | null> {
  for (const endpoint of endpoints) {
    const state = endpoint.state();
    if (state === "wrongChain" || (state !== "good" && !(await endpoint.test()))) continue;
    try {
      const answer = await endpoint.ask(question).catch((error: unknown) => {
        if (isAnswer(question, error)) return error;
        throw error;
      });
      if (question.isDoubtful?.(answer) !== true) return { answer };
      progress.doubted ??= { answer };
    } catch (error) {
      if (error instanceof StaleNode) progress.behind = error;
      progress.last = error;
    }
  }
  return null;
}

/** The cause is the last endpoint's failure, without its URL. */
function unreachable(last: unknown): Fault {
  return new Fault("unavailable", "rpc unreachable", {
    retryAfterSeconds: 5,
    cause: last === undefined ? undefined : new Error(messageOf(last)),
  });
}

/** Requests in flight to one node. The timeout begins when a request is sent, so waiting for a slot makes no node look slow. */
const REQUESTS_PER_NODE = 32;

/** The endpoint is behind what is known of the chain. Another one is asked, and this endpoint stays in use. */
export class StaleNode extends Error {
  override readonly name = "StaleNode";
}

export interface Question<T> {
  readonly method: string;
  readonly params: readonly unknown[];
  /** The block whose state is queried: the last parameter of the request. */
  readonly at?: Pick<Block, "number" | "hash">;
  /** Reads the result strictly. An error means that the answer is unusable; StaleNode leaves the endpoint in use. */
  readonly read: (result: unknown) => T;
  /** Whether an error is an answer to the question, and not a failure of the node. */
  readonly isAnswer?: (error: RpcError) => boolean;
  /** Whether a node that is behind would give this answer too: then all working endpoints are asked. Left out: never. */
  readonly isDoubtful?: (answer: T | RpcError) => boolean;
}

/** `wrongChain`: the endpoint serves another chain and is never asked again. */
type EndpointState = "untested" | "good" | "down" | "wrongChain";

type Endpoint = ReturnType<typeof createEndpoint>;

/** One node: its state, its backoff, its requests in flight. Errors and the log name a node by its position, not its URL. */
function createEndpoint(url: string, index: number, options: RpcOptions) {
  const { network, outbound, log, onError, timeoutMs = 3000, tracer = null } = options;
  const server = { outbound, url, timeoutMs, answerBytesMax: 4 * 1024 * 1024 };
  const inSlot = createSlots(REQUESTS_PER_NODE);
  let state: EndpointState = "untested";
  /** Consecutive failures, tests aside: the exponent of the backoff. */
  let failures = 0;
  let testAt = 0;
  let testing: Promise<boolean> | null = null;
  /** What the endpoint's newest block must satisfy before the endpoint is used again; null: no condition. */
  let fits: ((newest: Block) => boolean) | null = null;
  /** Whether the node accepts a block's hash in place of its number (EIP-1898). */
  let takesHashes = true;

  function setDown(method: string, error: unknown): void {
    // Requests that were in flight together fail together, which counts as one failure.
    if (state !== "down") failures++;
    // Exponential backoff: the next test is after one second, then after twice as long each time, up to half a minute.
    testAt = performance.now() + Math.min(1000 * 2 ** (failures - 1), 30_000);
    const fields = { endpoint: index, method, error: messageOf(error) };
    log[state === "down" ? "debug" : "warn"]("rpc_endpoint_failed", fields);
    state = "down";
    if (method === NEWEST.method) fits ??= () => true;
  }

  const request = <T>(question: Question<T>): Promise<T> => inSlot("", () => requestNow(question));

  async function requestNow<T>({ method, params, read, isAnswer }: Question<T>): Promise<T> {
    const fields = { rpcMethod: method, rpcEndpoint: index };
    const ask = () => exchange(server, method, params);
    try {
      return read(await inSpan(tracer, { kind: "client", name: method, fields }, ask));
    } catch (error) {
      if (error instanceof RpcError && isAnswer?.(error)) throw error;
      onError?.(index);
      if (error instanceof RpcError || error instanceof StaleNode) {
        log.debug("rpc_endpoint_failed", { endpoint: index, method, error: error.message });
      } else setDown(method, error);
      throw error;
    }
  }

  /** Queries by the block's hash. A node that refuses hashes is queried by number, and must have that very block there. */
  async function requestAt<T>(question: Question<T>, at: Pick<Block, "number" | "hash">): Promise<T> {
    const { params } = question;
    try {
      if (takesHashes) return await request({ ...question, params: [...params, { blockHash: at.hash }] });
    } catch (error) {
      if (!(error instanceof RpcError) || !rejectsForm(error)) throw error;
    }
    const number = hex(at.number);
    const value = await request({ ...question, params: [...params, number] });
    const there = await request({ method: "eth_getBlockByNumber", params: [number, false], read: block });
    if (there?.hash !== at.hash) throw new StaleNode("another block at this height");
    if (takesHashes) log.info("rpc_endpoint_without_block_hashes", { endpoint: index });
    takesHashes = false;
    return value;
  }

  async function runTest(): Promise<boolean> {
    try {
      const chainId = await request({ method: "eth_chainId", params: [], read: quantity });
      if (chainId === BigInt(network.chainId)) {
        if (fits !== null) await requestAt(ANY_STATE, requireFitting(fits, await request(NEWEST)));
        fits = null;
        if (state === "down") log.info("rpc_endpoint_recovered", { endpoint: index });
        state = "good";
        return true;
      }
      state = "wrongChain";
      log.error("rpc_endpoint_wrong_chain", { endpoint: index, chain_id: `${chainId}` });
    } catch (error) {
      setDown("eth_chainId", error);
    }
    return false;
  }

  return {
    network,
    index,
    state: (): EndpointState => state,
    /** Whether a test is due: not tested yet, or down and past its backoff. */
    isTestDue: (): boolean => state === "untested" || (state === "down" && performance.now() >= testAt),
    /** Takes the endpoint out of use, like one that is down, until its newest block satisfies the condition. */
    putAside(condition: (newest: Block) => boolean, why: string): void {
      fits = condition;
      setDown(NEWEST.method, new StaleNode(why));
    },
    /** Whether the endpoint answers, for our chain. Concurrent callers share one test. */
    test(): Promise<boolean> {
      testing ??= runTest().finally(() => {
        testing = null;
      });
      return testing;
    },
    /** @throws RpcError, NoAnswer, StaleNode, or what the question's `read` throws */
    async ask<T>(question: Question<T>): Promise<T> {
      const { at } = question;
      const value = await (at === undefined ? request(question) : requestAt(question, at));
      failures = 0;
      return value;
    },
  };
}

export const NEWEST: Question<Block> = {
  method: "eth_getBlockByNumber",
  params: ["latest", false],
  read(result) {
    const newest = block(result);
    if (newest === null) throw new TypeError("no newest block");
    return newest;
  },
};

function requireFitting(fits: (newest: Block) => boolean, newest: Block): Block {
  if (!fits(newest)) throw new StaleNode("behind the others, or ahead of them");
  return newest;
}

/** A state query that any node answers at a block that it has. */
export const ANY_STATE = { method: "eth_getBalance", params: [`0x${"0".repeat(40)}`], read: quantity };

/** Whether the node rejects the form of the request. A node that lacks the block reports another error. */
function rejectsForm({ code, message }: RpcError): boolean {
  // Invalid params, invalid request.
  if (code === -32_602 || code === -32_600) return true;
  return /invalid (argument|parameter|params|type|block)|unmarshal|deserializ|hex string/i.test(message);
}

function messageOf(error: unknown): string {
  return error instanceof NoAnswer || error instanceof RpcError || error instanceof StaleNode
    ? error.message
    : "an answer in another form";
}
