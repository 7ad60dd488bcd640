import { describe, expect, test } from "bun:test";
import { startUpstream } from "../../../test/support/http/upstream.ts";
import { LOOPBACK, makeJob } from "../../../test/support/stores/jobs.ts";
import { hostRules } from "../../core/host.ts";
import { createOutbound } from "../../http/client/outbound.ts";
import { callHttp, type MemoryHold, ResponseMemory, runCall } from "./call.ts";

const MIB = 1024 * 1024;
const LONG = 300_000;
const never = new AbortController().signal;

let tenants = 0;

/** What a call of a tenant of its own holds. */
function holdOf(memory: ResponseMemory, signal = never): MemoryHold {
  return memory.hold(`tenant-${++tenants}`, "agt_1", signal);
}

/** Memory for eight answers, which no worker has less than. */
function small(): ResponseMemory {
  return new ResponseMemory(1, 8 * MIB);
}

/** The memory, with all slots but these taken. */
async function nearlyFull(left: number): Promise<ResponseMemory> {
  const memory = small();
  for (let taken = left; taken < 8; taken++) await holdOf(memory).grow(LONG);
  return memory;
}

/** Whether it is settled by the next turn. */
function isSettled(work: Promise<void> | undefined): Promise<boolean> {
  const later = new Promise<boolean>((resolve) => setImmediate(() => resolve(false)));
  return Promise.race([work?.then(() => true) ?? true, later]);
}

describe("memory for answers", () => {
  test("is free for short ones, however many", () => {
    const memory = small();
    for (let i = 0; i < 100; i++) expect(holdOf(memory).grow(16_000)).toBeUndefined();
  });

  test("lets a longer one wait until another has ended, first come first served", async () => {
    const memory = await nearlyFull(2);
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
    const memory = await nearlyFull(2);
    const first = holdOf(memory);
    await first.grow(LONG);
    await holdOf(memory).grow(LONG);
    void holdOf(memory).grow(LONG);
    expect(await isSettled(first.grow(MIB))).toBe(true);
  });

  test("is not used up by one tenant", async () => {
    const memory = new ResponseMemory(1, 22 * MIB);
    const greedy = Array.from({ length: 100 }, () => memory.hold("greedy", "agt_1", never));
    for (const hold of greedy) void hold.grow(LONG);
    expect(await isSettled(holdOf(memory).grow(LONG))).toBe(true);
    // Twenty-one places: a tenant alone leaves some of them free, and its agent too.
    const served = await Promise.all(greedy.map((hold) => isSettled(hold.grow(LONG))));
    expect(served.filter(Boolean).length).toBeLessThan(18);
  });

  test("forgets who stops waiting, and tells why", async () => {
    const memory = await nearlyFull(2);
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
function setUp(memory: ResponseMemory, upstream_timeout_ms: number) {
  const upstream = startUpstream((request) => new Response("x".repeat(Number(new URL(request.url).pathname.slice(1)))));
  const outbound = createOutbound({ rules: hostRules({ allow: LOOPBACK.allow_hosts }), extraCa: null });
  const upstreams = { outbound, memory, settings: { ...LOOPBACK, upstream_timeout_ms } };
  const run = (size: number, capture = true) =>
    runCall(makeJob(`${upstream.url}${size}`, { call: { capture } }), upstreams, new AbortController(), callHttp);
  return { run, stop: upstream.stop };
}

test("calls whose answers need more memory than there is wait for their turn, and get them whole", async () => {
  const { run, stop } = setUp(small(), 10_000);
  const outcomes = await Promise.all(Array.from({ length: 12 }, () => run(MIB)));
  expect(outcomes.map(({ response }) => response?.length)).toEqual(outcomes.map(() => MIB));
  await stop();
});

test("a call that waits for memory ends at its own deadline; short and uncaptured answers need none", async () => {
  const memory = await nearlyFull(0);
  const { run, stop } = setUp(memory, 300);
  const [long, short, uncaptured] = await Promise.all([run(MIB), run(10), run(MIB, false)]);
  expect(long).toMatchObject({ status: "failed", error_class: "timeout", upstream_status: 200 });
  expect([short?.status, uncaptured?.status]).toEqual(["succeeded", "succeeded"]);
  await stop();
});
