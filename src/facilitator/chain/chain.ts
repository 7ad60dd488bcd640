// What the facilitator asks of the chain, in the words of the chain. Absence is only ever read at the hash of a
// block, so that a node which lies behind can't be taken for proof that something did not happen.
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Outbound } from "../../http/outbound.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { Balance } from "../settle/held-funds.ts";
import { type Fees, quoteFees, USUAL_TIP } from "../wallet/fees.ts";
import { type Question, StaleNode } from "./endpoint.ts";
import { RpcError } from "./json-rpc.ts";
import { createNewestBlock, type NewestBlock } from "./newest-block.ts";
import { createRpc, type Rpc } from "./rpc.ts";
import * as wire from "./rpc-types.ts";
import * as token from "./token.ts";

/** A payee may have spent all it has since the estimate: 17,100 gas more. */
const GAS_RESERVE = 20_000n;
/** Blocks of one eth_getLogs question, first as most nodes take it and then as the strictest do. */
const LOG_BLOCKS_MAX = 1000;
const LOG_BLOCKS_FEW = 10;
/** Of one search. */
const LOG_QUESTIONS_MAX = 10;
/** A window that is open by our clock opens on chain at most a block later: the token wants time past its beginning. */
const EARLY_LOOKS = 4;
const EARLY_PAUSE_MS = 700;
/** Twice the base fee of such a block is still enough. */
const BASE_FEE_FRESH_MS = 10_000;
/** Wei per gas: whether a price is too high is judged where it is paid. */
const ANY_PRICE = 2n ** 64n;
const TIP_FRESH_MS = 5000;

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
   * Whether the transfer would go through in the next block, sent from that wallet and for a price: a payer's code may
   * see both, and that a simulation has neither. Waits a moment for a window that is just opening.
   *
   * @throws Fault `unavailable`, as everything here does
   */
  simulate(authorization: Authorization, signature: Hex, from: Hex): Promise<Simulation>;
  /** The newest block, never one before what was seen; it may be as old as `ageMs`. */
  newest(ageMs?: number): Promise<wire.Block>;
  /** The same block, with when it was seen first. */
  sighting(ageMs: number): Promise<NewestBlock>;
  /** The time that the next block would have, in unix seconds; null when no node tells. */
  nextTimestamp(): Promise<number | null>;
  /** The hash of the block at this height; null when the node has none there. */
  blockHash(number: number): Promise<Hex | null>;
  /** What nodes suggest as maxPriorityFeePerGas. */
  tip(): Promise<bigint>;
  balance(address: Hex): Promise<bigint>;
  /** What the payer has of the token at the end of the newest block. */
  balanceOf(payer: Hex): Promise<Balance>;
  /** Whether the address has code at the end of this block. What no node tells counts as code. */
  hasCode(address: Hex, at: Pick<wire.Block, "number" | "hash">): Promise<boolean>;
  /** Whether the payer is a contract wallet that takes this for its signature. */
  isSignedByContract(authorization: Authorization, signature: Hex): Promise<boolean>;
  /** Transactions that the address has in the chain up to this block, or with those that wait in the pool. */
  transactionCount(address: Hex, at: wire.Block | "pending"): Promise<number>;
  receipt(hash: Hex): Promise<wire.Receipt | null>;
  /** Whether the authorization had been used or cancelled by the end of this block. */
  isUsed(
    authorization: Pick<Authorization, "from" | "nonce">,
    at: Pick<wire.Block, "number" | "hash">,
  ): Promise<boolean>;
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

interface Transfer {
  readonly authorization: Authorization;
  readonly signature: Hex;
  readonly from: Hex;
  readonly maxFeePerGas?: Hex;
  readonly maxPriorityFeePerGas?: Hex;
}

