import { afterEach, beforeEach, expect, jest, spyOn, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { accepted, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { Fault } from "../../core/fault.ts";
import { silentLog } from "../../core/log.ts";
import { openStore } from "../../storage/open.ts";
import type { Store } from "../../storage/store.ts";
import { freeMemory, partsOf } from "../../wire/body.ts";
import { compareOnce, createClaims } from "../invocations/claims.ts";
import { findInvocation } from "../invocations/history.ts";
import { abandon, accept } from "../invocations/service.ts";
import type { Job, Outcome } from "./job.ts";
import { Scheduler, type SchedulerOptions } from "./scheduler.ts";

const clock = { now: () => 1_790_000_000_000 };

let dir: string;
let real: Store;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), "tollgate-dispatch-"));
  real = await openStore({ databaseUrl: null, dataDir: dir, log: silentLog, clock });
});
afterEach(async () => {
  await real.close();
  rmSync(dir, { recursive: true, force: true });
});

/** A pool that makes no calls but says how they went. */
function makePool(outcome: (job: Job) => Promise<Outcome>) {
  const jobs: Job[] = [];
  const run = (job: Job) => {
    jobs.push(job);
    return outcome(job);
  };
  return { jobs, pool: { run, cancel() {}, recorded() {}, running: 0, close: async () => {} } };
}

const well = async (): Promise<Outcome> => ({ ...SUCCESS, detail: null });

function dispatch(options: Partial<SchedulerOptions>) {
  const ended = new Map<string, PromiseWithResolvers<void>>();
  const endOf = (id: string) => {
    const known = ended.get(id) ?? Promise.withResolvers<void>();
    ended.set(id, known);
    return known;
  };
  real.onCallEnded(({ invocation_id }) => endOf(invocation_id).resolve());
  const scheduler = new Scheduler({
    store: real,
    clock,
    log: silentLog,
    pool: makePool(well).pool,
    replica: "rep_1",
    agent_concurrency: 4,
    agentPlaces: null,
    claims: createClaims(),
    refusals: { removeAppeared: async () => {}, unnoted: new Set() },
    resolveCredential: async () => ({ header: null, version: "1" }),
    ...options,
  });
  return { scheduler, untilEnded: (id: string) => endOf(id).promise };
}

async function acceptOne(credential_ref: string | null = null) {
  const one = accepted(clock.now());
  const call = { ...one.call, credential_ref };
  await real.write((tx) => accept(tx, { ...one, call }));
  return { ...one, call };
}

const statusOf = async (id: string) => {
  const { status, error_class } = await findInvocation(real.read, "acme", id);
  return [status, error_class];
};

/** A store that runs the n-th command and then says that it could not. */
function losingAnswer(n: number): Store {
  let commands = 0;
  return {
    ...real,
    async execute(command, input) {
      const output = await real.execute(command, input);
      commands++;
      if (commands === n) throw new Fault("unavailable", "the answer was lost");
      return output;
    },
  };
}

for (const [n, what] of [
  [1, "claim"],
  [2, "record"],
] as const) {
  test(`a ${what} that was stored without an answer neither loses nor repeats the call`, async () => {
    const { jobs, pool } = makePool(well);
    const { scheduler, untilEnded } = dispatch({ pool, store: losingAnswer(n) });
    const one = await acceptOne();
    scheduler.offer(one);
    await untilEnded(one.row.id);
    expect(jobs).toHaveLength(1);
    expect(await statusOf(one.row.id)).toEqual(["succeeded", null]);
  });
}

/** The store, and the commands that it is given. */
function recordingStore() {
  const commands: string[] = [];
  const store: Store = {
    ...real,
    execute(command, input) {
      commands.push(command.name);
      return real.execute(command, input);
    },
  };
  return { store, commands };
}

test("a call that finds a place is stored running, and is not claimed again", async () => {
  const { store, commands } = recordingStore();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = dispatch({ pool, store });
  const one = accepted(clock.now());
  const place = scheduler.reserve(one);
  await accept(real, one, place?.claim);
  expect(await statusOf(one.row.id)).toEqual(["running", null]);
  expect(jobs).toEqual([]);
  place?.run(one);
  await untilEnded(one.row.id);
  expect(jobs).toHaveLength(1);
  expect(commands).toEqual(["end"]);
  expect(await statusOf(one.row.id)).toEqual(["succeeded", null]);
});

