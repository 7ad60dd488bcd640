// The newest block of the chain, as all nodes together know it: it does not go back because one of them is behind, nor far
// ahead because one of them is wrong. Where it stands still, leaps, or does not fit the machine's clock, the nodes are compared,
// and those behind or far ahead are put aside: one that stands still answers every question, and would keep the others from it.

import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import type { Clock } from "../core/time.ts";
import type { Chain } from "./chain.ts";
import type * as wire from "./json-rpc.ts";
import { ANY_STATE, type Head, NEWEST, type Rpc, StaleNode } from "./rpc.ts";

/** No chain grows by this much between two looks, unless nobody has looked for weeks. */
const JUMP_BLOCKS_MAX = 1_000_000;
const JUMP_SECONDS_MAX = 2 * JUMP_BLOCKS_MAX;
/** So many blocks more than the seconds between two heads are no progress, but another chain or nonsense. */
const LEAP_BLOCKS = 150;
/** Five blocks of Base. */
const STILL_MS = 10_000;
/** A block whose time differs by so much from the machine's clock does not fit it. */
const OFF_MS = 30_000;

export interface NewestBlock {
  readonly block: wire.Block;
  /** By performance.now. */
  readonly at: number;
  /** Nobody knows yet whether it stands still. */
  readonly isFirst: boolean;
}

export function createNewestBlock(rpc: Rpc, clock: Clock) {
  let seen: NewestBlock | null = null;
  let comparedAt = Number.NEGATIVE_INFINITY;
  let askedAt = Number.NEGATIVE_INFINITY;
  /** Since when no endpoint's answer has fitted the chain as we know it. */
  let doubtedAt: number | null = null;
  let asking: Promise<NewestBlock> | null = null;

  const isStill = ({ at }: NewestBlock) => performance.now() - at >= STILL_MS;
  // When all endpoints have said for this long what we did not believe, they are right.
  const isTrusted = () => doubtedAt === null || performance.now() - doubtedAt < 30_000;
  const isSuspect = (block: wire.Block, known: wire.Block) =>
    isLeap(block, known) ||
    isFarAhead(block, known) ||
    (isAhead(block, clock.now()) && !isAhead(known, clock.now())) ||
    isEarly(block, known, clock.now());
  /** Whether a node that was put aside may be used again. */
  const fits = (block: wire.Block) => seen === null || !(isOlder(block, seen.block) || isSuspect(block, seen.block));

  function see(block: wire.Block, isFirst = seen === null): NewestBlock {
    if (seen?.block.hash !== block.hash) seen = { block, at: performance.now(), isFirst };
    return seen;
  }

  /** The highest counts. What is not higher than a block that stands still, or is ten seconds older, lies behind. */
  async function compare(known: NewestBlock, isUnknown = false): Promise<NewestBlock> {
    const { heads, faultOf } = await judgedHeads(rpc, known, clock, isUnknown);
    comparedAt = performance.now();
    const isFalse = (block: wire.Block) => faultOf(block) !== null;
    // Others may have seen a newer one meanwhile.
    const blocks = [known, ...(seen === null ? [] : [seen]), ...heads].map(({ block }) => block);
    const credible = blocks.filter((block) => !(isFalse(block) || (isTrusted() && isFarAhead(block, known.block))));
    const highest = credible.reduce((high, block) => (block.number > high.number ? block : high));
    if (seen !== null && isFalse(seen.block)) seen = null;
    const isBehind = (block: wire.Block) =>
      isOlder(block, highest) || (isStill(known) && block.number <= known.block.number);
    for (const { endpoint, block } of heads) {
      const isLow = block.number !== highest.number && isBehind(block);
      const fault = faultOf(block) ?? (isLow ? "behind the others" : null);
      if (fault !== null) endpoint.putAside(fits, fault);
    }
    return see(highest, known.isFirst);
  }

  /** Null where all nodes that answer lie behind what is known. */
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

  async function question(): Promise<NewestBlock> {
    const before = seen;
    const newest = await ask(before);
    const mayLeap = before !== null && newest !== null && isSuspect(newest, before.block);
    let known = before !== null && (newest === null || mayLeap) ? before : see(newest as wire.Block);
    const isOff = Math.abs(behindMs(known.block, clock.now())) >= OFF_MS;
    const isDue = performance.now() - comparedAt >= 2_000 && (before === null || isStill(known) || isOff);
    const { isContradicted, isBlockUnknown } = rpc.doubts();
    if (isContradicted || isBlockUnknown || mayLeap || isDue) known = await compare(known, isBlockUnknown);
    if (known !== before || (newest !== null && !mayLeap)) doubtedAt = null;
    else doubtedAt ??= performance.now();
    askedAt = performance.now();
    return known;
  }

  return {
    /** Those who ask at the same time share one question. @param ageMs how old the answer may be */
    async newest(ageMs = 0): Promise<NewestBlock> {
      if (seen !== null && performance.now() - askedAt < ageMs) return seen;
      asking ??= question().finally(() => {
        asking = null;
      });
      return asking;
    },
    /** For a refusal, which a node that knows less would give too. */
    highest: async () => compare(seen ?? (await question())),
    /** Whether blocks still come, as far as the nodes tell: a chain that makes some has a new one, or one of this time. */
    isFresh: () => seen !== null && !(isStill(seen) && behindMs(seen.block, clock.now()) >= OFF_MS),
    /** Whether the newest block is ten seconds old, both since it was seen and by its time: what it refuses may be good by now. */
    standsStill: () => seen !== null && isStill(seen) && behindMs(seen.block, clock.now()) >= STILL_MS,
    /** Whether that is sure when the nodes tell this time (milliseconds): a first block alone does not show that others come. */
    isSure: (time: number) => seen !== null && (clock.now() - time < OFF_MS || !(seen.isFirst || isStill(seen))),
  };
}

