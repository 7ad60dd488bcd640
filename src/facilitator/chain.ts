// What the facilitator asks of the chain, in the words of the chain. Absence is only ever read at the hash of a
// block, so that a node which lies behind can't be taken for proof that something did not happen.
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import type { Outbound } from "../edge/outbound.ts";
import type { Authorization, Hex } from "../x402/types.ts";
import { Behind, type Question } from "./endpoint.ts";
import { RpcError } from "./json-rpc.ts";
import { createRpc, type Rpc } from "./rpc.ts";
import * as token from "./token.ts";
import * as wire from "./wire.ts";

/** More than any transfer costs; what a contract wallet's signature check may burn is bounded by it. */
const GAS_MAX = 500_000n;
/** A payee may have spent all it has since the estimate: 17,100 gas more. */
const GAS_RESERVE = 20_000n;
/** Blocks of one eth_getLogs question, first as most nodes take it and then as the strictest do. */
const LOG_BLOCKS_MAX = 1000;
const LOG_BLOCKS_FEW = 10;
/** Of one search. */
const LOG_QUESTIONS_MAX = 10;
/** When all endpoints say for this long that the chain is shorter than it was, they are right. */
const BEHIND_MS_MAX = 30_000;
/** A window that is open by our clock opens on chain at most a block later: the token wants time past its beginning. */
const EARLY_LOOKS = 4;
const EARLY_PAUSE_MS = 700;
const TIP_FRESH_MS = 5000;
/** Base's usual tip, in wei per gas, for nodes that suggest none. */
const TIP_DEFAULT = 1_000_000n;

export type Simulation =
  | { readonly ok: true; readonly gas: bigint }
  | { readonly ok: false; readonly reason: string };

/** Who ended an authorization. */
export interface Use {
  readonly hash: Hex;
  readonly cancelled: boolean;
}

/**
 * What a node says of a transaction. `accepted`: it knows it now. `nonce used`: a transaction with its nonce is in a
 * block, maybe itself. `underpriced`: it keeps another one with that nonce, or the base fee is higher. `unknown`: it may have
 * taken it or not.
 */
export type Reception = "accepted" | "nonce used" | "underpriced" | "unknown";

export interface Chain {
  /** @throws StartupProblem when an endpoint is of another chain */
  check(): Promise<void>;
  /**
   * Whether the transfer would go through in the next block; waits a moment for a window that is just opening.
   *
   * @throws Fault `unavailable`, as everything here does
   */
  simulate(authorization: Authorization, signature: Hex): Promise<Simulation>;
  /** The newest block, never one before what was seen; it may be as old as `ageMs`. */
  newest(ageMs?: number): Promise<wire.Block>;
  /** The hash of the block at this height; null when the node has none there. */
  blockHash(number: number): Promise<Hex | null>;
  /** What nodes suggest as maxPriorityFeePerGas. */
  tip(): Promise<bigint>;
  balance(address: Hex): Promise<bigint>;
  /** Transactions that the address has in the chain up to this block, or with those that wait in the pool. */
  transactionCount(address: Hex, at: wire.Block | "pending"): Promise<number>;
  receipt(hash: Hex): Promise<wire.Receipt | null>;
  /** Whether the authorization had been used or cancelled by the end of this block. */
  isUsed(authorization: Authorization, at: wire.Block): Promise<boolean>;
  /** The transaction that used or cancelled the authorization, if it is found in these blocks. */
  findUse(authorization: Authorization, fromBlock: number, toBlock: number): Promise<Use | null>;
  /** @param everywhere to all endpoints, and not only to the first that takes it */
  broadcast(raw: Hex, everywhere: boolean): Promise<Reception>;
}

export interface ChainOptions {
  readonly urls: readonly string[];
  /** Without the rule about addresses, for the operator chose the nodes. */
  readonly outbound: Outbound;
  readonly log: Log;
  readonly onError?: (endpoint: number) => void;
  readonly timeoutMs?: number;
}

export function createChain(options: ChainOptions): Chain {
  const rpc = createRpc(options);
  const newest = createNewest(rpc);
  let knownTip = { value: TIP_DEFAULT, at: Number.NEGATIVE_INFINITY };

  function ask<T>(method: string, params: readonly unknown[], read: (result: unknown) => T): Promise<T> {
    return rpc.ask({ method, params, read });
  }

  async function estimate(authorization: Authorization, signature: Hex, at: string): Promise<Simulation> {
    const call = {
      to: token.TOKEN_ADDRESS,
      data: token.transferData(authorization, signature),
      gas: hex(GAS_MAX),
    };
    const question = { method: "eth_estimateGas", params: [call, at], read: wire.quantity };
    try {
      const gas = await rpc.ask({ ...question, isAnswer: token.isRefusal });
      return { ok: true, gas: (gas * 6n) / 5n + GAS_RESERVE };
    } catch (error) {
      if (!(error instanceof RpcError)) throw error;
      return { ok: false, reason: token.refusalReason(error) };
    }
  }

  return {
    check: rpc.check,
    newest,
    async simulate(authorization, signature) {
      let simulation = await estimate(authorization, signature, "latest");
      // The next block decides, and its time is later. Asking for it always would make nodes build it each time.
      for (let looks = 0; looks < EARLY_LOOKS && isEarly(simulation); looks++) {
        if (looks > 0) await Bun.sleep(EARLY_PAUSE_MS);
        simulation = await estimate(authorization, signature, "pending");
      }
      if (simulation.ok || isEarly(simulation)) return simulation;
      // A node that lies behind may not know of the money yet. So it has to say so of the newest block that is known.
      return estimate(authorization, signature, hex((await newest()).number));
    },
    async blockHash(number) {
      const block = await ask("eth_getBlockByNumber", [hex(number), false], wire.block);
      return block?.hash ?? null;
    },
    async tip() {
      if (performance.now() - knownTip.at < TIP_FRESH_MS) return knownTip.value;
      const value = await ask("eth_maxPriorityFeePerGas", [], wire.quantity).catch(() => knownTip.value);
      knownTip = { value, at: performance.now() };
      return value;
    },
    balance: (address) => ask("eth_getBalance", [address, "latest"], wire.quantity),
    transactionCount: (address, at) => {
      const method = "eth_getTransactionCount";
      if (at === "pending") return ask(method, [address, at], wire.count);
      return rpc.ask({ method, params: [address], at, read: wire.count });
    },
    receipt: (hash) => {
      return ask("eth_getTransactionReceipt", [hash], (result) => {
        const receipt = wire.receipt(result);
        if (receipt !== null && receipt.hash !== hash)
          throw new TypeError("not the receipt that was asked for");
        return receipt;
      });
    },
    isUsed(authorization, at) {
      const call = { to: token.TOKEN_ADDRESS, data: token.authorizationStateData(authorization) };
      return rpc.ask({ method: "eth_call", params: [call], at, read: wire.truth });
    },
    findUse: (authorization, fromBlock, toBlock) => findUse(rpc, authorization, fromBlock, toBlock),
    broadcast: (raw, everywhere) => broadcast(rpc, raw, everywhere),
  };
}

