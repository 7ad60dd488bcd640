// What the facilitator asks of the chain. That something did not happen is only ever read at the hash of a block, since a
// node that is behind proves nothing.

import { encodeFunctionData, toHex } from "viem";
import { Fault } from "../core/fault.ts";
import { type Clock, systemClock } from "../core/time.ts";
import { authorizationDigest } from "../x402/eip3009.ts";
import type { Network } from "../x402/network.ts";
import type { Authorization, Hex } from "../x402/types.ts";
import { type Fees, quoteFees, type Tip } from "./fees.ts";
import { findUse, type Use } from "./find-use.ts";
import * as wire from "./json-rpc.ts";
import { RpcError } from "./json-rpc.ts";
import { createNewestBlock } from "./newest-block.ts";
import { createRpc, type NodeDoor, type Question, type Rpc, type RpcOptions, StaleNode } from "./rpc.ts";
import * as token from "./token.ts";
import { isMulticall3, MULTICALL3 } from "./token.ts";

/** The payee may have spent its whole balance since the estimate, which costs 17,100 gas more. */
const GAS_RESERVE = 20_000n;
/** A window that is open by our clock opens on chain at most a block later: the token wants time past its beginning. */
const EARLY_LOOKS = 4;
/** Wei per gas: no price is too high for a simulation. The wallet that pays judges that. */
const ANY_PRICE = 2n ** 64n;

export type Simulation = { readonly ok: true; readonly gas: bigint } | { readonly ok: false; readonly reason: string };

/**
 * What a node says of a transaction. `accepted`: it knows it now. `nonce used`: a transaction with its nonce is in a
 * block, maybe itself. `underpriced`: it keeps another one with that nonce, or the base fee is higher. `unknown`: it may have
 * taken it or not.
 */
export type Reception = "accepted" | "nonce used" | "underpriced" | "unknown";

/** What a payer had of the token by the end of a block. */
export interface Balance {
  readonly amount: bigint;
  readonly block: number;
  readonly hash: Hex;
}

type BlockId = Pick<wire.Block, "number" | "hash">;
type AuthorizationId = Pick<Authorization, "from" | "nonce">;

/** One node, asked alone: what it tells of an authorization. */
export interface NodeView {
  readonly network: Network;
  /** Its own newest block. */
  readonly head: wire.Block;
  /** Whether the authorization had been used or cancelled by the end of that block; null when the node does not tell. */
  readonly isUsed: Promise<boolean | null>;
  /** Whether it still answers, and is of our chain. */
  test(): Promise<boolean>;
  receipt(hash: Hex): Promise<wire.Receipt | null>;
  findUse(authorization: Authorization, fromBlock: number, toBlock: number): Promise<Use | null>;
}

export type Chain = ReturnType<typeof createChain>;

interface SimulatedTransfer {
  readonly authorization: Authorization;
  readonly signature: Hex;
  readonly from: Hex;
  readonly maxFeePerGas?: Hex;
  readonly maxPriorityFeePerGas?: Hex;
}