/**
 * The heads of the nodes that are of our chain, and what is wrong with a block beside them: it is far above, or of a later time
 * than, the heads that fit the clock. The middle one of these and of the block that was known before decides, and not a
 * single wrong node. Where no head fits the clock, the clock is wrong. Such a head is the occasion to ask again of which
 * chain the nodes are.
 *
 * @param isUnknown no node has answered for some block: then a block that none knows is wrong too
 */
async function judgedHeads(rpc: Rpc, known: NewestBlock, clock: Clock, isUnknown: boolean) {
  const all = await rpc.heads();
  const isAlone = isUnknown ? await unanswered(all, known.block) : () => false;
  const judge = (heads: readonly Head[], isAhead: (block: wire.Block) => boolean) => {
    const faultOf = (block: wire.Block) => {
      if (isAlone(block)) return "a newest block that it does not know";
      const witnesses = all.filter((each) => isEarly(block, each.block, clock.now()));
      if (witnesses.length > 0 && 2 * witnesses.length >= all.length) return "earlier than the others";
      return isAhead(block) ? "ahead of the others" : null;
    };
    return { heads, faultOf };
  };
  const isSuspect = falseBeside(all, known, clock.now());
  if (!all.some(({ block }) => isSuspect(block))) return judge(all, () => false);
  await Promise.all(all.map(({ endpoint }) => endpoint.test()));
  const heads = all.filter(({ endpoint }) => endpoint.state() === "good");
  return judge(heads, falseBeside(heads, known, clock.now()));
}

/**
 * Which blocks no node answers for, not even the one that tells it, while another node has a newest block that it does answer
 * for. Where none has, the nodes know too little to judge any.
 */
async function unanswered(heads: readonly Head[], known: wire.Block): Promise<(block: wire.Block) => boolean> {
  const answers = ({ endpoint }: Head, at: wire.Block) =>
    endpoint.ask({ ...ANY_STATE, at }).then(
      () => true,
      () => false,
    );
  const isAnswered = await Promise.all(heads.map((head) => answers(head, head.block)));
  const isKnown = (await Promise.all(heads.map((head) => answers(head, known)))).includes(true);
  const alone = new Set(heads.filter((_, at) => !isAnswered[at]).map(({ block }) => block.hash));
  if (alone.size === heads.length) return () => false;
  return ({ hash }) => alone.has(hash) || (!isKnown && hash === known.hash);
}

function falseBeside(heads: readonly Head[], known: NewestBlock, now: number): (block: wire.Block) => boolean {
  const fitting = heads.map(({ block }) => block).filter((block) => Math.abs(behindMs(block, now)) <= OFF_MS);
  const heights = fitting.map(({ number }) => number);
  const isAnchor = heads.length > 1 && !known.isFirst && !isAhead(known.block, now);
  if (isAnchor) heights.push(known.block.number + Math.max(0, Math.floor(behindMs(known.block, now) / 1000)));
  const middle = heights.sort((a, b) => a - b)[Math.floor((heights.length - 1) / 2)];
  if (fitting.length === 0 || middle === undefined) return () => false;
  return (block) =>
    block.number > middle + LEAP_BLOCKS || (isAhead(block, now) && fitting.every((each) => isOlder(each, block)));
}

