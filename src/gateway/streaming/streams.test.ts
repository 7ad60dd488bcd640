import { expect, test } from "bun:test";
import { Fault } from "../../core/fault.ts";
import { createStreamLimits, type StreamPermit } from "./streams.ts";

const here = new AbortController().signal;
const outcome = (taking: Promise<unknown>) =>
  taking.then(
    () => "taken",
    (error) => (error instanceof Fault ? `${error.kind} ${error.retryAfterSeconds}` : String(error)),
  );

test("an agent's calls wait for each other, first come first served, and for nobody else's", async () => {
  const room = createStreamLimits({ agentConcurrency: 1, stopping: here });
  const first = await room.take("acme", "a", true, here);
  const order: number[] = [];
  const noted = async (number: number) => {
    const place = await room.take("acme", "a", true, here);
    order.push(number);
    return place;
  };
  const [second, third] = [noted(2), noted(3)];
  const [other, connection] = await Promise.all([
    room.take("acme", "b", true, here),
    room.take("acme", "a", false, here),
  ]);
  expect(order).toEqual([]);
  first.release();
  first.release();
  await second;
  await Promise.resolve();
  expect(order).toEqual([2]);
  (await second).release();
  (await third).release();
  expect(order).toEqual([2, 3]);
  other.release();
  connection.release();
  (await room.take("acme", "a", true, here)).release();
});

test("a call that waits for too long, or whose caller has gone, is refused and takes no place later", async () => {
  const room = createStreamLimits({ agentConcurrency: 1, stopping: here, waitMs: 20 });
  const held = await room.take("acme", "a", true, here);
  expect(await outcome(room.take("acme", "a", true, here))).toBe("unavailable 5");
  const leaving = new AbortController();
  const gone = outcome(room.take("acme", "a", true, leaving.signal));
  leaving.abort();
  expect(await gone).toBe("unavailable 5");
  expect(await outcome(room.take("acme", "a", true, leaving.signal))).toBe("unavailable 5");
  held.release();
  expect(await outcome(room.take("acme", "a", true, here))).toBe("taken");
});

test("a place that comes free while someone gives up waiting goes to the next call", async () => {
  const room = createStreamLimits({ agentConcurrency: 1, stopping: here, waitMs: 200 });
  const held = await room.take("acme", "a", true, here);
  const leaving = new AbortController();
  const gone = outcome(room.take("acme", "a", true, leaving.signal));
  // A client that ends has all its connections closed in one turn.
  leaving.abort();
  held.release();
  expect(await gone).toBe("unavailable 5");
  expect(await outcome(room.take("acme", "a", true, here))).toBe("taken");
});

test("where an agent may run more than before, those who wait are let in, few in each turn of the event loop", async () => {
  let agentMax = 1;
  const room = createStreamLimits({ agentConcurrency: () => agentMax, stopping: here });
  const agents = Array.from({ length: 200 }, (_, at) => `agt_${at}`);
  for (const agent of agents) await room.take("acme", agent, true, here);
  let entered = 0;
  const waiting = agents.flatMap((agent) =>
    [1, 2, 3].map(() => room.take("acme", agent, true, here).then(() => entered++)),
  );
  agentMax = 3;
  const raised = room.raised();
  await Promise.resolve();
  expect(entered).toBeLessThanOrEqual(64);
  await raised;
  await Bun.sleep(0);
  expect(entered).toBe(2 * agents.length);
  agentMax = 4;
  await room.raised();
  await Promise.all(waiting);
});

test("as many calls wait for one agent as may, and one more is refused", async () => {
  const room = createStreamLimits({ agentConcurrency: 1, stopping: here, waitMs: 200 });
  const held = await room.take("acme", "a", true, here);
  const waiting = Array.from({ length: 257 }, () => outcome(room.take("acme", "a", true, here)));
  expect(await waiting[256]).toBe("unavailable 5");
  held.release();
  expect(await waiting[0]).toBe("taken");
  await Promise.all(waiting);
});

test("no call is let in when it is time to stop, nor waits any longer", async () => {
  const stopping = new AbortController();
  const room = createStreamLimits({ agentConcurrency: 1, stopping: stopping.signal });
  const held = await room.take("acme", "a", true, here);
  const waiting = outcome(room.take("acme", "a", true, here));
  stopping.abort();
  expect(await waiting).toBe("unavailable 5");
  held.release();
  expect(await outcome(room.take("acme", "b", true, here))).toBe("unavailable 5");
});

test("a call that was accepted before takes no other's place, and those of each tenant are bounded", async () => {
  const stopping = new AbortController().signal;
  const room = createStreamLimits({ agentConcurrency: 2, stopping, waitMs: 20 });
  const resumed = (tenant: string) => room.forResumed(tenant, "agt_1");
  const own = [await resumed("hostile"), await resumed("hostile")];
  // The agent's places are taken now; further ones stand beside them.
  const beside: StreamPermit[] = [];
  for (;;) {
    try {
      beside.push(await resumed("hostile"));
    } catch {
      break;
    }
  }
  expect(beside.length).toBe(1792);
  expect(await resumed("other")).toBeDefined();
  expect(await room.take("acme", "agt_2", true, stopping)).toBeDefined();
  for (const place of [...own, ...beside]) place.release();
  expect(await room.take("acme", "agt_1", true, stopping)).toBeDefined();
});

test("a tenant with any number of agents leaves places to others, and room to wait", async () => {
  const leaving = new AbortController();
  const room = createStreamLimits({ agentConcurrency: 64, stopping: here });
  const held: StreamPermit[] = [];
  const refused = Array.from({ length: 9000 }, async (_, at) => {
    const place = await room.take("hostile", `agt_${at % 400}`, true, leaving.signal).catch(() => null);
    if (place !== null) held.push(place);
    return place === null;
  });
  (await room.take("other", "agt_x", true, here)).release();
  await Bun.sleep(0);
  expect(held.length).toBeGreaterThan(3000);
  const mine = await Promise.all(
    Array.from({ length: 300 }, () => room.take("other", "agt_y", true, here).catch(() => null)),
  );
  expect(mine.filter((place) => place !== null).length).toBe(64);
  leaving.abort();
  expect((await Promise.all(refused)).filter(Boolean).length).toBe(9000 - held.length);
});