/** Everything here throws Fault `unavailable` when no node gives an answer that can be used. */
export function createChain({ clock = systemClock, ...options }: RpcOptions & { readonly clock?: Clock }) {
  const { network } = options;
  const rpc = createRpc(options);
  const newestBlock = createNewestBlock(rpc, clock);
  const { newest: sighting, isFresh, isSure } = newestBlock;
  const newest = async (ageMs?: number) => (await sighting(ageMs)).block;
  const ask = <T>(method: string, params: readonly unknown[], read: (result: unknown) => T) =>
    rpc.ask({ method, params, read, isDoubtful: (answer) => answer === null });
  const tip = createTip(network, () => ask("eth_maxPriorityFeePerGas", [], wire.quantity));

  return {
    network,
    /** @throws StartupProblem when an endpoint is of another chain */
    check: rpc.check,
    /** The newest block, never one before what was seen; it may be as old as `ageMs`. */
    newest,
    /** The newest block, with when it was seen first. */
    sighting,
    isFresh,
    isSure,
    simulate: createSimulate(rpc, newestBlock, tip),
    /** The hash of the block at this height; null when the node has none there. */
    blockHash: (number: number): Promise<Hex | null> =>
      ask("eth_getBlockByNumber", [wire.hex(number), false], (result) => wire.block(result)?.hash ?? null),
    /** The time that the next block would have, in unix seconds; null when no node tells. */
    nextTimestamp: () => ask("eth_getBlockByNumber", ["pending", false], wire.timestamp).catch(() => null),
    tip,
    /** What a rollup may take for a transaction of so many bytes in the chain below, in wei; 0 where nothing tells. */
    feeBelow: (bytes: number) => feeBelow(rpc, bytes),
    balance: (address: Hex) => ask("eth_getBalance", [address, "latest"], wire.quantity),
    /** What the payer has of the token. @param least what it should have: less is believed only when no node knows of more */
    balanceOf: async (payer: Hex, least = 0n) => balanceAt(rpc, payer, await newest(), least),
    /** Whether the address has code at the end of the block. If no node tells, it counts as having some. */
    async hasCode(address: Hex, at: BlockId): Promise<boolean> {
      const question = { method: "eth_getCode", params: [address], at, read: wire.data };
      return (await rpc.ask(question).catch(() => null)) !== "0x";
    },
    /** Whether Multicall3 stands where it does on most chains, with the code that it has there. */
    hasMulticall3: () => ask("eth_getCode", [MULTICALL3, "latest"], (code) => isMulticall3(wire.data(code))),
    /** Whether the payer is a contract wallet that takes this for its signature. */
    isSignedByContract: (authorization: Authorization, signature: Hex) =>
      isSignedByContract(rpc, authorization, signature),
    /**
     * Transactions that the address has in the chain up to this block, or with those that wait in the pool.
     *
     * @param least how many it should have: fewer are believed only when no node knows of more
     * @param most how many are known of: more are believed only as far as all nodes tell of them, as none can prove it
     */
    transactionCount(
      address: Hex,
      at: BlockId | "pending",
      least = 0,
      most = Number.POSITIVE_INFINITY,
    ): Promise<number> {
      const asked = at === "pending" ? { params: [address, at] } : { params: [address], at };
      return countWithin(rpc, { method: "eth_getTransactionCount", ...asked, read: wire.count }, least, most);
    },
    /** @param shows what it should show: one that does not is believed only when no node shows more */
    receipt: (hash: Hex, shows?: (receipt: wire.Receipt) => boolean) => receipt(rpc, hash, shows),
    /** Whether the authorization had been used or cancelled by the end of this block. */
    isUsed: (authorization: AuthorizationId, at: BlockId) => rpc.ask({ ...stateQuestion(network, authorization), at }),
    /** What each node tells of the authorization. Those that do not give their newest block are left out. */
    views: (authorization: AuthorizationId) => viewsOf(rpc, authorization),
    /** The transaction that used or cancelled the authorization, if it is found in these blocks. */
    findUse: (authorization: Authorization, from: number, to: number) => findUse(rpc, authorization, from, to),
    /** @param everywhere to all endpoints, and not only to the first that takes it */
    broadcast: (raw: Hex, everywhere: boolean) => broadcast(rpc, raw, everywhere),
  };
}

/** What nodes suggest as maxPriorityFeePerGas; the last suggestion, where none tells. */
function createTip(network: Network, ask: () => Promise<bigint>): () => Promise<Tip> {
  const { leastTip: least, mostTip: most } = network.fees;
  let known = { suggested: least, at: Number.NEGATIVE_INFINITY };
  return async () => {
    const { suggested, at } = known;
    if (performance.now() - at >= 5000)
      known = { suggested: await ask().catch(() => suggested), at: performance.now() };
    return { suggested: known.suggested, least, most };
  };
}

function stateQuestion({ token: { key } }: Network, { from, nonce }: AuthorizationId) {
  const data = encodeFunctionData({ abi: token.ABI, functionName: "authorizationState", args: [from, nonce] });
  return { method: "eth_call", params: [{ to: key, data }], read: wire.truth };
}