const behindMs = ({ timestamp }: wire.Block, now: number): number => now - timestamp * 1000;

const isAhead = (block: wire.Block, now: number): boolean => behindMs(block, now) < -OFF_MS;

const isOlder = (block: wire.Block, than: wire.Block): boolean => (than.timestamp - block.timestamp) * 1000 >= STILL_MS;

const isLeap = (newest: wire.Block, known: wire.Block): boolean =>
  newest.number - known.number > LEAP_BLOCKS + Math.max(0, newest.timestamp - known.timestamp);

const isFarAhead = (newest: wire.Block, known: wire.Block): boolean =>
  newest.number - known.number > JUMP_BLOCKS_MAX || newest.timestamp - known.timestamp > JUMP_SECONDS_MAX;

// The time of day by the chain, which the token goes by: a payment is over, or not yet valid, when the chain's time says
// so, and not because a clock of ours is wrong.

/** Within this difference our clock may be as right as the chain's time is known here. */
const NEAR_MS = 3000;

/** The time now lies between these, in milliseconds. */
export interface TimeSpan {
  readonly earliest: number;
  readonly latest: number;
}

/** A block's time in unix seconds, and when it was seen (performance.now): time has gone on since. */
interface TimeReading {
  readonly timestamp: number;
  readonly at: number;
}

/** Not below the known block and yet of an earlier time: one of the two times is wrong, here not the one that fits the clock. */
function isEarly(block: wire.Block, known: wire.Block, now: number): boolean {
  const fits = Math.abs(behindMs(known, now)) < OFF_MS;
  return fits && block.number >= known.number && isOlder(block, known) && behindMs(block, now) >= OFF_MS;
}

export interface ChainTimeOptions {
  readonly chain: Pick<Chain, "sighting" | "nextTimestamp" | "isSure">;
  readonly clock: Clock;
  readonly log: Log;
}

/** It throws Fault `unavailable` when no node answers, and when those that do may stand still. */
export function createChainTime({ chain, clock, log }: ChainTimeOptions): () => Promise<TimeSpan> {
  let next: Promise<TimeReading | null> = Promise.resolve(null);
  let askedAt = Number.NEGATIVE_INFINITY;
  let isFar = false;

  /** Asked once for all who need it, because it makes work for a node. */
  function askNext(): Promise<TimeReading | null> {
    if (performance.now() - askedAt < 1000) return next;
    askedAt = performance.now();
    next = chain
      .nextTimestamp()
      .then((timestamp) => (timestamp === null ? null : { timestamp, at: performance.now() }));
    return next;
  }

  function tell(differenceMs: number): void {
    const wasFar = isFar;
    isFar = Math.abs(differenceMs) > 60_000;
    const seconds = Math.round(differenceMs / 1000);
    if (isFar && !wasFar) log.warn("clock_differs_from_chain", { seconds_ahead: seconds });
    if (!isFar && wasFar) log.info("clock_agrees_with_chain");
  }

  async function timeAt({ block, at }: NewestBlock): Promise<number> {
    let time = timeOf({ timestamp: block.timestamp, at });
    // Where blocks are rare, the newest one is old, so the time that the next one would have is asked for.
    if (Math.abs(clock.now() - time) > NEAR_MS) {
      const reading = await askNext();
      if (reading !== null) time = Math.max(time, timeOf(reading));
    }
    return time;
  }

  return async () => {
    // How old the newest known block may be. Its time is carried on by our own clock, so it need not be asked often.
    let time = await timeAt(await chain.sighting(10_000));
    if (!chain.isSure(time)) time = await timeAt(await chain.sighting(0));
    if (!chain.isSure(time)) throw new Fault("unavailable", "no fresh block", { retryAfterSeconds: 2 });
    const difference = clock.now() - time;
    tell(difference);
    const own = Math.abs(difference) <= NEAR_MS ? clock.now() : time;
    // A block may be seen this long after its time: by then the next one comes.
    return { earliest: Math.min(time, own), latest: Math.max(time + 2000, own) };
  };
}

const timeOf = ({ timestamp, at }: TimeReading): number => timestamp * 1000 + (performance.now() - at);
