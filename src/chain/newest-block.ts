// The newest block of the chain, as all nodes together know it: it does not go back because one of them is behind, nor
// far ahead because one of them is wrong. Where it stands still or is old, the nodes are compared, and those behind are put
// aside: a node that stands still answers every question, and so would keep the others from being asked.
import type { Clock } from "../core/clock.ts";
import { NEWEST, StaleNode } from "./endpoint.ts";
import type { Rpc } from "./rpc.ts";
import type * as wire from "./rpc-types.ts";

/** When all endpoints have said for this long what we did not believe, they are right. */
const DOUBT_MS_MAX = 30_000;
/** No chain grows by this much between two looks, unless nobody has looked for weeks. */
const JUMP_BLOCKS_MAX = 1_000_000;
const JUMP_SECONDS_MAX = 2 * JUMP_BLOCKS_MAX;
/** Five blocks of Base. */
const STILL_MS = 10_000;
/** Behind the machine's clock. */
const OLD_MS = 30_000;
/** How often nodes are compared. */
const COMPARED_EVERY_MS = 2_000;

export interface NewestBlock {
  readonly block: wire.Block;
  /** By performance.now. */
  readonly at: number;
  /** Nobody knows yet whether it stands still. */
  readonly isFirst: boolean;
}

/** The newest block of all answers so far. Those who ask at the same time share one question. */
export function createNewestBlock(rpc: Rpc, clock: Clock) {
  let seen: NewestBlock | null = null;
  let comparedAt = Number.NEGATIVE_INFINITY;
  let askedAt = Number.NEGATIVE_INFINITY;
  /** Since when no endpoint's answer has fitted the chain as we know it. */
  let doubtedAt: number | null = null;
  let asking: Promise<NewestBlock> | null = null;

  const isStill = ({ at }: NewestBlock) => performance.now() - at >= STILL_MS;
  const isOld = ({ block }: NewestBlock) => clock.now() - block.timestamp * 1000 >= OLD_MS;

  function see(block: wire.Block, isFirst = seen === null): NewestBlock {
    if (seen?.block.hash !== block.hash) seen = { block, at: performance.now(), isFirst };
    return seen;
  }

  /** The highest counts. What is not higher than a block that stands still, or is ten seconds older, lies behind. */
  async function compare(known: NewestBlock): Promise<NewestBlock> {
    const heads = (await rpc.heads()).filter(({ block }) => !isFarAhead(block, known.block));
    comparedAt = performance.now();
    // Others may have seen a newer one meanwhile.
    const start = seen !== null && seen.block.number > known.block.number ? seen.block : known.block;
    const highest = heads.reduce((high, { block }) => (block.number > high.number ? block : high), start);
    for (const { endpoint, block } of heads) {
      const isBehind = isStill(known) ? block.number <= known.block.number : false;
      if (block.number === highest.number || !(isBehind || isOlder(block, highest))) continue;
      endpoint.putAside(() => (seen?.block.timestamp ?? 0) - STILL_MS / 1000);
    }
    return see(highest, known.isFirst);
  }

  async function question(): Promise<NewestBlock> {
    const isTrusted = doubtedAt === null || performance.now() - doubtedAt < DOUBT_MS_MAX;
    const read = (result: unknown) => {
      const newest = NEWEST.read(result);
      if (seen !== null && isTrusted) checkNext(newest, seen.block);
      return newest;
    };
    const isFirst = seen === null;
    let known = seen;
    try {
      known = see(await rpc.ask({ ...NEWEST, read }));
      doubtedAt = null;
    } catch (error) {
      if (!(error instanceof StaleNode) || known === null) throw error;
      doubtedAt ??= performance.now();
    }
    const isDue = performance.now() - comparedAt >= COMPARED_EVERY_MS;
    const isSuspect = isDue && (isFirst || isStill(known) || isOld(known));
    if (rpc.wasContradicted() || isSuspect) known = await compare(known);
    askedAt = performance.now();
    return known;
  }

  return {
    /** @param ageMs how old the answer may be */
    async newest(ageMs = 0): Promise<NewestBlock> {
      if (seen !== null && performance.now() - askedAt < ageMs) return seen;
      asking ??= question().finally(() => {
        asking = null;
      });
      return asking;
    },
    /** The newest block that any node knows: for a refusal, which a node that knows less would give too. */
    highest: async () => compare(seen ?? (await question())),
    /** Whether blocks still come, as far as the nodes tell: a chain that makes some has a new one, or one of this time. */
    isFresh: () => seen !== null && !(isStill(seen) && isOld(seen)),
    /** Whether that is sure when the nodes tell this time (milliseconds): a first block alone does not show that others come. */
    isSure: (time: number) => seen !== null && (clock.now() - time < OLD_MS || !(seen.isFirst || isStill(seen))),
  };
}

function isOlder(block: wire.Block, than: wire.Block): boolean {
  return (than.timestamp - block.timestamp) * 1000 >= STILL_MS;
}

function isFarAhead(newest: wire.Block, seen: wire.Block): boolean {
  return newest.number - seen.number > JUMP_BLOCKS_MAX || newest.timestamp - seen.timestamp > JUMP_SECONDS_MAX;
}

/** @throws StaleNode for a block that can't follow the one that was seen */
function checkNext(newest: wire.Block, seen: wire.Block): void {
  if (newest.number < seen.number) throw new StaleNode("an older block");
  if (isFarAhead(newest, seen)) throw new StaleNode("a block far ahead");
}