test("a backlog is taken in a block of as many calls as there are places, and each call is made once, in order", async () => {
  const { store, commands } = recordingStore();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = dispatch({ pool, store });
  const calls: Awaited<ReturnType<typeof acceptOne>>[] = [];
  for (let i = 0; i < 10; i++) calls.push(await acceptOne());
  await scheduler.start();
  for (const { row } of calls) await untilEnded(row.id);
  expect(jobs.map(({ id }) => id)).toEqual(calls.map(({ row }) => row.id));
  // The rest is nobody else's to take, and is claimed as places come free.
  expect(commands.filter((name) => name !== "end")).toEqual(["take", ...Array.from({ length: 6 }, () => "claim")]);
});

test("calls that were taken without an answer are given back, and then made once", async () => {
  const { jobs, pool } = makePool(well);
  const claims = createClaims();
  const { scheduler, untilEnded } = dispatch({ pool, claims, store: losingAnswer(1) });
  const calls = [await acceptOne(), await acceptOne()];
  await scheduler.start();
  await real.write(async () => {});
  expect(await statusOf(calls[0]?.row.id ?? "")).toEqual(["running", null]);
  const released = (tenant: string, agentId: string) => scheduler.take(tenant, agentId);
  await compareOnce({ store: real, clock, log: silentLog, replica: "rep_1", claims, stop: () => {}, released });
  for (const { row } of calls) await untilEnded(row.id);
  expect(jobs).toHaveLength(2);
});

test("a block that is taken while the process begins to stop stays pending", async () => {
  const [asked, answered] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  const store: Store = {
    ...real,
    async execute(command, input) {
      const output = await real.execute(command, input);
      asked.resolve();
      await answered.promise;
      return output;
    },
  };
  const { jobs, pool } = makePool(well);
  const { scheduler } = dispatch({ pool, store });
  const one = await acceptOne();
  await scheduler.start();
  await asked.promise;
  const drained = scheduler.drain(10_000);
  answered.resolve();
  await drained;
  expect(jobs).toEqual([]);
  expect(await statusOf(one.row.id)).toEqual(["pending", null]);
});

/** A store that runs commands of this name, and gives their answers when it is told to. */
function slowAnswers(name: string) {
  const [stored, answered] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  const store: Store = {
    ...real,
    async execute(command, input) {
      const output = await real.execute(command, input);
      if (command.name !== name) return output;
      stored.resolve();
      await answered.promise;
      return output;
    },
  };
  return { stored, answered, store };
}

test("a call that is cancelled before the answer of the write that took its block is not made", async () => {
  const { stored, answered, store } = slowAnswers("take");
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = dispatch({ pool, store });
  const [one, other] = [await acceptOne(), await acceptOne()];
  await scheduler.start();
  await stored.promise;
  expect(await abandon(real, one.row, "cancelled", clock.now())).toBe(true);
  scheduler.stop(one.row.id);
  answered.resolve();
  await untilEnded(other.row.id);
  await scheduler.drain(5_000);
  expect(jobs.map(({ id }) => id)).toEqual([other.row.id]);
  expect(await statusOf(one.row.id)).toEqual(["failed", "cancelled"]);
});

/** Another replica takes this one for dead, and nobody tells it. Its own time has gone on meanwhile. */
async function takenForDead({ row }: Awaited<ReturnType<typeof acceptOne>>) {
  await real.write((tx) => abandon(tx, row, "internal", clock.now()));
  const wall = Date.now();
  return spyOn(Date, "now").mockImplementation(() => wall + 20_000);
}

test("a call of a block that was ended while its process was paused is not made", async () => {
  const { stored, answered, store } = slowAnswers("take");
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = dispatch({ pool, store });
  const [one, other] = [await acceptOne(), await acceptOne()];
  await scheduler.start();
  await stored.promise;
  const later = await takenForDead(one);
  answered.resolve();
  await untilEnded(other.row.id);
  later.mockRestore();
  expect(jobs.map(({ id }) => id)).toEqual([other.row.id]);
  expect(await statusOf(one.row.id)).toEqual(["failed", "internal"]);
});

