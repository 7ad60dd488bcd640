// The chain's nodes behind one door: each question goes to the first endpoint that works, and on to the next when
// there is no usable answer. An endpoint that failed is left aside until it has been tested again in the
// background, so that a dead one costs its time limit once and not on each question.
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { inSpan, type Tracer } from "../core/tracing.ts";
import type { Outbound } from "../http/client/outbound.ts";
import { createSlots } from "../kernel/share.ts";
import type { Network } from "../x402/network.ts";
import { type Block, block, exchange, hex, NoAnswer, quantity, RpcError } from "./json-rpc.ts";

export type Rpc = ReturnType<typeof createRpc>;
/** All nodes behind one door, or one of them. */
export type NodeDoor = Pick<Rpc, "ask" | "network">;

export interface RpcOptions {
  readonly network: Network;
  /** Tried in order. */
  readonly urls: readonly string[];
  /** Without the rule about addresses, since the operator chose the nodes. */
  readonly outbound: Outbound;
  readonly log: Log;
  /** Each failed question, by the endpoint's place in the list. */
  readonly onError?: (endpoint: number) => void;
  readonly timeoutMs?: number;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
}

/** What the endpoints that were asked so far have said. */
interface Asking<T> {
  behind: StaleNode | null;
  last: unknown;
  /** What a node that knows less would say too. */
  doubted: EndpointAnswer<T> | null;
}

/** What an endpoint has answered: a value, or an error about the question. */
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

  /** The endpoints that work. The others are tested in the background. */
  function good(): Endpoint[] {
    const working = endpoints.filter((each) => each.state() === "good");
    if (working.length > 0) for (const each of endpoints) if (each.isTestDue()) void each.test();
    return working;
  }

  return {
    network,
    /**
     * @throws RpcError when that is the answer; StaleNode when the endpoints that answer are all behind; Fault
     * `unavailable` when none gives a usable answer
     */
    async ask<T>(question: Question<T>): Promise<T> {
      const progress: Asking<T> = { behind: null, last: undefined, doubted: null };
      const working = good();
      const certain = await askInTurn(working, question, progress);
      if (certain !== null && progress.doubted !== null) isContradicted = true;
      const first = certain ?? progress.doubted;
      if (first !== null) return given(first);
      // If one answers, even with an error about itself, there is no reason to wait for those that are down.
      const isAnswered = progress.last instanceof RpcError || progress.behind !== null;
      const others = endpoints.filter((each) => !working.includes(each) && !(isAnswered && each.state() === "down"));
      const second = (await askInTurn(others, question, progress)) ?? progress.doubted;
      if (second !== null) return given(second);
      if (question.at !== undefined) isBlockUnknown = true;
      throw progress.behind ?? unreachable(progress.last);
    },
    /** Whether an endpoint knew less than another, or none answered for some block, since this was asked last. */
    doubts() {
      const were = { isContradicted, isBlockUnknown };
      isContradicted = false;
      isBlockUnknown = false;
      return were;
    },
    /** The newest blocks of all endpoints that work; if none does, they are tested first. */
    async heads(): Promise<Head[]> {
      const isAnyGood = good().length > 0;
      const found = await Promise.all(
        endpoints.map(async (endpoint) => {
          const state = endpoint.state();
          if (state === "untested" || (state === "down" && !isAnyGood)) await endpoint.test();
          if (endpoint.state() !== "good") return [];
          return endpoint.ask(NEWEST).then(
            (block) => [{ endpoint, block }],
            () => [],
          );
        }),
      );
      return found.flat();
    },
    /** Asks every endpoint that works: the first answer of any, errors only when there is nothing else. */
    async askAll<T>(question: Question<T>): Promise<T> {
      const working = good();
      if (working.length === 0) return this.ask(question);
      const answers = await Promise.allSettled(working.map((endpoint) => endpoint.ask(question)));
      for (const answer of answers) if (answer.status === "fulfilled") return answer.value;
      const errors = answers.map((answer) => (answer.status === "rejected" ? answer.reason : undefined));
      throw errors.find((error) => isAnswer(question, error)) ?? unreachable(errors[0]);
    },
    /** Compares the chain IDs of all endpoints that answer; another one is compared before its first use. @throws StartupProblem */
    async check(): Promise<void> {
      await Promise.all(endpoints.map((each) => each.test()));
      const wrongChain = endpoints.find((each) => each.state() === "wrongChain");
      if (wrongChain === undefined) return;
      throw new StartupProblem(
        `TOLLGATE_RPC_URLS: endpoint ${wrongChain.index} (counted from 0) is not of chain ${network.chainId} (${network.title})`,
      );
    },
  };
}

function isAnswer<T>(question: Question<T>, error: unknown): error is RpcError {
  return error instanceof RpcError && question.isAnswer?.(error) === true;
}

