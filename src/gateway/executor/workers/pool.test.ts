import { afterEach, describe, expect, test } from "bun:test";
import { startRecordingProxy, startUpstream } from "../../../../test/support/http/upstream.ts";
import { startMcpServer } from "../../../../test/support/mcp/mcp-servers.ts";
import { LOOPBACK, makeJob } from "../../../../test/support/stores/jobs.ts";
import { type Log, type LogFields, silentLog } from "../../../core/log.ts";
import { batchOfJobs, type WorkerSettings } from "../job.ts";
import { createSupervisor, createWorkerPool, type WorkerPool } from "./pool.ts";

const open: Array<() => Promise<void>> = [];

afterEach(async () => {
  for (const close of open.splice(0).reverse()) await close();
});

function keep<T extends { stop(): Promise<void> }>(part: T): T {
  open.push(part.stop);
  return part;
}

function pool(size = 1, settings: Partial<WorkerSettings> = {}, log: Log = silentLog): WorkerPool {
  const made = createWorkerPool({
    size,
    settings: { ...LOOPBACK, ...settings },
    log,
  });
  open.push(made.close);
  made.start();
  return made;
}

const FRAGILE = new URL("../../../../test/support/gateway/fragile-worker.ts", import.meta.url).href;

function fragilePool(size = 1, script: () => string = () => FRAGILE): WorkerPool {
  const made = createWorkerPool({
    size,
    settings: LOOPBACK,
    log: silentLog,
    spawn: () => new Worker(script()),
  });
  open.push(made.close);
  made.start();
  return made;
}

function text(bytes: Uint8Array | null): string {
  return new TextDecoder().decode(bytes ?? new Uint8Array());
}

