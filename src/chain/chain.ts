// The chain, as the facilitator queries it, and the gateway when it looks at open payments: simulations, balances, receipts,
// broadcasts. A negative answer counts only at the hash of a known block, since a node that is behind proves nothing.
import { encodeFunctionData, toHex } from "viem";
import { Fault } from "../core/fault.ts";
import { type Clock, systemClock } from "../core/time.ts";
import { authorizationDigest } from "../x402/eip3009.ts";
import type { Network } from "../x402/network.ts";
import type { Authorization, Hex, Payment } from "../x402/types.ts";
import { type Fees, quoteFees, type Tip } from "./fees.ts";
import { findUse } from "./find-use.ts";
import * as wire from "./json-rpc.ts";
import { RpcError } from "./json-rpc.ts";
import { createNewestBlock } from "./newest-block.ts";
import { createRpc, type NodeClient, type Question, type Rpc, type RpcOptions, StaleNode } from "./rpc.ts";
import * as token from "./token.ts";

/** If the payee has spent its whole balance since the estimate, the transfer costs 17,100 gas more. */
const GAS_RESERVE = 20_000n;
/** Tries for a transfer whose window is just opening: by the chain's time the window opens a block later than by our clock. */
const EARLY_SIMULATIONS = 4;
/** Wei per gas. A simulation has no price cap, since the wallet that pays applies its own. */
const ANY_PRICE = 2n ** 64n;

export type Simulation = { readonly ok: true; readonly gas: bigint } | { readonly ok: false; readonly reason: string };

/**
 * How a node took a broadcast transaction. `accepted`: the node holds the transaction now. `nonce used`: a transaction with
 * its nonce is in a block, maybe this very one. `underpriced`: the node keeps another transaction with that nonce, or the
 * base fee is higher. `unknown`: the node may or may not hold it.
 */
export type Reception = "accepted" | "nonce used" | "underpriced" | "unknown";

/** A payer's balance of the token, in smallest units, at the end of a block. */
export interface Balance {
  readonly amount: bigint;
  readonly block: number;
  readonly hash: Hex;
}

type BlockId = Pick<wire.Block, "number" | "hash">;
type AuthorizationId = Pick<Authorization, "from" | "nonce">;

/** What one node, asked alone, says about an authorization. */
export type NodeView = Awaited<ReturnType<typeof viewsOf>>[number];

export type Chain = ReturnType<typeof createChain>;

type SimulatedTransfer = Pick<Payment, "authorization" | "signature"> &
  Partial<ReturnType<typeof pricedBy>> & { readonly from: Hex };

/** Unless its comment or type says otherwise, a method throws Fault `unavailable` when no node gives a usable answer. */
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
    /** @throws StartupProblem when an endpoint serves another chain */
    check: rpc.check,
    /** The newest block, never below the newest seen before. @param ageMs how old a cached answer may be */
    newest,
    /** The newest block, with the time at which it was first seen. */
    sighting,
    isFresh,
    isSure,
    simulate: createSimulate(rpc, newestBlock, tip),
    /** The hash of the block at this height; null when no node has a block there. */
    blockHash: (number: number): Promise<Hex | null> =>
      ask("eth_getBlockByNumber", [wire.hex(number), false], (result) => wire.block(result)?.hash ?? null),
    /** The timestamp of the pending block, in unix seconds; null when no node answers. */
    nextTimestamp: () => ask("eth_getBlockByNumber", ["pending", false], wire.timestamp).catch(() => null),
    tip,
    /** The L1 data fee that a rollup may charge for a transaction of so many bytes, in wei; 0 without a fee oracle. */
    feeBelow: (bytes: number) => feeBelow(rpc, bytes),
    balance: (address: Hex) => ask("eth_getBalance", [address, "latest"], wire.quantity),
    /** The payer's balance of the token. @param least expected balance: less is believed only when no node reports more */
    balanceOf: async (payer: Hex, least = 0n) => balanceAt(rpc, payer, await newest(), least),
    /** Whether the address has code at the end of the block; true as well when no node answers. */
    async hasCode(address: Hex, at: BlockId): Promise<boolean> {
      const question = { method: "eth_getCode", params: [address], at, read: wire.data };
      return (await rpc.ask(question).catch(() => null)) !== "0x";
    },
    /** Whether Multicall3 is deployed at its usual address, with the expected code. */
    hasMulticall3: () =>
      ask("eth_getCode", [token.MULTICALL3, "latest"], (code) => token.isMulticall3(wire.data(code))),
    /** Whether the payer is a contract wallet that accepts this signature (ERC-1271). */
    isSignedByContract: (authorization: Authorization, signature: Hex) =>
      isSignedByContract(rpc, authorization, signature),
    /**
     * The transaction count (next nonce) of the address at this block, or including the pool's transactions ("pending").
     * @param least expected count: a lower one is believed only when no node reports more
     * @param most highest known count: a higher one is believed only as far as all nodes report it
     */
    transactionCount(address: Hex, at: BlockId | "pending", least = 0, most = Number.POSITIVE_INFINITY) {
      const asked = at === "pending" ? { params: [address, at] } : { params: [address], at };
      return countWithin(rpc, { method: "eth_getTransactionCount", ...asked, read: wire.count }, least, most);
    },
    /** @param shows what the receipt should show: one that does not is believed only when no other node has one that does */
    receipt: (hash: Hex, shows?: (receipt: wire.Receipt) => boolean) => receipt(rpc, hash, shows),
    /** Whether the authorization had been used or cancelled by the end of this block. */
    isUsed: (authorization: AuthorizationId, at: BlockId) => rpc.ask({ ...stateQuestion(network, authorization), at }),
    /** Each node's view of the authorization. Nodes that do not return their newest block are left out. */
    views: (authorization: AuthorizationId) => viewsOf(rpc, authorization),
    /** The transaction that used or cancelled the authorization, searched for in these blocks; null when not found. */
    findUse: (authorization: Authorization, from: number, to: number) => findUse(rpc, authorization, from, to),
    /** @param everywhere whether to send to all endpoints, and not only to the first that accepts */
    broadcast: (raw: Hex, everywhere: boolean) => broadcast(rpc, raw, everywhere),
  };
}