async function viewsOf(rpc: Rpc, authorization: AuthorizationId): Promise<readonly NodeView[]> {
  const question = stateQuestion(rpc.network, authorization);
  return (await rpc.heads()).map(({ endpoint, block: head }) => ({
    network: rpc.network,
    head,
    isUsed: endpoint.ask({ ...question, at: head }).catch(() => null),
    test: endpoint.test,
    receipt: (hash) => receipt(endpoint, hash),
    findUse: (authorization, fromBlock, toBlock) => findUse(endpoint, authorization, fromBlock, toBlock),
  }));
}

async function receipt(rpc: NodeDoor, hash: Hex, shows: (receipt: wire.Receipt) => boolean = () => true) {
  const read = (result: unknown) => {
    const found = wire.receipt(result);
    if (found !== null && found.hash !== hash) throw new TypeError("not the receipt that was asked for");
    return found;
  };
  const isShown = (answer: wire.Receipt | RpcError | null) =>
    answer !== null && !(answer instanceof RpcError) && shows(answer);
  const question = { method: "eth_getTransactionReceipt", params: [hash], read };
  const first = await rpc.ask({ ...question, isDoubtful: (answer) => answer === null });
  if (first === null || shows(first)) return first;
  return (await rpc.ask({ ...question, isDoubtful: (answer) => !isShown(answer) })) ?? first;
}

/**
 * Whether the transfer would go through in the next block. It is simulated from that wallet and with a price, because a
 * payer's code could tell a simulation that has neither. Waits a moment for a window that is just opening. Nothing is refused
 * while the newest block stands still, since the payer may have been funded since.
 */
function createSimulate(
  rpc: Rpc,
  newestBlock: ReturnType<typeof createNewestBlock>,
  tip: () => Promise<Tip>,
): (authorization: Authorization, signature: Hex, from: Hex) => Promise<Simulation> {
  async function estimate(transfer: SimulatedTransfer, at: string): Promise<Simulation> {
    // Twice the base fee of a block that is ten seconds old is still enough.
    const [{ block }, suggested] = await Promise.all([newestBlock.newest(10_000), tip()]);
    const fees = quoteFees(block.baseFee, suggested, ANY_PRICE);
    const priced = fees === null ? null : await estimateGas({ ...transfer, ...pricedBy(fees) }, at);
    // A nearly empty wallet may be unable to pay that price, but the transfer still has to be judged.
    const found = priced ?? (await estimateGas(transfer, at));
    if (found === null) throw new Fault("unavailable", "no node simulates");
    return found;
  }

  /** Null when nodes can't tell for that price or that wallet, or give an impossible answer. */
  async function estimateGas(transfer: SimulatedTransfer, at: string): Promise<Simulation | null> {
    const { authorization, signature, ...rest } = transfer;
    const data = token.transferData(authorization, signature);
    const call = { to: rpc.network.token.key, data, gas: wire.hex(token.GAS_MAX), ...rest };
    const isAnswer = (error: RpcError) => token.isAboutPrice(error, token.GAS_MAX) || token.isRefusal(error);
    try {
      // A node that is behind may not know of the money yet.
      const isDoubtful = (answer: unknown) => answer instanceof RpcError && token.isRefusal(answer);
      const question = { method: "eth_estimateGas", params: [call, at], read: transferGas, isAnswer, isDoubtful };
      const gas = await rpc.ask(question);
      return { ok: true, gas: (gas * 6n) / 5n + GAS_RESERVE };
    } catch (error) {
      if (error instanceof StaleNode) return null;
      if (!(error instanceof RpcError)) throw error;
      if (token.isAboutPrice(error, token.GAS_MAX)) return null;
      return { ok: false, reason: token.refusalReason(error) };
    }
  }

  return async (authorization, signature, from) => {
    const transaction = { authorization, signature, from };
    let simulation = await estimate(transaction, "latest");
    // The next block decides, and its time is later. It is asked about only now, since nodes have to build it each time.
    for (let looks = 0; looks < EARLY_LOOKS && isEarly(simulation); looks++) {
      if (looks > 0) await Bun.sleep(700);
      simulation = await estimate(transaction, "pending");
    }
    if (simulation.ok) return simulation;
    // A node that is behind may not know of the money yet, so the refusal must be about the newest known block.
    const { block } = await newestBlock.highest();
    if (!isEarly(simulation)) simulation = await estimate(transaction, wire.hex(block.number));
    if (!simulation.ok && newestBlock.standsStill())
      throw new Fault("unavailable", "no fresh block", { retryAfterSeconds: 2 });
    return simulation;
  };
}