test("a call that is refused to its caller before the answer of the write that took its block is given back", async () => {
  const { stored, answered, store } = slowAnswers("take");
  const { jobs, pool } = makePool(well);
  const unnoted = new Set<string>();
  const { scheduler, untilEnded } = dispatch({ pool, store, refusals: { removeAppeared: async () => {}, unnoted } });
  const [one, other] = [await acceptOne(), await acceptOne()];
  await scheduler.start();
  await stored.promise;
  unnoted.add(one.row.id);
  answered.resolve();
  await untilEnded(other.row.id);
  await scheduler.drain(5_000);
  expect(jobs.map(({ id }) => id)).toEqual([other.row.id]);
  expect(await statusOf(one.row.id)).toEqual(["pending", null]);
});

test("a call that is cancelled before the answer of the write that claimed it is not made", async () => {
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = dispatch({ pool });
  const one = accepted(clock.now());
  const place = scheduler.reserve(one);
  await accept(real, one, place?.claim);
  expect(await abandon(real, one.row, "cancelled", clock.now())).toBe(true);
  scheduler.stop(one.row.id);
  place?.run(one);
  await untilEnded(one.row.id);
  await scheduler.drain(5_000);
  expect(jobs).toEqual([]);
  expect(await statusOf(one.row.id)).toEqual(["failed", "cancelled"]);
});

test("a call whose place was reserved before a drain and which is stored after it stays pending", async () => {
  const { jobs, pool } = makePool(well);
  const { scheduler } = dispatch({ pool });
  const one = accepted(clock.now());
  const place = scheduler.reserve(one);
  const drained = scheduler.drain(0);
  await accept(real, one, place?.claim);
  place?.run(one);
  await drained;
  expect(jobs).toEqual([]);
  expect(await statusOf(one.row.id)).toEqual(["pending", null]);
});

test("a place that is given back is free for the next call, and its claim is over", async () => {
  const claims = createClaims();
  const { scheduler, untilEnded } = dispatch({ agent_concurrency: 1, claims });
  const refused = accepted(clock.now());
  const place = scheduler.reserve(refused);
  expect(scheduler.reserve(accepted(clock.now()))).toBeNull();
  const waiting = await acceptOne();
  scheduler.offer(waiting);
  expect(await statusOf(waiting.row.id)).toEqual(["pending", null]);
  place?.giveBack();
  await untilEnded(waiting.row.id);
  expect(claims.fateOf(place?.claim.token ?? "")).toBe("release");
});

/** A credential that is asked for, and comes when it is told to. */
function slowCredential() {
  const resolving = Promise.withResolvers<void>();
  const resolved = Promise.withResolvers<void>();
  async function resolveCredential() {
    resolving.resolve();
    await resolved.promise;
    return { header: null, version: "1" };
  }
  return { resolving, resolved, resolveCredential };
}

test("a call that is cancelled while its credential is resolved never reaches the upstream", async () => {
  const { resolving, resolved, resolveCredential } = slowCredential();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = dispatch({ pool, resolveCredential });
  const one = await acceptOne("cred_1");
  scheduler.offer(one);
  await resolving.promise;
  await real.write((tx) => abandon(tx, one.row, "cancelled", clock.now()));
  scheduler.stop(one.row.id);
  resolved.resolve();
  await untilEnded(one.row.id);
  expect(jobs).toEqual([]);
  expect(await statusOf(one.row.id)).toEqual(["failed", "cancelled"]);
});

test("a call that was ended while its process was paused is not made", async () => {
  const { resolving, resolved, resolveCredential } = slowCredential();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = dispatch({ pool, resolveCredential });
  const one = await acceptOne("cred_1");
  scheduler.offer(one);
  await resolving.promise;
  const later = await takenForDead(one);
  resolved.resolve();
  await untilEnded(one.row.id);
  later.mockRestore();
  expect(jobs).toEqual([]);
  expect(await statusOf(one.row.id)).toEqual(["failed", "internal"]);
});

