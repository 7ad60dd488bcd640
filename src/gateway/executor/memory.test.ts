import { describe, expect, test } from "bun:test";
import { LOOPBACK, makeJob } from "../../../test/support/jobs.ts";
import { startUpstream } from "../../../test/support/upstream.ts";
import { hostRules } from "../../core/host.ts";
import { createDecoderShare } from "../../edge/decoder-share.ts";
import { createOutbound } from "../../edge/outbound.ts";
import { callHttp, runCall } from "./call.ts";
import { createMemory, type Hold, type Memory } from "./memory.ts";

const MIB = 1024 * 1024;
const LONG = 300_000;
const never = new AbortController().signal;

let tenants = 0;

/** What a call of a tenant of its own holds. */
function holdOf(memory: Memory, signal = never): Hold {
  return memory.hold(`tenant-${++tenants}`, "agt_1", signal);
}

/** Memory for two answers of the captured length, and for one long message of 3 MiB. */
function small(): Memory {
  return createMemory(1, 3 * MIB, 9 * MIB);
}

/** Whether it is settled by the next turn. */
function isSettled(work: Promise<void> | undefined): Promise<boolean> {
  const later = new Promise<boolean>((resolve) => setImmediate(() => resolve(false)));
  return Promise.race([work?.then(() => true) ?? true, later]);
}

describe("the memory for answers", () => {
  test("is free for short ones, however many", () => {
    const memory = small();
    for (let i = 0; i < 100; i++) expect(holdOf(memory).grow(60_000)).toBeUndefined();
  });

  test("lets a longer one wait until another has ended, first come first served", async () => {
    const memory = small();
    const [a, b, c, d] = [1, 2, 3, 4].map(() => holdOf(memory));
    await a?.grow(LONG);
    await b?.grow(LONG);
    const third = c?.grow(LONG);
    const fourth = d?.grow(LONG);
    expect([await isSettled(third), await isSettled(fourth)]).toEqual([false, false]);
    a?.release();
    expect([await isSettled(third), await isSettled(fourth)]).toEqual([true, false]);
    b?.release();
    expect(await isSettled(fourth)).toBe(true);
  });

  test("keeps nobody who has begun from going on", async () => {
    const memory = small();
    const first = holdOf(memory);
    await first.grow(LONG);
    await holdOf(memory).grow(LONG);
    void holdOf(memory).grow(LONG);
    expect(await isSettled(first.grow(MIB))).toBe(true);
    expect(await isSettled(first.grow(2 * MIB))).toBe(true);
  });

  test("is not used up by one tenant", async () => {
    const memory = createMemory(1, 3 * MIB, 64 * MIB);
    const greedy = Array.from({ length: 100 }, () => memory.hold("greedy", "agt_1", never));
    for (const hold of greedy) void hold.grow(LONG);
    expect(await isSettled(holdOf(memory).grow(LONG))).toBe(true);
    // Twenty-one places: a tenant alone leaves some of them free, and its agent too.
    const served = await Promise.all(greedy.map((hold) => isSettled(hold.grow(LONG))));
    expect(served.filter(Boolean).length).toBeLessThan(18);
  });

  test("gives a message that is too long for it its turn, alone", async () => {
    const memory = createMemory(1, 100 * MIB, 9 * MIB);
    const [a, b] = [holdOf(memory), holdOf(memory)];
    expect(await isSettled(a.grow(50 * MIB))).toBe(true);
    const second = b.grow(50 * MIB);
    expect(await isSettled(second)).toBe(false);
    a.release();
    expect(await isSettled(second)).toBe(true);
  });

  test("forgets who stops waiting, and tells why", async () => {
    const memory = small();
    const [a, b] = [holdOf(memory), holdOf(memory)];
    await Promise.all([a.grow(LONG), b.grow(LONG)]);
    const stop = new AbortController();
    const stopped = holdOf(memory, stop.signal);
    const waiting = stopped.grow(LONG);
    const next = holdOf(memory).grow(LONG);
    stop.abort("enough");
    expect(await waiting?.catch((reason: unknown) => reason)).toBe("enough");
    stopped.release();
    a.release();
    expect(await isSettled(next)).toBe(true);
    b.release();
    expect(await isSettled(holdOf(memory).grow(LONG))).toBe(true);
  });
});

/** An upstream that answers as many bytes as its path says, and calls under `memory`. */
function setUp(memory: Memory, upstream_timeout_ms: number) {
  const upstream = startUpstream(
    (request) => new Response("x".repeat(Number(new URL(request.url).pathname.slice(1)))),
  );
  const outbound = createOutbound({ rules: hostRules({ allow: LOOPBACK.allow_hosts }), extraCa: null });
  const decoders = createDecoderShare();
  const upstreams = { outbound, memory, decoders, settings: { ...LOOPBACK, upstream_timeout_ms } };
  const run = (size: number, capture = true) =>
    runCall(makeJob(`${upstream.url}${size}`, { call: { capture } }), upstreams, never, callHttp);
  return { run, stop: upstream.stop };
}

test("calls whose answers need more memory than there is wait for their turn, and get them whole", async () => {
  const { run, stop } = setUp(small(), 10_000);
  const outcomes = await Promise.all(Array.from({ length: 12 }, () => run(MIB)));
  expect(outcomes.map(({ response }) => response?.length)).toEqual(outcomes.map(() => MIB));
  await stop();
});

test("a call that waits for memory ends at its own deadline; short and uncaptured answers need none", async () => {
  const memory = small();
  await Promise.all([holdOf(memory).grow(LONG), holdOf(memory).grow(LONG)]);
  const { run, stop } = setUp(memory, 300);
  const [long, short, uncaptured] = await Promise.all([run(MIB), run(10), run(MIB, false)]);
  expect(long).toMatchObject({ status: "failed", error_class: "timeout", upstream_status: 200 });
  expect([short?.status, uncaptured?.status]).toEqual(["succeeded", "succeeded"]);
  await stop();
});