export function createChain(options: ChainOptions): Chain {
  const rpc = createRpc(options);
  const sighting = createNewestBlock(rpc);
  const newest = async (ageMs?: number) => (await sighting(ageMs)).block;
  let knownTip = { value: USUAL_TIP, at: Number.NEGATIVE_INFINITY };

  function ask<T>(method: string, params: readonly unknown[], read: (result: unknown) => T): Promise<T> {
    return rpc.ask({ method, params, read });
  }

  async function tip(): Promise<bigint> {
    if (performance.now() - knownTip.at < TIP_FRESH_MS) return knownTip.value;
    const value = await ask("eth_maxPriorityFeePerGas", [], wire.quantity).catch(() => knownTip.value);
    knownTip = { value, at: performance.now() };
    return value;
  }

  async function estimate(transfer: Transfer, at: string): Promise<Simulation> {
    const [{ baseFee }, suggested] = await Promise.all([newest(BASE_FEE_FRESH_MS), tip()]);
    const fees = quoteFees(baseFee, suggested, ANY_PRICE);
    const priced = fees === null ? null : await estimateGas({ ...transfer, ...pricedBy(fees) }, at);
    // What a wallet that is nearly empty can't pay for is still to be judged.
    const found = priced ?? (await estimateGas(transfer, at));
    if (found === null) throw new Fault("unavailable", "no node simulates");
    return found;
  }

  /** Null when nodes can't say it for that price or that wallet, or say what can't be. */
  async function estimateGas(transfer: Transfer, at: string): Promise<Simulation | null> {
    const { authorization, signature, ...rest } = transfer;
    const data = token.transferData(authorization, signature);
    const call = { to: token.TOKEN_ADDRESS, data, gas: hex(token.GAS_MAX), ...rest };
    const isAnswer = (error: RpcError) => token.isAboutPrice(error, token.GAS_MAX) || token.isRefusal(error);
    try {
      const question = { method: "eth_estimateGas", params: [call, at], read: transferGas, isAnswer };
      const gas = await rpc.ask(question);
      return { ok: true, gas: (gas * 6n) / 5n + GAS_RESERVE };
    } catch (error) {
      if (error instanceof StaleNode) return null;
      if (!(error instanceof RpcError)) throw error;
      if (token.isAboutPrice(error, token.GAS_MAX)) return null;
      return { ok: false, reason: token.refusalReason(error) };
    }
  }

  return {
    check: rpc.check,
    newest,
    sighting,
    async simulate(authorization, signature, from) {
      const transaction = { authorization, signature, from };
      let simulation = await estimate(transaction, "latest");
      // The next block decides, and its time is later. Asking for it always would make nodes build it each time.
      for (let looks = 0; looks < EARLY_LOOKS && isEarly(simulation); looks++) {
        if (looks > 0) await Bun.sleep(EARLY_PAUSE_MS);
        simulation = await estimate(transaction, "pending");
      }
      if (simulation.ok || isEarly(simulation)) return simulation;
      // A node that lies behind may not know of the money yet. So it has to say so of the newest block that is known.
      return estimate(transaction, hex((await newest()).number));
    },
    async blockHash(number) {
      const block = await ask("eth_getBlockByNumber", [hex(number), false], wire.block);
      return block?.hash ?? null;
    },
    nextTimestamp: () => ask("eth_getBlockByNumber", ["pending", false], wire.timestamp).catch(() => null),
    tip,
    balance: (address) => ask("eth_getBalance", [address, "latest"], wire.quantity),
    balanceOf: async (payer) => balanceAt(rpc, payer, await newest()),
    async hasCode(address, at) {
      const question = { method: "eth_getCode", params: [address], at, read: wire.data };
      return (await rpc.ask(question).catch(() => null)) !== "0x";
    },
    isSignedByContract: (authorization, signature) => isSignedByContract(rpc, authorization, signature),
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

/** What no transfer can cost is no answer: another node is asked, for this one may be right about all else. */
function transferGas(result: unknown): bigint {
  const gas = wire.quantity(result);
  if (gas < token.GAS_MIN || gas > token.GAS_MAX) throw new StaleNode("no gas of a transfer");
  return gas;
}

function isEarly(simulation: Simulation): boolean {
  return !simulation.ok && token.isNotYetValid(simulation.reason);
}

/** As the transaction will be, so that nobody can tell the simulation by its price. */
function pricedBy({ maxFee, maxPriorityFee }: Fees) {
  return { maxFeePerGas: hex(maxFee), maxPriorityFeePerGas: hex(maxPriorityFee) };
}

async function isSignedByContract(rpc: Rpc, authorization: Authorization, signature: Hex): Promise<boolean> {
  const data = token.signatureData(authorization, signature);
  const call = { to: authorization.from, data, gas: hex(token.GAS_MAX) };
  const question = { method: "eth_call", params: [call, "latest"], read: wire.data };
  try {
    return token.saysValid(await rpc.ask({ ...question, isAnswer: token.isRefusal }));
  } catch (error) {
    if (error instanceof RpcError) return false;
    throw error;
  }
}

/** Of a block that is known, for what was paid since is counted apart. */
async function balanceAt(
  rpc: Rpc,
  payer: Hex,
  { number, hash, parentHash }: Pick<wire.Block, "number" | "hash" | "parentHash">,
): Promise<Balance> {
  const call = { to: token.TOKEN_ADDRESS, data: token.balanceData(payer) };
  const question = { method: "eth_call", params: [call], read: wire.word };
  try {
    return { amount: await rpc.ask({ ...question, at: { number, hash } }), block: number, hash };
  } catch {
    // Nodes behind one URL may lie a block apart.
    const before = { number: number - 1, hash: parentHash };
    const amount = await rpc.ask({ ...question, at: before }).catch((cause) => {
      throw cause instanceof StaleNode ? new Fault("unavailable", "nodes are behind", { cause }) : cause;
    });
    return { amount, block: before.number, hash: before.hash };
  }
}

/** The newest blocks first, which is where it is. */
async function findUse(
  rpc: Rpc,
  authorization: Authorization,
  fromBlock: number,
  toBlock: number,
): Promise<Use | null> {
  // A beginning that is yet to come was a node's error: then it is looked for as far back as one question goes.
  const first = Math.max(fromBlock > toBlock ? toBlock - LOG_BLOCKS_MAX : fromBlock, 0);
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