test("a worker that finds the claim too old sends nothing, and the call is tried again with its whole body", async () => {
  const bodies: string[] = [];
  const { jobs, pool } = makePool(async ({ body }) => {
    const [part] = partsOf(body);
    bodies.push(new TextDecoder().decode(part));
    // As the pool takes over a large one.
    if (part !== undefined) freeMemory(part);
    return { ...SUCCESS, detail: null, is_stale: jobs.length === 1 };
  });
  const { scheduler, untilEnded } = dispatch({ pool });
  const one = await acceptOne();
  scheduler.offer({ ...one, body: new Uint8Array(partsOf(one.body)[0] ?? []) });
  await untilEnded(one.row.id);
  expect(bodies).toEqual(["hello", "hello"]);
  expect(await statusOf(one.row.id)).toEqual(["succeeded", null]);
});

test("a secret that can't be resolved fails the call, and the call is not made", async () => {
  const { jobs, pool } = makePool(well);
  const resolveCredential = () => Promise.reject(new Error("no such secret"));
  const { scheduler, untilEnded } = dispatch({ pool, resolveCredential });
  const one = await acceptOne("cred_1");
  scheduler.offer(one);
  await untilEnded(one.row.id);
  expect(jobs).toEqual([]);
  expect(await statusOf(one.row.id)).toEqual(["failed", "credential_error"]);
});

test("an outcome that can't be recorded ends the call as internal", async () => {
  let ends = 0;
  const store: Store = {
    ...real,
    execute: (command, input) =>
      command.name === "end" && ++ends === 1
        ? Promise.reject(new Error("a row that does not fit"))
        : real.execute(command, input),
  };
  const { scheduler, untilEnded } = dispatch({ store });
  const one = await acceptOne();
  scheduler.offer(one);
  await untilEnded(one.row.id);
  expect(await statusOf(one.row.id)).toEqual(["failed", "internal"]);
});

test("a drain lets what runs end, starts nothing more, and leaves the rest pending for the next process", async () => {
  const going = Promise.withResolvers<void>();
  const { jobs, pool } = makePool(async () => {
    await going.promise;
    return well();
  });
  const { scheduler, untilEnded } = dispatch({ pool, agent_concurrency: 1 });
  const [first, second] = [await acceptOne(), await acceptOne()];
  scheduler.offer(first);
  scheduler.offer(second);
  const drained = scheduler.drain(10_000);
  going.resolve();
  await drained;
  expect(await statusOf(first.row.id)).toEqual(["succeeded", null]);
  expect(await statusOf(second.row.id)).toEqual(["pending", null]);
  expect(jobs).toHaveLength(1);

  const next = dispatch({ pool, replica: "rep_2" });
  await next.scheduler.recover();
  await next.scheduler.start();
  await next.untilEnded(second.row.id);
  expect(await statusOf(second.row.id)).toEqual(["succeeded", null]);
  await untilEnded(first.row.id);
});

test("a call that ran when the process died ends as internal, and is not made again", async () => {
  const { pool } = makePool(() => new Promise<Outcome>(() => {}));
  const { scheduler } = dispatch({ pool });
  const one = await acceptOne();
  scheduler.offer(one);
  // Claims are answered in order: when a later write is, the claim is stored.
  await real.write(async () => {});

  const next = makePool(well);
  const after = dispatch({ pool: next.pool, replica: "rep_2" });
  await after.scheduler.recover();
  await after.scheduler.start();
  expect(await statusOf(one.row.id)).toEqual(["failed", "internal"]);
  expect(next.jobs).toEqual([]);
});

test("a lease is renewed on time, however long the look for pending calls takes", async () => {
  jest.useFakeTimers();
  try {
    let renewals = 0;
    const store: Store = {
      ...real,
      dialect: "postgres",
      lookUp: () => new Promise(() => {}),
      write(work) {
        renewals++;
        return real.write(work);
      },
    };
    const { scheduler } = dispatch({ store });
    const recovering = scheduler.recover();
    jest.advanceTimersByTime(1);
    await recovering;
    void scheduler.start().catch(() => {});
    for (let i = 0; i < 3; i++) jest.advanceTimersByTime(5_000);
    expect(renewals).toBe(4);
  } finally {
    jest.useRealTimers();
  }
});
