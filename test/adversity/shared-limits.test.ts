// Gateways that share a Postgres divide the limit of an agent's calls: once they have counted each other, they run no more
// together than one alone may, and none of them starves.
import { expect, setDefaultTimeout, test } from "bun:test";
import type { PayingTenant } from "../support/chain/paying.ts";
import type { Gateway } from "../support/gateway/gateway.ts";
import { openReplicas } from "../support/gateway/replicas.ts";
import { startUpstream } from "../support/http/upstream.ts";
import { until } from "../support/until.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

/** An upstream that counts what it works on, by the path of the agent, and answers when it is told to. */
function countingUpstream() {
  const now = new Map<string, Set<PromiseWithResolvers<void>>>();
  const peaks = new Map<string, number>();
  const seen = new Map<string, number>();
  let answersIn: number | null = null;
  const upstream = startUpstream(async (request) => {
    const { pathname } = new URL(request.url);
    const running = now.get(pathname) ?? new Set();
    const call = Promise.withResolvers<void>();
    now.set(pathname, running.add(call));
    peaks.set(pathname, Math.max(peaks.get(pathname) ?? 0, running.size));
    seen.set(pathname, (seen.get(pathname) ?? 0) + 1);
    if (answersIn !== null) setTimeout(call.resolve, answersIn);
    await call.promise;
    running.delete(call);
    return Response.json({ hello: "world" });
  });
  return {
    ...upstream,
    running: (path: string) => now.get(path)?.size ?? 0,
    peak: (path: string) => peaks.get(path) ?? 0,
    seen: (path: string) => seen.get(path) ?? 0,
    /** What runs now and what comes is answered after so many milliseconds. */
    answer(ms: number): void {
      answersIn = ms;
      for (const running of now.values()) for (const call of running) setTimeout(call.resolve, ms);
    },
  };
}

interface World {
  readonly gateways: readonly Gateway[];
  readonly tenant: PayingTenant;
  readonly upstream: ReturnType<typeof countingUpstream>;
  agent(path: string): Promise<string>;
  /** Statuses of the answers of so many calls through one gateway: once each has ended, or come whole. */
  calls(at: number, agentId: string, suffix: string, count: number): Promise<unknown>[];
}

/** Until the gateway knows how many of them there are, and has divided by that. */
async function untilCounted(gateway: Gateway, replicas: number): Promise<void> {
  const counts = () => [...gateway.log().matchAll(/"replicas_counted","replicas":(\d+)/g)].map(([, count]) => count);
  await until(() => (counts().at(-1) ?? "1") === `${replicas}`);
}

async function world(limit: number, count: number, act: (world: World) => Promise<void>): Promise<void> {
  await using replicas = await openReplicas();
  const upstream = countingUpstream();
  try {
    const env = { TOLLGATE_AGENT_CONCURRENCY: `${limit}` };
    const gateways: Gateway[] = [];
    for (let i = 0; i < count; i++) gateways.push(await replicas.start({ env }));
    await Promise.all(gateways.map((gateway) => untilCounted(gateway, count)));
    const tenant = await replicas.tenant(gateways[0] as Gateway);
    const call = async (at: number, id: string, suffix: string): Promise<unknown> => {
      const url = `${gateways[at]?.url}/v1/proxy/${id}`;
      const headers = { ...tenant.headers, prefer: "wait=60" };
      const response = await fetch(`${url}${suffix}`, { method: "POST", body: "{}", headers });
      // On a busy machine it may be refused for having waited, and comes again.
      if (response.status === 503) return call(at, id, suffix);
      const { invocation_id } = (await response.json()) as { invocation_id?: string };
      if (invocation_id === undefined) return response.status;
      const ended = await fetch(`${url}/invocations/${invocation_id}`, { headers });
      return ((await ended.json()) as { status: string }).status;
    };
    await act({
      gateways,
      tenant,
      upstream,
      agent: (path) => tenant.agent({ upstream_url: `${upstream.url}${path}` }),
      calls: (at, id, suffix, count) => Array.from({ length: count }, () => call(at, id, suffix)),
    });
  } finally {
    await upstream.stop();
  }
}

