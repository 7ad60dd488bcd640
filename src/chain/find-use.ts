// Which transaction has used or cancelled an authorization, by the token's events.
import type { Authorization, Hex } from "../x402/types.ts";
import * as wire from "./json-rpc.ts";
import type { Rpc } from "./rpc.ts";
import * as token from "./token.ts";

/** Blocks of one eth_getLogs question, first as most nodes take it and then as the strictest do. */
const LOG_BLOCKS_MAX = 1000;
const LOG_BLOCKS_FEW = 10;
/** Of one search. */
const LOG_QUESTIONS_MAX = 10;

/** Of Base, about. */
export const BLOCK_SECONDS = 2;
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
export async function findUse(
  rpc: Rpc,
  authorization: Authorization,
  fromBlock: number,
  toBlock: number,
): Promise<Use | null> {
  // A first block that is yet to come was a node's error: the search then goes as far back as one question does.
  const first = Math.max(fromBlock > toBlock ? toBlock - LOG_BLOCKS_MAX : fromBlock, 0);
  try {
    return await searchUse(rpc, authorization, { first, last: toBlock, step: LOG_BLOCKS_MAX });
  } catch {
    return searchUse(rpc, authorization, { first, last: toBlock, step: LOG_BLOCKS_FEW });
  }
}

/** The use up to this block: looked for where it must be, if blocks come as they usually do, and then among the newest. */
export async function useBy(
  chain: { findUse(authorization: Authorization, fromBlock: number, toBlock: number): Promise<Use | null> },
  authorization: Authorization,
  head: wire.Block,
): Promise<Use | null> {
  const seconds = Math.max(head.timestamp - Number(authorization.validBefore), 0);
  const likely = head.number - Math.floor(seconds / BLOCK_SECONDS) + BLOCKS_LATER;
  for (const to of likely > 0 && likely < head.number ? [likely, head.number] : [head.number]) {
    const use = await chain.findUse(authorization, Math.max(to - BLOCKS_BACK, 0), to);
    if (use !== null) return use;
  }
  return null;
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
    const filter = { address: token.TOKEN_ADDRESS, topics, fromBlock: wire.hex(from), toBlock: wire.hex(to) };
    const isDoubtful = (answer: unknown) => Array.isArray(answer) && answer.length === 0;
    const logs = await rpc.ask({ method: "eth_getLogs", params: [filter], read: wire.logEntries, isDoubtful });
    // The node may not have filtered.
    const log = logs.find((each) => token.isEndOf(authorization, each));
    if (log !== undefined) {
      return { hash: log.transactionHash, cancelled: log.topics[0] === token.AUTHORIZATION_CANCELED };
    }
    to = from - 1;
  }
  return null;
}
