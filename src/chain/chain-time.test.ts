import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { startChain, type TestChain } from "../../test/support/chain/chain.ts";
import { startRpcRelay } from "../../test/support/chain/rpc-relay.ts";
import { account, ending, NOON, request, settling } from "../../test/support/chain/settling.ts";
import { outbound } from "../../test/support/chain/wallet.ts";
import { BASE } from "../../test/support/network.ts";
import { type Place, places } from "../../test/support/stores/stores.ts";
import { Fault } from "../core/fault.ts";
import { silentLog } from "../core/log.ts";
import type { Store } from "../storage/store.ts";
import { createChain } from "./chain.ts";
import type { Block } from "./json-rpc.ts";
import { createChainTime } from "./newest-block.ts";

const HOUR_MS = 3_600_000;
const hash = `0x${"11".repeat(32)}` as const;
const block: Block = { number: 7, hash, parentHash: hash, timestamp: 0, baseFee: 1n };

/** A stand-in for the chain, its newest block at noon, and a clock; what is warned of. */
function standIn() {
  const said: unknown[] = [];
  const turns = { clock: NOON, newest: NOON, next: null as number | null, asked: 0 };
  const time = createChainTime({
    chain: {
      sighting: async () => ({
        block: { ...block, timestamp: turns.newest / 1000 },
        at: performance.now(),
        isFirst: false,
      }),
      async nextTimestamp() {
        turns.asked++;
        return turns.next === null ? null : turns.next / 1000;
      },
      isSure: () => true,
    },
    clock: { now: () => turns.clock },
    log: { ...silentLog, warn: (event, fields) => void said.push([event, fields]) },
  });
  return { turns, time, said };
}

describe("the chain's time, by a stand-in for the chain,", () => {
  test.each([2_500, -2_500])("reaches to that of our clock when this is %i ms off", async (off) => {
    const { turns, time } = standIn();
    turns.clock = NOON + off;
    const { earliest, latest } = await time();
    expect(earliest).toBeWithin(NOON + Math.min(off, 0), NOON + Math.min(off, 0) + 500);
    expect(latest).toBeWithin(NOON + Math.max(off, 2_000), NOON + Math.max(off, 2_000) + 500);
  });

  test.each([1, -1])("is the chain's when our clock is wrong by %i hours, with one warning", async (hours) => {
    const { turns, time, said } = standIn();
    turns.clock = NOON + hours * HOUR_MS;
    for (let asked = 0; asked < 3; asked++) {
      const found = await time();
      expect(found.earliest - NOON).toBeWithin(0, 2000);
      expect(found.latest - found.earliest).toBe(2000);
    }
    expect(said).toEqual([["clock_differs_from_chain", { seconds_ahead: hours * 3600 }]]);
    turns.clock = NOON;
    await time();
    turns.clock = NOON - HOUR_MS;
    await time();
    expect(said).toHaveLength(2);
  });

  test("is that of the next block where the newest is old, and no warning is due", async () => {
    const { turns, time, said } = standIn();
    Object.assign(turns, { clock: NOON + HOUR_MS, next: NOON + HOUR_MS - 1000 });
    const LATER = expect.closeTo(NOON + HOUR_MS + 1000, -3);
    expect(await Promise.all([time(), time()])).toMatchObject([{ latest: LATER }, { latest: LATER }]);
    expect(said).toEqual([]);
    expect(turns.asked).toBe(1);
  });
});

describe("the time of a real chain", () => {
  let anvil: TestChain;
  beforeAll(async () => {
    anvil = await startChain();
  });
  afterAll(() => anvil.stop());
  const timeBy = (url: string, aheadMs: number) => {
    const clock = { now: () => Date.now() + aheadMs };
    const chain = createChain({ network: BASE, urls: [url], outbound, log: silentLog, clock, timeoutMs: 2000 });
    return createChainTime({ chain, clock, log: silentLog });
  };

  test("is right whatever our clock says, also long after the newest block", async () => {
    const realMs = Date.now();
    await anvil.rpc("evm_setNextBlockTimestamp", [Math.floor(realMs / 1000) + 2 * 3600]);
    await anvil.mine();
    for (const ahead of [-HOUR_MS, 0, HOUR_MS]) {
      expect((await timeBy(anvil.url, ahead)()).earliest - realMs - 2 * HOUR_MS).toBeWithin(-3000, 5000);
    }
  });

  test("goes on from when the newest block was seen first, however often that is looked at", async () => {
    await anvil.mine();
    const chain = createChain({ network: BASE, urls: [anvil.url], outbound, log: silentLog, timeoutMs: 2000 });
    const first = await chain.sighting(0);
    await Bun.sleep(20);
    expect(await chain.sighting(0)).toEqual(first);
    await anvil.mine();
    expect((await chain.sighting(60_000)).at).toBe(first.at);
    expect((await chain.sighting(0)).at).toBeGreaterThan(first.at);
  });

  test("is asked of no other node when one knows no next block, and is unknown without any node and with an old block until the next", async () => {
    const relay = await startRpcRelay(anvil.url);
    relay.on("eth_getBlockByNumber", {
      kind: "choose",
      choose: ([block]) => (block === "pending" ? { kind: "result", result: null } : { kind: "pass" }),
    });
    const time = timeBy(relay.url, 5 * HOUR_MS);
    await expect(time()).rejects.toMatchObject({ kind: "unavailable", message: "no fresh block" });
    await anvil.mine();
    expect((await time()).latest - Date.now()).toBeLessThan(3 * HOUR_MS);
    expect((await time()).latest - Date.now()).toBeLessThan(3 * HOUR_MS);
    await relay.refuse();
    await expect(timeBy(relay.url, 0)()).rejects.toMatchObject({ kind: "unavailable" });
    await relay.stop();
  });
});

describe("whether a payment is in time", () => {
  let place: Place;
  let store: Store;
  beforeAll(async () => {
    place = await places.sqlite();
    store = await place.open();
  });
  afterAll(async () => {
    await store.close();
    place.remove();
  });

  test.each([HOUR_MS, -HOUR_MS])("is judged by the chain when our clock is off by %i ms", async (off) => {
    const facilitator = settling(store, { now: NOON + off });
    facilitator.turns.time = async () => ({ earliest: NOON, latest: NOON });
    const inTime = await request();
    expect(await ending(facilitator.settle(account(), inTime))).toBe("settled");
    const seconds = (NOON + off) / 1000;
    const wrong = await request({ validAfter: seconds - 600, validBefore: seconds + 600 });
    expect(await ending(facilitator.settle(account(), wrong))).toBe("declined");
  });

  test.each([
    ["not good yet", { validAfter: NOON / 1000 + 2 }, "settled"],
    ["over soon", { validBefore: NOON / 1000 + 4 }, "settled"],
    ["not good yet for long", { validAfter: NOON / 1000 + 4 }, "declined"],
    ["over for both", { validBefore: NOON / 1000 - 1 }, "declined"],
  ])("is judged only by what clock and chain agree on, when the payment is %s", async (_name, words, end) => {
    const facilitator = settling(store);
    facilitator.turns.time = async () => ({ earliest: NOON, latest: NOON + 2_500 });
    expect(await ending(facilitator.settle(account(), await request(words)))).toBe(end);
  });

  test("is not answered when no node tells the time", async () => {
    const facilitator = settling(store);
    facilitator.turns.time = () => Promise.reject(new Fault("unavailable", "rpc unreachable"));
    const over = await request({ validBefore: NOON / 1000 - 1 });
    expect(await ending(facilitator.settle(account(), over))).toBe("unavailable");
  });
});
