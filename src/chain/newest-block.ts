// The newest block of the chain, agreed among all nodes, and the chain's time derived from it. The block never goes back
// because one node is behind, nor far ahead because one node is wrong. When it stands still, leaps, or does not fit the
// machine's clock, the nodes are compared, and those behind or far ahead are put aside: a node that stands still answers
// every request, so failover alone would never leave it.
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import type { Clock } from "../core/time.ts";
import type { Chain } from "./chain.ts";
import type * as wire from "./json-rpc.ts";
import { ANY_STATE, type Head, NEWEST, type Rpc, StaleNode } from "./rpc.ts";

/** No chain grows by this much between two requests, unless none was made for weeks. */
const JUMP_BLOCKS_MAX = 1_000_000;
const JUMP_SECONDS_MAX = 2 * JUMP_BLOCKS_MAX;
/** Growth by so many blocks more than seconds between two heads is not progress, but another chain or nonsense. */
const LEAP_BLOCKS = 150;
/** Five blocks of Base. */
const STILL_MS = 10_000;
/** A block fits the machine's clock when its time differs by less. */
const OFF_MS = 30_000;

export interface NewestBlock {
  readonly block: wire.Block;
  /** When the block was first seen, by performance.now. */
  readonly at: number;
  /** The first block seen: it does not show yet whether the chain moves. */
  readonly isFirst: boolean;
}

export function createNewestBlock(rpc: Rpc, clock: Clock) {
  let seen: NewestBlock | null = null;
  let comparedAt = Number.NEGATIVE_INFINITY;
  let askedAt = Number.NEGATIVE_INFINITY;
  /** Since when no endpoint's answer has fitted the known chain; null while answers fit. */
  let doubtedAt: number | null = null;
  let asking: Promise<NewestBlock> | null = null;

  const isStill = ({ at }: NewestBlock) => performance.now() - at >= STILL_MS;
  // When all endpoints have contradicted the known chain for this long, they are right.
  const isTrusted = () => doubtedAt === null || performance.now() - doubtedAt < 30_000;
  const isSuspect = (block: wire.Block, known: wire.Block) =>
    isLeap(block, known) ||
    isFarAhead(block, known) ||
    (isAhead(block, clock.now()) && !isAhead(known, clock.now())) ||
    isEarly(block, known, clock.now());
  /** Whether a node that was put aside may be used again. */
  const fits = (block: wire.Block) => seen === null || !(isOlder(block, seen.block) || isSuspect(block, seen.block));

  function remember(block: wire.Block, isFirst = seen === null): NewestBlock {
    if (seen?.block.hash !== block.hash) seen = { block, at: performance.now(), isFirst };
    return seen;
  }

  /** Takes the highest credible block. A head not above a block that stands still, or ten seconds older, is behind. */
  async function compare(known: NewestBlock, isUnknown = false): Promise<NewestBlock> {
    const { heads, faultOf } = await judgedHeads(rpc, known, clock, isUnknown);
    comparedAt = performance.now();
    const isWrong = (block: wire.Block) => faultOf(block) !== null;
    // A concurrent request may have seen a newer block meanwhile.
    const blocks = [known, ...(seen === null ? [] : [seen]), ...heads].map(({ block }) => block);
    const credible = blocks.filter((block) => !(isWrong(block) || (isTrusted() && isFarAhead(block, known.block))));
    const highest = credible.reduce((high, block) => (block.number > high.number ? block : high));
    if (seen !== null && isWrong(seen.block)) seen = null;
    const isBehind = (block: wire.Block) =>
      isOlder(block, highest) || (isStill(known) && block.number <= known.block.number);
    for (const { endpoint, block } of heads) {
      const isLow = block.number !== highest.number && isBehind(block);
      const fault = faultOf(block) ?? (isLow ? "behind the others" : null);
      if (fault !== null) endpoint.putAside(fits, fault);
    }
    return remember(highest, known.isFirst);
  }

  /** The newest block by the first working node; null when all nodes that answer are behind the known block. */
  async function ask(known: NewestBlock | null): Promise<wire.Block | null> {
    const read = (result: unknown) => {
      const newest = NEWEST.read(result);
      if (known !== null && isTrusted() && newest.number < known.block.number) throw new StaleNode("an older block");
      return newest;
    };
    try {
      return await rpc.ask({ ...NEWEST, read });
    } catch (error) {
      if (error instanceof StaleNode && known !== null) return null;
      throw error;
    }
  }

  async function refresh(): Promise<NewestBlock> {
    const before = seen;
    const newest = await ask(before);
    const mayLeap = before !== null && newest !== null && isSuspect(newest, before.block);
    let known = before !== null && (newest === null || mayLeap) ? before : remember(newest as wire.Block);
    const isOff = Math.abs(behindMs(known.block, clock.now())) >= OFF_MS;
    const isCompareDue = performance.now() - comparedAt >= 2_000 && (before === null || isStill(known) || isOff);
    const { isContradicted, isBlockUnknown } = rpc.doubts();
    if (isContradicted || isBlockUnknown || mayLeap || isCompareDue) known = await compare(known, isBlockUnknown);
    if (known !== before || (newest !== null && !mayLeap)) doubtedAt = null;
    else doubtedAt ??= performance.now();
    askedAt = performance.now();
    return known;
  }

  return {
    /** Concurrent callers share one request. @param ageMs how old a cached answer may be */
    async newest(ageMs = 0): Promise<NewestBlock> {
      if (seen !== null && performance.now() - askedAt < ageMs) return seen;
      asking ??= refresh().finally(() => {
        asking = null;
      });
      return asking;
    },
    /** The highest block of all nodes: for a refusal, which a node that is behind would give too. */
    highest: async () => compare(seen ?? (await refresh())),
    /** Whether the chain moves: its newest block was seen just now, or has a time near the clock's. */
    isFresh: () => seen !== null && !(isStill(seen) && behindMs(seen.block, clock.now()) >= OFF_MS),
    /** Whether the newest block is ten seconds old, both since it was seen and by its time. What it refuses may be valid now. */
    standsStill: () => seen !== null && isStill(seen) && behindMs(seen.block, clock.now()) >= STILL_MS,
    /** Whether this chain time (milliseconds) can be relied on: a first block alone does not show that the chain moves. */
    isSure: (time: number) => seen !== null && (clock.now() - time < OFF_MS || !(seen.isFirst || isStill(seen))),
  };
}

