// Which transaction has used or cancelled an authorization, by the token's events.
import { type Clock, DAY_MS, HOUR_MS } from "../core/time.ts";
import type { Network } from "../x402/network.ts";
import type { Authorization, Hex } from "../x402/types.ts";
import type { Chain } from "./chain.ts";
import * as wire from "./json-rpc.ts";
import type { NodeDoor } from "./rpc.ts";
import * as token from "./token.ts";

/** Blocks of one eth_getLogs question, such questions at a time, and blocks of one search: first as most nodes take them. */
const LARGE = { step: 1_000, parallel: 1, most: 10_000 };
/** As the strictest nodes take them. No payment is good for so long as 1000 blocks take. */
const SMALL = { step: 10, parallel: 5, most: 1_000 };

/** Blocks after the one at which the authorization should have ended. */
const BLOCKS_LATER = 500;
/** Blocks of one search. */
const BLOCKS_BACK = 9_000;

/** Who ended an authorization. */
export interface Use {
  readonly hash: Hex;
  readonly cancelled: boolean;
}

/** The newest blocks first, which is where it is. */
export async function findUse(rpc: NodeDoor, authorization: Authorization, fromBlock: number, toBlock: number) {
  // A first block that is yet to come was a node's error: the search then goes as far back as one question does.
  const first = Math.max(fromBlock > toBlock ? toBlock - LARGE.step : fromBlock, 0);
  try {
    return await searchUse(rpc, authorization, { first, last: toBlock, ...LARGE });
  } catch {
    return searchUse(rpc, authorization, { first, last: toBlock, ...SMALL });
  }
}

/** The use up to this block: looked for where it must be, if blocks come as they usually do, and then among the newest. */
export async function useBy(chain: Pick<Chain, "findUse" | "network">, authorization: Authorization, head: wire.Block) {
  const seconds = Math.max(head.timestamp - Number(authorization.validBefore), 0);
  const likely = head.number - Math.floor(seconds / chain.network.blockSeconds) + BLOCKS_LATER;
  for (const to of likely > 0 && likely < head.number ? [likely, head.number] : [head.number]) {
    const use = await chain.findUse(authorization, Math.max(to - BLOCKS_BACK, 0), to);
    if (use !== null) return use;
  }
  return null;
}

async function searchUse(
  rpc: NodeDoor,
  authorization: Authorization,
  { first, last, step, parallel, most }: typeof LARGE & { readonly first: number; readonly last: number },
): Promise<Use | null> {
  const least = Math.max(first, last - most + 1);
  for (let to = last; to >= least; to -= step * parallel) {
    const ends = Array.from({ length: parallel }, (_, at) => to - at * step).filter((end) => end >= least);
    const asked = ends.map((end) => useWithin(rpc, authorization, Math.max(end - step + 1, least), end));
    const use = (await Promise.all(asked)).find((each) => each !== null);
    if (use !== undefined) return use;
  }
  return null;
}

async function useWithin(rpc: NodeDoor, authorization: Authorization, from: number, to: number): Promise<Use | null> {
  const ended = [token.AUTHORIZATION_USED, token.AUTHORIZATION_CANCELED];
  const topics = [ended, ...token.authorizationTopics(authorization)];
  const filter = { address: rpc.network.token.key, topics, fromBlock: wire.hex(from), toBlock: wire.hex(to) };
  const isDoubtful = (answer: unknown) => Array.isArray(answer) && answer.length === 0;
  const logs = await rpc.ask({ method: "eth_getLogs", params: [filter], read: wire.logEntries, isDoubtful });
  // The node may not have filtered.
  const log = logs.find((each) => token.isEndOf(rpc.network, authorization, each));
  if (log === undefined) return null;
  return { hash: log.transactionHash, cancelled: log.topics[0] === token.AUTHORIZATION_CANCELED };
}

// Whether a transaction of one of our own wallets has moved the money of an authorization, by what the chain says alone: for
// a database that was restored to an older state, and has forgotten what was collected since.

interface OwnTransferOptions {
  /** Milliseconds; null for a database that never was restored. */
  readonly restoredAt: number | null;
  readonly clock: Clock;
  readonly chain: Pick<Chain, "network" | "newest" | "isUsed" | "findUse" | "receipt">;
  /** In lower case. */
  readonly ownWallets: () => Promise<ReadonlySet<Hex>>;
}

/**
 * The receipt that proves it. Null when there is none, or none could be forgotten; "unknown" when the authorization is used,
 * and no node tells by whom, and while a forgotten transaction that is on its way may still use it.
 */
export type FindOwnTransfer = (authorization: Authorization) => Promise<wire.Receipt | "unknown" | null>;

export function createOwnTransfers({ restoredAt, clock, chain, ownWallets }: OwnTransferOptions): FindOwnTransfer {
  function mayBeForgotten({ validAfter }: Authorization): boolean {
    // A gateway asks for a day, and may have been away for a while.
    if (restoredAt === null || clock.now() - restoredAt > 7 * DAY_MS) return false;
    // Clocks differ, and the chain's time is its own.
    return Number(validAfter) * 1000 <= restoredAt + 60_000;
  }

  function mayStillLand({ validBefore }: Authorization, head: wire.Block): boolean {
    // A forgotten transaction that nodes still hold lands within an hour after the restore.
    return restoredAt !== null && clock.now() - restoredAt <= HOUR_MS && BigInt(head.timestamp) < validBefore;
  }

  return async (authorization) => {
    if (!mayBeForgotten(authorization)) return null;
    const head = await chain.newest();
    if (!(await chain.isUsed(authorization, head))) return mayStillLand(authorization, head) ? "unknown" : null;
    const use = await useBy(chain, authorization, head);
    if (use === null) return "unknown";
    if (use.cancelled) return null;
    const receipt = await chain.receipt(use.hash);
    if (receipt === null) return "unknown";
    return isOwnTransfer(chain.network, receipt, await ownWallets(), authorization) ? receipt : null;
  };
}

/** Whether the transaction is of one of the wallets, and has moved the money. */
export function isOwnTransfer(network: Network, receipt: wire.Receipt, wallets: ReadonlySet<Hex>, by: Authorization) {
  return receipt.from !== null && wallets.has(receipt.from) && token.isPaidBy(network, by, receipt);
}