function isEarly(simulation: Simulation): boolean {
  return !simulation.ok && token.isNotYetValid(simulation.reason);
}

/** The newest blocks first, which is where it is. */
async function findUse(
  rpc: Rpc,
  authorization: Authorization,
  fromBlock: number,
  toBlock: number,
): Promise<Use | null> {
  const first = Math.max(fromBlock, 0);
  try {
    return await searchUse(rpc, authorization, { first, last: toBlock, step: LOG_BLOCKS_MAX });
  } catch {
    return searchUse(rpc, authorization, { first, last: toBlock, step: LOG_BLOCKS_FEW });
  }
}

async function searchUse(
  rpc: Rpc,
  authorization: Authorization,
  { first, last, step }: { readonly first: number; readonly last: number; readonly step: number },
): Promise<Use | null> {
  const ended = [token.AUTHORIZATION_USED, token.AUTHORIZATION_CANCELED];
  const topics = [ended, ...token.authorizationTopics(authorization)];
  let to = last;
  for (let asked = 0; asked < LOG_QUESTIONS_MAX && to >= first; asked++) {
    const from = Math.max(to - step + 1, first);
    const filter = { address: token.TOKEN_ADDRESS, topics, fromBlock: hex(from), toBlock: hex(to) };
    const logs = await rpc.ask({ method: "eth_getLogs", params: [filter], read: wire.logEntries });
    // Whether the node filters is its affair.
    const log = logs.find((each) => token.isEndOf(authorization, each));
    if (log !== undefined) {
      return { hash: log.transactionHash, cancelled: log.topics[0] === token.AUTHORIZATION_CANCELED };
    }
    to = from - 1;
  }
  return null;
}

async function broadcast(rpc: Rpc, raw: Hex, everywhere: boolean): Promise<Reception> {
  const question: Question<Reception> = {
    method: "eth_sendRawTransaction",
    params: [raw],
    read: (result) => {
      wire.hash(result);
      return "accepted";
    },
    isAnswer: (error) => receptionOf(error.message) !== null,
  };
  try {
    return await (everywhere ? rpc.askAll(question) : rpc.ask(question));
  } catch (error) {
    if (error instanceof RpcError) return receptionOf(error.message) ?? "unknown";
    if (error instanceof Fault) return "unknown";
    throw error;
  }
}

function hex(value: number | bigint): Hex {
  return `0x${value.toString(16)}`;
}

/** In the words of geth, reth, Erigon, Nethermind, Besu and anvil; null for what says nothing of the transaction. */
function receptionOf(message: string): Reception | null {
  if (/already (known|imported|exists)|known transaction|alreadyknown/i.test(message)) return "accepted";
  if (/underpriced|replacement fee|fee too low|fee per gas less than/i.test(message)) return "underpriced";
  if (/nonce (is )?too low|nonce too small|oldnonce|lower than the (current|account)/i.test(message)) {
    return "nonce used";
  }
  return null;
}

/** The newest block of all answers so far. Those who ask at the same time share one question. */
function createNewest(rpc: Rpc): (ageMs?: number) => Promise<wire.Block> {
  let seen: wire.Block | null = null;
  let seenAt = Number.NEGATIVE_INFINITY;
  /** When the chain was last as long as we know it to be. */
  let confirmedAt = Number.NEGATIVE_INFINITY;
  let asking: Promise<wire.Block> | null = null;

  async function question(): Promise<wire.Block> {
    const isTrusted = performance.now() - confirmedAt < BEHIND_MS_MAX;
    try {
      const block = await rpc.ask({
        method: "eth_getBlockByNumber",
        params: ["latest", false],
        read: (result) => {
          const newest = wire.block(result);
          if (newest === null) throw new TypeError("no newest block");
          if (seen !== null && newest.number < seen.number && isTrusted) throw new Behind("an older block");
          return newest;
        },
      });
      seen = block;
      confirmedAt = performance.now();
    } catch (error) {
      if (!(error instanceof Behind) || seen === null) throw error;
    }
    seenAt = performance.now();
    return seen;
  }

  return async (ageMs = 0) => {
    if (seen !== null && performance.now() - seenAt < ageMs) return seen;
    asking ??= question().finally(() => {
      asking = null;
    });
    return asking;
  };
}
