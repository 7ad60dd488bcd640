// The newest block of the chain, as all nodes together know it: it does not go back because one of them is behind, nor
// far ahead because one of them is wrong.
import { StaleNode } from "./endpoint.ts";
import type { Rpc } from "./rpc.ts";
import * as wire from "./rpc-types.ts";

/** When all endpoints have said for this long what we did not believe, they are right. */
const DOUBT_MS_MAX = 30_000;
/** No chain grows by this much between two looks, unless nobody has looked for weeks. */
const JUMP_BLOCKS_MAX = 1_000_000;
const JUMP_SECONDS_MAX = 2 * JUMP_BLOCKS_MAX;

export interface NewestBlock {
  readonly block: wire.Block;
  /** By performance.now. */
  readonly at: number;
}

/** The newest block of all answers so far. Those who ask at the same time share one question. */
export function createNewestBlock(rpc: Rpc): (ageMs?: number) => Promise<NewestBlock> {
  let seen: NewestBlock | null = null;
  let askedAt = Number.NEGATIVE_INFINITY;
  /** Since when no endpoint's answer has fitted the chain as we know it. */
  let doubtedAt: number | null = null;
  let asking: Promise<NewestBlock> | null = null;

  async function question(): Promise<NewestBlock> {
    const isTrusted = doubtedAt === null || performance.now() - doubtedAt < DOUBT_MS_MAX;
    try {
      const block = await rpc.ask({
        method: "eth_getBlockByNumber",
        params: ["latest", false],
        read: (result) => {
          const newest = wire.block(result);
          if (newest === null) throw new TypeError("no newest block");
          if (seen !== null && isTrusted) checkNext(newest, seen.block);
          return newest;
        },
      });
      doubtedAt = null;
      if (seen?.block.hash !== block.hash) seen = { block, at: performance.now() };
    } catch (error) {
      if (!(error instanceof StaleNode) || seen === null) throw error;
      doubtedAt ??= performance.now();
    }
    askedAt = performance.now();
    return seen;
  }

  return async (ageMs = 0) => {
    if (seen !== null && performance.now() - askedAt < ageMs) return seen;
    asking ??= question().finally(() => {
      asking = null;
    });
    return asking;
  };
}

/** @throws StaleNode for a block that can't follow the one that was seen */
function checkNext(newest: wire.Block, seen: wire.Block): void {
  if (newest.number < seen.number) throw new StaleNode("an older block");
  const isJump = newest.number - seen.number > JUMP_BLOCKS_MAX || newest.timestamp - seen.timestamp > JUMP_SECONDS_MAX;
  if (isJump) throw new StaleNode("a block far ahead");
}