/**
 * The heads of the nodes of our chain, and a judge of blocks against them. A block is wrong when it is far above, or later
 * than, the heads that fit the clock. The median of these heads and of the known block decides, so that a single wrong node
 * can't. Where no head fits the clock, the clock is wrong. A suspect head makes every node's chain ID be checked again.
 * @param isUnknown no node has answered for some block: then a head that no node answers for is wrong too
 */
async function judgedHeads(rpc: Rpc, known: NewestBlock, clock: Clock, isUnknown: boolean) {
  const all = await rpc.heads();
  const isUnserved = isUnknown ? await headsWithoutState(all, known.block) : () => false;
  const judge = (heads: readonly Head[], isAhead: (block: wire.Block) => boolean) => {
    const faultOf = (block: wire.Block) => {
      if (isUnserved(block)) return "a newest block that it does not know";
      const witnesses = all.filter((each) => isEarly(block, each.block, clock.now()));
      if (witnesses.length > 0 && 2 * witnesses.length >= all.length) return "earlier than the others";
      return isAhead(block) ? "ahead of the others" : null;
    };
    return { heads, faultOf };
  };
  const isSuspect = aheadOfMedian(all, known, clock.now());
  if (!all.some(({ block }) => isSuspect(block))) return judge(all, () => false);
  await Promise.all(all.map(({ endpoint }) => endpoint.test()));
  const heads = all.filter(({ endpoint }) => endpoint.state() === "good");
  return judge(heads, aheadOfMedian(heads, known, clock.now()));
}

/**
 * Judges whether a block is a head for which not even its own node answers, while another node answers for its own head.
 * Where no node answers for its head, the nodes know too little to judge any block.
 */
async function headsWithoutState(heads: readonly Head[], known: wire.Block): Promise<(block: wire.Block) => boolean> {
  const answers = async ({ endpoint }: Head, at: wire.Block) =>
    (await endpoint.ask({ ...ANY_STATE, at }).catch(() => null)) !== null;
  const hasState = await Promise.all(heads.map((head) => answers(head, head.block)));
  const isKnown = (await Promise.all(heads.map((head) => answers(head, known)))).includes(true);
  const alone = new Set(heads.filter((_, at) => !hasState[at]).map(({ block }) => block.hash));
  if (alone.size === heads.length) return () => false;
  return ({ hash }) => alone.has(hash) || (!isKnown && hash === known.hash);
}