/** The nodes' suggested maxPriorityFeePerGas, cached for five seconds; the last suggestion while no node answers. */
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
  const data = encodeFunctionData({ ...token.CALLS.authorizationState, args: [from, nonce] });
  return { method: "eth_call", params: [{ to: key, data }], read: wire.truth };
}

async function viewsOf(rpc: Rpc, authorization: AuthorizationId) {
  const question = stateQuestion(rpc.network, authorization);
  return (await rpc.heads()).map(({ endpoint, block: head }) => ({
    network: rpc.network,
    /** The node's own newest block. */
    head,
    /** Whether the authorization had been used or cancelled by the end of `head`; null when the node does not answer. */
    isUsed: endpoint.ask({ ...question, at: head }).catch(() => null),
    /** Whether the node still answers, and for our chain. */
    test: endpoint.test,
    receipt: (hash: Hex) => receipt(endpoint, hash),
    findUse: (used: Authorization, from: number, to: number) => findUse(endpoint, used, from, to),
  }));
}

async function receipt(rpc: NodeClient, hash: Hex, shows: (receipt: wire.Receipt) => boolean = () => true) {
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
 * Simulates the transfer in the next block. The simulation has the wallet as its sender and carries a gas price, because a
 * payer's code could recognise one that has neither. It waits a moment for a window that is just opening. While the newest
 * block stands still nothing is refused, since the payer may have been funded since.
 */
function createSimulate(rpc: Rpc, newestBlock: ReturnType<typeof createNewestBlock>, tip: () => Promise<Tip>) {
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

  /** Null when the nodes can't simulate at that price or from that wallet, or return an impossible amount of gas. */
  async function estimateGas(transfer: SimulatedTransfer, at: string): Promise<Simulation | null> {
    const { authorization, signature, ...rest } = transfer;
    const data = token.transferData(authorization, signature);
    const call = { to: rpc.network.token.key, data, gas: wire.hex(token.GAS_MAX), ...rest };
    const isAnswer = (error: RpcError) => token.isAboutPrice(error, token.GAS_MAX) || token.isRefusal(error);
    try {
      // A node that is behind may not have seen the payer's funding yet.
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

  return async (authorization: Authorization, signature: Hex, from: Hex): Promise<Simulation> => {
    const transaction = { authorization, signature, from };
    let simulation = await estimate(transaction, "latest");
    // The next block has a later time. It is queried only when needed, since a node builds a pending block for each query.
    for (let tries = 0; tries < EARLY_SIMULATIONS && isEarly(simulation); tries++) {
      if (tries > 0) await Bun.sleep(700);
      simulation = await estimate(transaction, "pending");
    }
    if (simulation.ok) return simulation;
    // A node that is behind may not have seen the payer's funding yet, so a refusal must be about the newest known block.
    const { block } = await newestBlock.highest();
    if (!isEarly(simulation)) simulation = await estimate(transaction, wire.hex(block.number));
    if (!simulation.ok && newestBlock.standsStill())
      throw new Fault("unavailable", "no fresh block", { retryAfterSeconds: 2 });
    return simulation;
  };
}

/** An amount that no transfer can cost is an unusable answer: another node is asked, and the endpoint stays in use. */
function transferGas(result: unknown): bigint {
  const gas = wire.quantity(result);
  if (gas < token.GAS_MIN || gas > token.GAS_MAX) throw new StaleNode("no gas of a transfer");
  return gas;
}

const isEarly = (simulation: Simulation): boolean => !simulation.ok && token.isNotYetValid(simulation.reason);

/** The price fields of the real transaction, so that nobody can recognise the simulation by its price. */
function pricedBy({ maxFee, maxPriorityFee }: Fees) {
  return { maxFeePerGas: wire.hex(maxFee), maxPriorityFeePerGas: wire.hex(maxPriorityFee) };
}

async function feeBelow(rpc: Rpc, bytes: number): Promise<bigint> {
  const data = encodeFunctionData({ ...token.CALLS.feeUpperBound, args: [BigInt(Math.ceil(bytes))] });
  const call = { to: token.FEE_ORACLE, data };
  const read = (result: unknown) => (result === "0x" ? 0n : wire.word(result));
  return unlessRefused(rpc.ask({ method: "eth_call", params: [call, "latest"], read, isAnswer: token.isRefusal }), 0n);
}

/** The result of the call, or `otherwise` when the EVM refuses it. */
function unlessRefused<T>(calling: Promise<T>, otherwise: T): Promise<T> {
  return calling.catch((error) => {
    if (error instanceof RpcError) return otherwise;
    throw error;
  });
}

async function isSignedByContract(rpc: Rpc, authorization: Authorization, signature: Hex): Promise<boolean> {
  const digest = toHex(authorizationDigest(rpc.network.token.domain, authorization));
  const data = encodeFunctionData({ ...token.CALLS.isValidSignature, args: [digest, signature] });
  const call = { to: authorization.from, data, gas: wire.hex(token.GAS_MAX) };
  const isDoubtful = (answer: Hex | RpcError) => answer instanceof RpcError || !token.saysValid(answer);
  const question = { method: "eth_call", params: [call, "latest"], read: wire.data, isAnswer: token.isRefusal };
  return unlessRefused(rpc.ask({ ...question, isDoubtful }).then(token.saysValid), false);
}

/** A count within the bounds if any node reports one. If all are above `most`, the lowest one of at least `least`. */
async function countWithin(rpc: Rpc, question: Question<number>, least: number, most: number): Promise<number> {
  const isOutside = (count: number | RpcError) => !(count instanceof RpcError) && (count < least || count > most);
  const first = await rpc.ask({ ...question, isDoubtful: isOutside });
  if (first <= most) return first;
  const heads = await rpc.heads();
  const counts = await Promise.all(heads.map(({ endpoint }) => endpoint.ask(question).catch(() => first)));
  return Math.min(first, ...counts.filter((count) => count >= least));
}

/** The balance at a known block, since the wallet counts the payments of later blocks itself. */
async function balanceAt(rpc: Rpc, payer: Hex, { number, hash, parentHash }: wire.Block, least: bigint) {
  const call = { to: rpc.network.token.key, data: token.balanceData(payer) };
  const isDoubtful = (answer: bigint | RpcError) => !(answer instanceof RpcError) && answer < least;
  const question = { method: "eth_call", params: [call], read: wire.word, isDoubtful };
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
  const isAnswer = ({ message }: RpcError) => receptionOf(message) !== null;
  const question = { method: "eth_sendRawTransaction", params: [raw], read: wire.hash, isAnswer };
  try {
    await (everywhere ? rpc.askAll(question) : rpc.ask(question));
    return "accepted";
  } catch (error) {
    if (error instanceof RpcError) return receptionOf(error.message) ?? "unknown";
    if (error instanceof Fault) return "unknown";
    throw error;
  }
}

/** Knows the messages of geth, reth, Erigon, Nethermind, Besu and anvil; null for a message about something else. */
function receptionOf(message: string): Reception | null {
  if (/already (known|imported|exists)|known transaction|alreadyknown/i.test(message)) return "accepted";
  if (/underpriced|replacement fee|fee too low|fee per gas less than/i.test(message)) return "underpriced";
  return /nonce (is )?too low|nonce too small|oldnonce|lower than the (current|account)/i.test(message)
    ? "nonce used"
    : null;
}
