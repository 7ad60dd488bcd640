// Finds the transaction that used or cancelled an authorization, by the token's events (eth_getLogs).
import { type Clock, DAY_MS, HOUR_MS } from "../core/time.ts";
import type { Network } from "../x402/network.ts";
import type { Authorization, Hex } from "../x402/types.ts";
import type { Chain } from "./chain.ts";
import * as wire from "./json-rpc.ts";
import type { NodeClient } from "./rpc.ts";
import * as token from "./token.ts";

/** Blocks per eth_getLogs request, requests in parallel, and blocks per search, within what most nodes allow. */
const LARGE = { step: 1_000, parallel: 1, most: 10_000 };
/** The limits of the strictest nodes. No payment is valid for as long as 1000 blocks take. */
const SMALL = { step: 10, parallel: 5, most: 1_000 };

/** Blocks searched after the one at which the authorization should have expired. */
const MARGIN_BLOCKS = 500;
/** Blocks per search, back from its last one. */
const SEARCH_BLOCKS = 9_000;

/** The transaction that ended an authorization. */
export interface Use {
  readonly hash: Hex;
  readonly cancelled: boolean;
}

/** Searches the newest blocks first, where the use usually is. */
export async function findUse(rpc: NodeClient, authorization: Authorization, fromBlock: number, toBlock: number) {
  // A first block in the future was a node's error: the search then covers the blocks of one request.
  const first = Math.max(fromBlock > toBlock ? toBlock - LARGE.step : fromBlock, 0);
  try {
    return await searchUse(rpc, authorization, { first, last: toBlock, ...LARGE });
  } catch {
    return searchUse(rpc, authorization, { first, last: toBlock, ...SMALL });
  }
}

/** The use up to this block: searched for where it should be at the usual block time, then among the newest blocks. */
export async function useBy(chain: Pick<Chain, "findUse" | "network">, authorization: Authorization, head: wire.Block) {
  const seconds = Math.max(head.timestamp - Number(authorization.validBefore), 0);
  const likely = head.number - Math.floor(seconds / chain.network.blockSeconds) + MARGIN_BLOCKS;
  for (const to of likely > 0 && likely < head.number ? [likely, head.number] : [head.number]) {
    const use = await chain.findUse(authorization, Math.max(to - SEARCH_BLOCKS, 0), to);
    if (use !== null) return use;
  }
  return null;
}

async function searchUse(
  rpc: NodeClient,
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

async function useWithin(rpc: NodeClient, authorization: Authorization, from: number, to: number): Promise<Use | null> {
  const ended = [token.AUTHORIZATION_USED, token.AUTHORIZATION_CANCELED];
  const topics = [ended, ...token.authorizationTopics(authorization)];
  const filter = { address: rpc.network.token.key, topics, fromBlock: wire.hex(from), toBlock: wire.hex(to) };
  const isDoubtful = (answer: unknown) => Array.isArray(answer) && answer.length === 0;
  const logs = await rpc.ask({ method: "eth_getLogs", params: [filter], read: wire.logEntries, isDoubtful });
  // The node may have ignored the filter.
  const log = logs.find((each) => token.isEndOf(rpc.network, authorization, each));
  if (log === undefined) return null;
  return { hash: log.transactionHash, cancelled: log.topics[0] === token.AUTHORIZATION_CANCELED };
}

// Whether a transaction of one of our own wallets moved the money of an authorization, by the chain alone: a database that
// was restored to an older state does not know what was collected since.

interface OwnTransferOptions {
  /** Milliseconds since the epoch; null for a database that was never restored. */
  readonly restoredAt: number | null;
  readonly clock: Clock;
  readonly chain: Pick<Chain, "network" | "newest" | "isUsed" | "findUse" | "receipt">;
  /** In lower case. */
  readonly ownWallets: () => Promise<ReadonlySet<Hex>>;
}

/**
 * The receipt that proves the transfer. Null when there is no such transfer, or the database can't have lost one; "unknown"
 * when the authorization is used and no node shows by whom, and while a lost transaction may still use it.
 */
export type FindOwnTransfer = (authorization: Authorization) => Promise<wire.Receipt | "unknown" | null>;

export function createOwnTransfers({ restoredAt, clock, chain, ownWallets }: OwnTransferOptions): FindOwnTransfer {
  function mayBeLost({ validAfter }: Authorization): boolean {
    // A gateway retries for a day, and may have been down for a while before.
    if (restoredAt === null || clock.now() - restoredAt > 7 * DAY_MS) return false;
    // Clocks differ, and the chain's time is its own.
    return Number(validAfter) * 1000 <= restoredAt + 60_000;
  }

  function mayStillLand({ validBefore }: Authorization, head: wire.Block): boolean {
    // A lost transaction that nodes still hold lands within an hour after the restore.
    return restoredAt !== null && clock.now() - restoredAt <= HOUR_MS && BigInt(head.timestamp) < validBefore;
  }

  return async (authorization) => {
    if (!mayBeLost(authorization)) return null;
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

/** Whether one of the wallets sent the transaction, and it moved the money. */
export const isOwnTransfer = (network: Network, receipt: wire.Receipt, wallets: ReadonlySet<Hex>, by: Authorization) =>
  receipt.from !== null && wallets.has(receipt.from) && token.isPaidBy(network, by, receipt);