/** @throws the error that is the answer */
function given<T>({ answer }: EndpointAnswer<T>): T {
  if (answer instanceof RpcError) throw answer;
  return answer;
}

/**
 * Null when there is no answer that can be believed; `progress` then tells why. An endpoint not known to work is tested
 * first.
 */
async function askInTurn<T>(
  endpoints: readonly Endpoint[],
  question: Question<T>,
  progress: Asking<T>,
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

/** The cause says what the last endpoint did, without its URL. */
function unreachable(last: unknown): Fault {
  return new Fault("unavailable", "rpc unreachable", {
    retryAfterSeconds: 5,
    cause: last === undefined ? undefined : new Error(messageOf(last)),
  });
}

/** To one node, which leaves an eighth free. The time limit begins when a question is sent, so waiting makes no node look slow. */
const QUESTIONS_PARALLEL = 32;

/** The endpoint says something of the chain that we know better. Another one is asked, and this one stays in use. */
export class StaleNode extends Error {
  override readonly name = "StaleNode";
}

export interface Question<T> {
  readonly method: string;
  readonly params: readonly unknown[];
  /** The block whose state is asked for: it goes last among the parameters. */
  readonly at?: Pick<Block, "number" | "hash">;
  /** Reads the result strictly. An error means that the answer can't be used; StaleNode leaves the endpoint in use. */
  readonly read: (result: unknown) => T;
  /** Whether an error says something about the question, and not about the node. */
  readonly isAnswer?: (error: RpcError) => boolean;
  /** Whether a node that knows less would answer so: then all that work are asked. Left out: none would. */
  readonly isDoubtful?: (answer: T | RpcError) => boolean;
}

/** `wrongChain`: of another chain, never asked again. */
type EndpointState = "untested" | "good" | "down" | "wrongChain";

type Endpoint = ReturnType<typeof createEndpoint>;

/**
 * One node: whether it works and is of our chain, and a bound on questions to it at a time. Errors and log name it by its
 * place in the list, never by its URL.
 */
function createEndpoint(url: string, index: number, options: RpcOptions) {
  const { network, outbound, log, onError, timeoutMs = 3000, tracer = null } = options;
  const server = { outbound, url, timeoutMs, answerBytesMax: 4 * 1024 * 1024 };
  const inSlot = createSlots(QUESTIONS_PARALLEL);
  let state: EndpointState = "untested";
  /** In a row, tests aside. */
  let failures = 0;
  let testAt = 0;
  let testing: Promise<boolean> | null = null;
  /** What its newest block must be like before it is used; null: none was amiss. */
  let fits: ((newest: Block) => boolean) | null = null;
  /** Whether a block's hash may stand where its number does (EIP-1898). */
  let takesHashes = true;

  function setDown(method: string, error: unknown): void {
    // Questions that were under way together fail together, which counts as one failure.
    if (state !== "down") failures++;
    // An endpoint that failed is tested again after a second, then after twice as long, up to half a minute.
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

  /** By the hash of the block; by its number where hashes are refused, and then only if that block is there. */
  async function requestAt<T>(question: Question<T>, at: Pick<Block, "number" | "hash">): Promise<T> {
    const { params } = question;
    try {
      if (takesHashes) return await request({ ...question, params: [...params, { blockHash: at.hash }] });
    } catch (error) {
      if (!(error instanceof RpcError) || !isAboutForm(error)) throw error;
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
        if (fits !== null) await requestAt(ANY_STATE, fitting(fits, await request(NEWEST)));
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
    /** Down for long enough to be tested again, or not tested yet. */
    isTestDue: (): boolean => state === "untested" || (state === "down" && performance.now() >= testAt),
    /** As if it were down, until its newest block fits those of the others. */
    putAside(condition: (newest: Block) => boolean, why: string): void {
      fits = condition;
      setDown(NEWEST.method, new StaleNode(why));
    },
    /** Whether it answers and is of our chain. Those who ask at the same time share one test. */
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

function fitting(fits: (newest: Block) => boolean, newest: Block): Block {
  if (!fits(newest)) throw new StaleNode("behind the others, or ahead of them");
  return newest;
}

/** What any node tells at the end of a block that it has. */
export const ANY_STATE = { method: "eth_getBalance", params: [`0x${"0".repeat(40)}`], read: quantity };

/** A node that does not know the block words its error differently. */
function isAboutForm({ code, message }: RpcError): boolean {
  // Invalid params, invalid request.
  if (code === -32_602 || code === -32_600) return true;
  return /invalid (argument|parameter|params|type|block)|unmarshal|deserializ|hex string/i.test(message);
}

function messageOf(error: unknown): string {
  return error instanceof NoAnswer || error instanceof RpcError || error instanceof StaleNode
    ? error.message
    : "an answer in another form";
}
