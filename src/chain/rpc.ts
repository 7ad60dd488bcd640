// The chain's nodes behind one door: each question goes to the first endpoint that works, and on to the next when
// there is no usable answer. An endpoint that failed is left aside until it has been tested again in the
// background, so that a dead one costs its time limit once and not on each question.
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import type { Tracer } from "../core/tracing.ts";
import type { Outbound } from "../http/client/outbound.ts";
import { CHAIN_ID } from "../x402/kind.ts";
import { createEndpoint, type Endpoint, messageOf, NEWEST, type Question, StaleNode } from "./endpoint.ts";
import { RpcError } from "./json-rpc.ts";
import type { Block } from "./rpc-types.ts";

const TIMEOUT_MS = 3000;
const RETRY_AFTER_SECONDS = 5;

export type Rpc = ReturnType<typeof createRpc>;

export interface RpcOptions {
  /** Tried in order. */
  readonly urls: readonly string[];
  /** Without the rule about addresses, since the operator chose the nodes. */
  readonly outbound: Outbound;
  readonly log: Log;
  /** Each failed question to an endpoint, by its place in the list. */
  readonly onError?: (endpoint: number) => void;
  readonly timeoutMs?: number;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
}

/** What the endpoints that were asked so far have said. */
interface Progress<T> {
  behind: StaleNode | null;
  last: unknown;
  /** What a node that knows less would say too. */
  doubted: Answer<T> | null;
}

/** What an endpoint has answered: `give` gives its value, or throws the error that is its answer. */
interface Answer<T> {
  give(): T;
  readonly isDoubtful: boolean;
}

/** The newest block of a node. */
export interface Head {
  readonly endpoint: Endpoint;
  readonly block: Block;
}

export function createRpc({ urls, outbound, log, onError, timeoutMs = TIMEOUT_MS, tracer = null }: RpcOptions) {
  const endpoints = urls.map((url, index) =>
    createEndpoint({ index, url, outbound, log, onError: () => onError?.(index), timeoutMs, tracer }),
  );

  let isContradicted = false;

  /** The endpoints that work. The others are tested in the background. */
  function good(): Endpoint[] {
    const working = endpoints.filter((each) => each.state() === "good");
    if (working.length > 0) for (const each of endpoints) if (each.isTestDue()) void each.test();
    return working;
  }

  return {
    /**
     * @throws RpcError when that is the answer; StaleNode when the endpoints that answer are all behind; Fault
     * `unavailable` when none gives a usable answer
     */
    async ask<T>(question: Question<T>): Promise<T> {
      const progress: Progress<T> = { behind: null, last: undefined, doubted: null };
      const working = good();
      const certain = await askInTurn(working, question, progress);
      if (certain !== null && progress.doubted !== null) isContradicted = true;
      const first = certain ?? progress.doubted;
      if (first !== null) return first.give();
      // If one answers, even with an error about itself, there is no reason to wait for those that are down.
      const isAnswered = progress.last instanceof RpcError || progress.behind !== null;
      const others = endpoints.filter((each) => !working.includes(each) && !(isAnswered && each.state() === "down"));
      const second = (await askInTurn(others, question, progress)) ?? progress.doubted;
      if (second !== null) return second.give();
      throw progress.behind ?? unreachable(progress.last);
    },
    /** Whether an endpoint knew less than another, since this was asked last. */
    wasContradicted(): boolean {
      const was = isContradicted;
      isContradicted = false;
      return was;
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
    /**
     * Compares the chain IDs of all endpoints that answer. One that can't be reached now is compared before its first
     * use.
     *
     * @throws StartupProblem
     */
    async check(): Promise<void> {
      await Promise.all(endpoints.map((each) => each.test()));
      const wrongChain = endpoints.find((each) => each.state() === "wrongChain");
      if (wrongChain === undefined) return;
      throw new StartupProblem(
        `TOLLGATE_RPC_URLS: endpoint ${wrongChain.index} (counted from 0) is not of chain ${CHAIN_ID} (Base)`,
      );
    },
  };
}

function isAnswer<T>(question: Question<T>, error: unknown): error is RpcError {
  return error instanceof RpcError && question.isAnswer?.(error) === true;
}

/** @throws what is no answer */
async function answerOf<T>(endpoint: Endpoint, question: Question<T>): Promise<Answer<T>> {
  try {
    const value = await endpoint.ask(question);
    return { give: () => value, isDoubtful: question.isDoubtful?.(value) === true };
  } catch (error) {
    if (!isAnswer(question, error)) throw error;
    const give = () => {
      throw error;
    };
    return { give, isDoubtful: question.isDoubtful?.(error) === true };
  }
}

/**
 * Null when there is no answer that can be believed; `progress` then tells why. An endpoint not known to work is tested
 * first.
 */
async function askInTurn<T>(
  endpoints: readonly Endpoint[],
  question: Question<T>,
  progress: Progress<T>,
): Promise<Answer<T> | null> {
  for (const endpoint of endpoints) {
    const state = endpoint.state();
    if (state === "wrongChain" || (state !== "good" && !(await endpoint.test()))) continue;
    try {
      const answer = await answerOf(endpoint, question);
      if (!answer.isDoubtful) return answer;
      progress.doubted ??= answer;
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
    retryAfterSeconds: RETRY_AFTER_SECONDS,
    cause: last === undefined ? undefined : new Error(messageOf(last)),
  });
}