describe("a pool of workers", () => {
  test("runs jobs and gives each its own outcome", async () => {
    const upstream = keep(startUpstream(async (request) => new Response(await request.bytes())));
    const { run } = pool(2);
    const bodies = Array.from({ length: 700 }, (_, i) => `job ${i}`);
    const outcomes = await Promise.all(bodies.map((body) => run(makeJob(upstream.url, { body }))));
    expect(outcomes.map(({ response }) => text(response))).toEqual(bodies);
    expect(outcomes.every(({ status }) => status === "succeeded")).toBe(true);
  });

  test("jobs with long texts, however many and whatever stands in them, hold up no thread of theirs", async () => {
    const pauses: number[] = [];
    const warn = (_event: string, fields: LogFields = {}) =>
      pauses.push(Math.min(Number(fields["ms"]), Number(fields["cpu_ms"])));
    const { run } = pool(1, { blocked_ms: 20 }, { ...silentLog, warn });
    // Refused at the port, so that only the worker is at work.
    const secret = { name: "authorization", value: `Bearer ${'"'.repeat(60_000)}` };
    const headers: [string, string][] = [["x-long", '"'.repeat(15_000)]];
    const url = "http://127.0.0.1:9/";
    for (const options of [{ credential: secret }, { call: { headers } }, {}]) {
      await Promise.all(Array.from({ length: 512 }, () => run(makeJob(url, { ...options, body: "x" }))));
      // What the worker has seen of it comes once a second.
      await Bun.sleep(1_100);
    }
    expect(pauses.filter((ms) => ms > 75)).toEqual([]);
  });

  test("counts a long response as memory of its worker until it is recorded", async () => {
    const LONG = 600_000;
    const upstream = keep(startUpstream(({ url }) => new Response("x".repeat(Number(new URL(url).pathname.slice(1))))));
    const { run, recorded } = pool();
    const waiting: string[] = [];
    let most = 0;
    const jobs = Array.from({ length: 150 }, () => makeJob(`${upstream.url}${LONG}`));
    const all = jobs.map(async (job) => {
      const { status, resp_size } = await run(job);
      waiting.push(job.id);
      most = Math.max(most, waiting.length);
      expect([status, resp_size]).toEqual(["succeeded", LONG]);
    });
    const short = () => run(makeJob(`${upstream.url}100`));
    // Nothing more comes, however much else is done meanwhile.
    for (let before = -1; before !== waiting.length; ) {
      before = waiting.length;
      for (let time = 0; time < 30; time++) await short();
    }
    expect(most).toBeGreaterThan(10);
    let done = 0;
    while (done < jobs.length) {
      for (const id of waiting.splice(0)) {
        recorded(id);
        done++;
      }
      await short();
    }
    await Promise.all(all);
    // As many as there are places for, in a worker that is the only one.
    expect(most).toBeLessThan(100);
  });

  test("moves bodies of 32 MiB there, and what is captured back", async () => {
    const body = Buffer.alloc(32 * 1024 * 1024, "0123456789");
    const upstream = keep(
      startUpstream(async (request) => {
        const bytes = Buffer.from(await request.arrayBuffer());
        return new Response(bytes.equals(Buffer.alloc(bytes.length, "0123456789")) ? bytes : "damaged");
      }),
    );
    const outcome = await pool().run(makeJob(upstream.url, { body }));
    expect(outcome).toMatchObject({
      status: "succeeded",
      resp_size: 32 * 1024 * 1024,
      response_truncated: true,
    });
    expect(outcome.response?.length).toBe(1024 * 1024);
  });

  test("sends a view on a larger buffer, and leaves that buffer alone", async () => {
    const upstream = keep(startUpstream(async (request) => new Response(await request.bytes())));
    const whole = new Uint8Array(200_000).fill(65);
    const outcome = await pool().run(makeJob(upstream.url, { body: whole.subarray(10, 100_010) }));
    expect(outcome.resp_size).toBe(100_000);
    expect(whole.length).toBe(200_000);
  });

  test("cancels a job that runs, and only that", async () => {
    const seen = Promise.withResolvers<void>();
    const upstream = keep(
      startUpstream((request) => {
        if (!request.url.endsWith("/hang")) return new Response("ok");
        seen.resolve();
        return new Promise<Response>(() => {});
      }),
    );
    const workers = pool();
    const job = makeJob(`${upstream.url}hang`);
    const hanging = workers.run(job);
    await seen.promise;
    expect(workers.running).toBe(1);
    workers.cancel(job.id);
    workers.cancel("unknown");
    expect(await hanging).toMatchObject({ status: "failed", error_class: "cancelled" });
    expect(workers.running).toBe(0);
    expect((await workers.run(makeJob(upstream.url))).status).toBe("succeeded");
  });

  test("cancels a job that no worker has taken yet", async () => {
    const workers = pool();
    const job = makeJob("http://127.0.0.1:9/");
    const pending = workers.run(job);
    workers.cancel(job.id);
    expect(await pending).toMatchObject({ error_class: "cancelled", latency_ms: null });
  });

  test("keeps a session in one worker, and closes it at the end", async () => {
    const server = keep(await startMcpServer("everything"));
    const proxy = keep(startRecordingProxy(server.url));
    const workers = pool(2);
    const body = '{"jsonrpc":"2.0","id":1,"method":"tools/list"}';
    const job = () => workers.run(makeJob(proxy.url, { body, call: { protocol: "mcp" } }));
    const outcomes = await Promise.all(Array.from({ length: 6 }, job));
    expect(outcomes.map(({ status }) => status)).toEqual(outcomes.map(() => "succeeded"));
    expect(proxy.requests.filter((request) => request.body.includes('"initialize"'))).toHaveLength(1);
    await workers.close();
    expect(proxy.requests.at(-1)).toMatchObject({ method: "DELETE", status: 200 });
  });

  test("ends what runs when it is closed, and takes nothing more", async () => {
    const seen = Promise.withResolvers<void>();
    const gone = Promise.withResolvers<void>();
    const upstream = keep(
      startUpstream((request) => {
        request.signal.addEventListener("abort", () => gone.resolve());
        seen.resolve();
        return new Promise<Response>(() => {});
      }),
    );
    const workers = pool();
    const hanging = workers.run(makeJob(upstream.url));
    await seen.promise;
    await workers.close();
    await gone.promise;
    expect(await hanging).toMatchObject({ status: "failed", error_class: "internal" });
    expect(await workers.run(makeJob(upstream.url))).toMatchObject({
      error_class: "internal",
      latency_ms: null,
    });
  });
});