/** An amount that no transfer can cost is no answer: another node is asked, and this one stays in use for all else. */
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
  return { maxFeePerGas: wire.hex(maxFee), maxPriorityFeePerGas: wire.hex(maxPriorityFee) };
}

async function feeBelow(rpc: Rpc, bytes: number): Promise<bigint> {
  const size = BigInt(Math.ceil(bytes));
  const data = encodeFunctionData({ abi: token.ABI, functionName: "getL1FeeUpperBound", args: [size] });
  const call = { to: token.FEE_ORACLE, data };
  const read = (result: unknown) => (result === "0x" ? 0n : wire.word(result));
  return unlessRefused(rpc.ask({ method: "eth_call", params: [call, "latest"], read, isAnswer: token.isRefusal }), 0n);
}

/** What the call gives, and `otherwise` where the EVM refuses it. */
function unlessRefused<T>(calling: Promise<T>, otherwise: T): Promise<T> {
  return calling.catch((error) => {
    if (error instanceof RpcError) return otherwise;
    throw error;
  });
}

async function isSignedByContract(rpc: Rpc, authorization: Authorization, signature: Hex): Promise<boolean> {
  const digest = toHex(authorizationDigest(rpc.network.token.domain, authorization));
  const data = encodeFunctionData({ abi: token.ABI, functionName: "isValidSignature", args: [digest, signature] });
  const call = { to: authorization.from, data, gas: wire.hex(token.GAS_MAX) };
  const isDoubtful = (answer: Hex | RpcError) => answer instanceof RpcError || !token.saysValid(answer);
  const question = { method: "eth_call", params: [call, "latest"], read: wire.data, isAnswer: token.isRefusal };
  return unlessRefused(rpc.ask({ ...question, isDoubtful }).then(token.saysValid), false);
}

const isBelow =
  <T extends number | bigint>(least: T) =>
  (answer: T | RpcError): boolean =>
    !(answer instanceof RpcError) && answer < least;

/** Where no node counts within these bounds, the lowest count above them, if there is one. */
async function countWithin(rpc: Rpc, question: Question<number>, least: number, most: number): Promise<number> {
  const isOutside = (count: number | RpcError) => !(count instanceof RpcError) && (count < least || count > most);
  const first = await rpc.ask({ ...question, isDoubtful: isOutside });
  if (first <= most) return first;
  const heads = await rpc.heads();
  const counts = await Promise.all(heads.map(({ endpoint }) => endpoint.ask(question).catch(() => first)));
  return Math.min(first, ...counts.filter((count) => count >= least));
}

/** At a known block, since payments after it are counted apart. */
async function balanceAt(rpc: Rpc, payer: Hex, { number, hash, parentHash }: wire.Block, least: bigint) {
  const call = { to: rpc.network.token.key, data: token.balanceData(payer) };
  const question = { method: "eth_call", params: [call], read: wire.word, isDoubtful: isBelow(least) };
  try {
    return { amount: await rpc.ask({ ...question, at: { number, hash } }), block: number, hash };
  } catch {
    // Nodes behind one URL may be a block apart.
    const before = { number: number - 1, hash: parentHash };
    const amount = await rpc.ask({ ...question, at: before }).catch((cause) => {
      throw cause instanceof StaleNode ? new Fault("unavailable", "nodes are behind", { cause }) : cause;
    });
    return { amount, block: before.number, hash: before.hash };
  }
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

/** In the words of geth, reth, Erigon, Nethermind, Besu and anvil; null for what says nothing of the transaction. */
function receptionOf(message: string): Reception | null {
  if (/already (known|imported|exists)|known transaction|alreadyknown/i.test(message)) return "accepted";
  if (/underpriced|replacement fee|fee too low|fee per gas less than/i.test(message)) return "underpriced";
  if (/nonce (is )?too low|nonce too small|oldnonce|lower than the (current|account)/i.test(message)) {
    return "nonce used";
  }
  return null;
}