const LIMIT = 32;
/** At once at one gateway, of which each is let in or waits. */
const AT_ONCE = 40;

test.concurrent("together two gateways run as many of an agent's calls as one may, on each path", () =>
  world(LIMIT, 2, async ({ upstream, agent, calls }) => {
    const [polled, streamed] = [await agent("polled"), await agent("streamed")];
    const polls = [0, 1].flatMap((at) => calls(at, polled, "", AT_ONCE));
    const streams = [0, 1].flatMap((at) => calls(at, streamed, "/stream", AT_ONCE));
    await until(() => upstream.running("/polled") === LIMIT);
    await until(() => upstream.running("/streamed") === LIMIT);
    // Long enough that one call too many would meet those before it.
    upstream.answer(300);
    expect(new Set(await Promise.all(polls))).toEqual(new Set(["succeeded"]));
    expect(new Set(await Promise.all(streams))).toEqual(new Set([200]));
    expect({ polled: upstream.peak("/polled"), streamed: upstream.peak("/streamed") }).toEqual({
      polled: LIMIT,
      streamed: LIMIT,
    });
    expect([upstream.seen("/polled"), upstream.seen("/streamed")]).toEqual([polls.length, streams.length]);
  }));

test.concurrent("a gateway runs all that an agent may once the other one is gone, though no call of the agent ends", () =>
  world(LIMIT, 2, async ({ gateways, upstream, agent, calls }) => {
    const [polled, streamed] = [await agent("polled"), await agent("streamed")];
    const all = [...calls(0, polled, "", AT_ONCE), ...calls(0, streamed, "/stream", AT_ONCE)];
    await until(() => upstream.running("/polled") === LIMIT / 2);
    await until(() => upstream.running("/streamed") === LIMIT / 2);
    await gateways[1]?.kill9();
    await until(() => upstream.running("/polled") === LIMIT);
    await until(() => upstream.running("/streamed") === LIMIT);
    upstream.answer(0);
    await Promise.all(all);
    expect([upstream.peak("/polled"), upstream.peak("/streamed")]).toEqual([LIMIT, LIMIT]);
  }));

test.concurrent("of a limit of two, each of two gateways has its turn though neither ever runs out of calls", () =>
  world(2, 2, async ({ upstream, agent, calls }) => {
    const id = await agent("turns");
    upstream.answer(5);
    const served = [0, 0];
    const isOver = () => Math.min(...served) >= 4;
    // More than one at once, so that there is always one that waits.
    const caller = async (at: number) => {
      while (!isOver()) {
        const [status] = await Promise.all(calls(at, id, "", 1));
        if (status === "succeeded") served[at] = (served[at] ?? 0) + 1;
      }
    };
    const callers = [0, 1].flatMap((at) => Array.from({ length: 4 }, () => caller(at)));
    await Promise.all(callers);
    expect(upstream.peak("/turns")).toBeLessThanOrEqual(2);
  }));

test.concurrent("of a limit of one, each of three gateways runs one call at a time", () =>
  world(1, 3, async ({ upstream, agent, calls }) => {
    const id = await agent("one");
    upstream.answer(5);
    const served: number[] = [];
    const stream = async (at: number) => {
      expect(await Promise.all(calls(at, id, "/stream", 1))).toEqual([200]);
      served.push(at);
    };
    const all = [0, 1, 2].flatMap((at) => Array.from({ length: 4 }, () => stream(at)));
    const polled = calls(1, await agent("other"), "", 6);
    await Promise.all([...all, ...polled]);
    expect(served.sort()).toEqual([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
    expect(upstream.peak("/one")).toBeLessThanOrEqual(3);
  }));