describe("a worker that dies", () => {
  for (const death of ["throw", "throw later", "reject", "exit"]) {
    test(`is replaced after "${death}", and what it ran ends internal`, async () => {
      const { run } = fragilePool();
      const [hanging, dying] = await Promise.all([
        run(makeJob("http://x/", { body: "hang" })),
        run(makeJob("http://x/", { body: death })),
      ]);
      for (const outcome of [hanging, dying]) {
        expect(outcome).toMatchObject({ status: "failed", error_class: "internal", upstream_status: null });
      }
      const next = await run(makeJob("http://x/", { body: "next" }));
      expect([next.status, text(next.response)]).toEqual(["succeeded", "next"]);
    });
  }

  test("takes nobody with it who waited for its successor", async () => {
    const { run } = fragilePool();
    const dying = run(makeJob("http://x/", { body: "exit" }));
    const later = dying.then(() => run(makeJob("http://x/", { body: "later" })));
    expect((await dying).error_class).toBe("internal");
    expect(text((await later).response)).toBe("later");
  });

  test("is replaced more and more slowly when that happens again and again", async () => {
    const { run } = fragilePool();
    const started = performance.now();
    for (let i = 0; i < 4; i++) await run(makeJob("http://x/", { body: "exit" }));
    expect(text((await run(makeJob("http://x/", { body: "well" }))).response)).toBe("well");
    // Pauses of 0, 50, 100 and 200 ms.
    expect(performance.now() - started).toBeGreaterThan(340);
  });

  test("leaves its jobs waiting for one that is ready, when it never was", async () => {
    let starts = 0;
    const { run } = fragilePool(1, () => (++starts < 3 ? "./no-such-worker.ts" : FRAGILE));
    expect(text((await run(makeJob("http://x/", { body: "patient" }))).response)).toBe("patient");
    expect(starts).toBe(3);
  });

  test("has its jobs ended rather than wait for ever, when none ever is ready", async () => {
    const { run } = fragilePool(1, () => "./no-such-worker.ts");
    expect(await run(makeJob("http://x/"))).toMatchObject({ error_class: "internal", latency_ms: null });
  });
});

describe("a worker that is stuck", () => {
  function impatientPool(upstream_timeout_ms: number): WorkerPool {
    const made = createWorkerPool({
      size: 1,
      settings: { ...LOOPBACK, upstream_timeout_ms },
      log: silentLog,
      spawn: () => new Worker(FRAGILE),
      graceMs: 150,
    });
    open.push(made.close);
    made.start();
    return made;
  }

  test("is replaced once a job is long past its deadline, and what it ran ends internal", async () => {
    const { run } = impatientPool(150);
    const started = performance.now();
    const outcomes = await Promise.all(["hang", "spin"].map((body) => run(makeJob("http://x/", { body }))));
    expect(performance.now() - started).toBeGreaterThan(290);
    for (const outcome of outcomes) {
      expect(outcome).toMatchObject({ status: "failed", error_class: "internal", upstream_status: null });
    }
    expect(text((await run(makeJob("http://x/", { body: "next" }))).response)).toBe("next");
  });

  test("is told from one whose answers wait because this thread was held up", async () => {
    const { run } = impatientPool(100);
    expect(text((await run(makeJob("http://x/", { body: "first" }))).response)).toBe("first");
    const slow = run(makeJob("http://x/", { body: "slow" }));
    // After the turn in which jobs are handed over.
    await new Promise(setImmediate);
    await new Promise(setImmediate);
    const until = performance.now() + 1000;
    while (performance.now() < until);
    expect((await slow).status).toBe("succeeded");
  });
});

const SLOW_TO_CLOSE = new URL("../../../../test/support/gateway/slow-to-close-worker.ts", import.meta.url).href;

/** A supervisor whose worker dies of any work; `turn` resolves when the next one is ready. */
function start() {
  let isClosed = false;
  const turns = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  let readied = 0;
  const spawn = () => {
    const worker = new Worker(SLOW_TO_CLOSE);
    worker.addEventListener("message", ({ data }: MessageEvent<{ kind: string }>) => {
      isClosed ||= data.kind === "closed";
    });
    return worker;
  };
  const supervisor = createSupervisor(
    { kind: "start", settings: LOOPBACK, workers: 1 },
    { log: silentLog, spawn },
    {
      onReady: () => turns[readied++]?.resolve(),
      onResults: () => {},
      onDeath: () => {},
    },
  );
  open.push(supervisor.close);
  supervisor.start();
  return { supervisor, ready: turns.map(({ promise }) => promise), sessionsClosed: () => isClosed };
}

test("closing a worker waits until it has closed its sessions", async () => {
  const { supervisor, ready, sessionsClosed } = start();
  await ready[0];
  await supervisor.close();
  expect(sessionsClosed()).toBe(true);
});

test("closing a worker waits for the sessions of one that took the place of a dead one", async () => {
  const { supervisor, ready, sessionsClosed } = start();
  await ready[0];
  supervisor.post({ kind: "work", jobs: batchOfJobs([]).batch, cancel: [], recorded: [] }, []);
  await ready[1];
  await supervisor.close();
  expect(sessionsClosed()).toBe(true);
});

test("closing a worker ends early when the worker dies of it", async () => {
  const { supervisor, ready, sessionsClosed } = start();
  await ready[0];
  supervisor.post({ kind: "work", jobs: batchOfJobs([]).batch, cancel: [], recorded: [] }, []);
  const started = performance.now();
  await supervisor.close();
  // The supervisor waits three seconds for a worker that does not answer.
  expect(performance.now() - started).toBeLessThan(2_950);
  expect(sessionsClosed()).toBe(false);
});