function aheadOfMedian(heads: readonly Head[], known: NewestBlock, now: number): (block: wire.Block) => boolean {
  const fitting = heads.map(({ block }) => block).filter((block) => Math.abs(behindMs(block, now)) <= OFF_MS);
  const heights = fitting.map(({ number }) => number);
  const isKnownUsed = heads.length > 1 && !known.isFirst && !isAhead(known.block, now);
  if (isKnownUsed) heights.push(known.block.number + Math.max(0, Math.floor(behindMs(known.block, now) / 1000)));
  const median = heights.sort((a, b) => a - b)[Math.floor((heights.length - 1) / 2)];
  if (fitting.length === 0 || median === undefined) return () => false;
  return (block) =>
    block.number > median + LEAP_BLOCKS || (isAhead(block, now) && fitting.every((each) => isOlder(each, block)));
}

const behindMs = ({ timestamp }: wire.Block, now: number): number => now - timestamp * 1000;

const isAhead = (block: wire.Block, now: number): boolean => behindMs(block, now) < -OFF_MS;

const isOlder = (block: wire.Block, than: wire.Block): boolean => (than.timestamp - block.timestamp) * 1000 >= STILL_MS;

const isLeap = (newest: wire.Block, known: wire.Block): boolean =>
  newest.number - known.number > LEAP_BLOCKS + Math.max(0, newest.timestamp - known.timestamp);

const isFarAhead = (newest: wire.Block, known: wire.Block): boolean =>
  newest.number - known.number > JUMP_BLOCKS_MAX || newest.timestamp - known.timestamp > JUMP_SECONDS_MAX;

// Chain time, by which the token decides whether a payment is expired or not yet valid; a clock of ours may be wrong.

/** Up to this difference our clock may be as accurate as the chain time known here. */
const NEAR_MS = 3000;

/** Bounds of the chain's present time, in milliseconds. */
export interface TimeSpan {
  readonly earliest: number;
  readonly latest: number;
}

/** A block not below the known one, with an earlier time, while the known one fits the clock: the block's time is wrong. */
function isEarly(block: wire.Block, known: wire.Block, now: number): boolean {
  const fits = Math.abs(behindMs(known, now)) < OFF_MS;
  return fits && block.number >= known.number && isOlder(block, known) && behindMs(block, now) >= OFF_MS;
}

export interface ChainTimeOptions {
  readonly chain: Pick<Chain, "sighting" | "nextTimestamp" | "isSure">;
  readonly clock: Clock;
  readonly log: Log;
}

/** The returned function throws Fault `unavailable` when no node answers, or all that do may stand still. */
export function createChainTime({ chain, clock, log }: ChainTimeOptions): () => Promise<TimeSpan> {
  let next: Promise<number | null> = Promise.resolve(null);
  let askedAt = Number.NEGATIVE_INFINITY;
  let isFar = false;

  /** The pending block's `startOf`. Shared by all callers for a second, because a node builds the block for each request. */
  function askNext(): Promise<number | null> {
    if (performance.now() - askedAt < 1000) return next;
    askedAt = performance.now();
    next = chain
      .nextTimestamp()
      .then((timestamp) => (timestamp === null ? null : startOf(timestamp, performance.now())));
    return next;
  }

  function logDifference(differenceMs: number): void {
    const wasFar = isFar;
    isFar = Math.abs(differenceMs) > 60_000;
    const seconds = Math.round(differenceMs / 1000);
    if (isFar && !wasFar) log.warn("clock_differs_from_chain", { seconds_ahead: seconds });
    if (!isFar && wasFar) log.info("clock_agrees_with_chain");
  }

  async function timeAt({ block, at }: NewestBlock): Promise<number> {
    const time = startOf(block.timestamp, at) + performance.now();
    if (Math.abs(clock.now() - time) <= NEAR_MS) return time;
    // Where blocks are rare the newest one is old, so the time of the pending block is queried.
    const pending = await askNext();
    return pending === null ? time : Math.max(time, pending + performance.now());
  }

  return async () => {
    // A block up to ten seconds old will do, since its time is carried on by our own clock.
    let time = await timeAt(await chain.sighting(10_000));
    if (!chain.isSure(time)) time = await timeAt(await chain.sighting(0));
    if (!chain.isSure(time)) throw new Fault("unavailable", "no fresh block", { retryAfterSeconds: 2 });
    const difference = clock.now() - time;
    logDifference(difference);
    const own = Math.abs(difference) <= NEAR_MS ? clock.now() : time;
    // A block may be seen up to two seconds after its time: by then the next one comes.
    return { earliest: Math.min(time, own), latest: Math.max(time + 2000, own) };
  };
}

/** The chain's time when performance.now() was 0, by a block's time in unix seconds and when the block was seen. */
const startOf = (timestamp: number, at: number): number => timestamp * 1000 - at;
