import { expect, jest, spyOn, test } from "bun:test";
import { accepted, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { clock, makePool, slowCredential, useScheduling, well } from "../../../test/support/stores/scheduling.ts";
import { Fault } from "../../core/fault.ts";
import { CLAIM_BELIEVED_MS } from "../../kernel/time.ts";
import type { Store } from "../../storage/store.ts";
import { bodyPartsOf, freeMemory } from "../../wire/body.ts";
import { type AcceptedCall, accept, endOpen } from "../invocations/service.ts";
import { createClaims } from "../upstream/ownership.ts";
import type { Outcome } from "./job.ts";
import type { Scheduler } from "./scheduler.ts";

const scheduling = useScheduling();

const offer = (scheduler: Scheduler, { row }: AcceptedCall) => scheduler.offer(row.tenant, row.agent_id, row.id);

/** The store, and the commands that write which it is given. */
function recordingStore() {
  const commands: string[] = [];
  const store: Store = {
    ...scheduling.store(),
    execute(command, input) {
      if (command.kind !== "look_up") commands.push(command.name);
      return scheduling.store().execute(command, input);
    },
  };
  return { store, commands };
}

test("a call that finds a slot is stored running, and is not claimed again", async () => {
  const { store, commands } = recordingStore();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool, store });
  const one = accepted(clock.now());
  const slot = scheduler.reserve(one);
  await accept(scheduling.store(), one, slot?.claim);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["running", null]);
  expect(jobs).toEqual([]);
  slot?.run(one);
  await untilEnded(one.row.id);
  expect(jobs).toHaveLength(1);
  expect(commands).toEqual(["end"]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["succeeded", null]);
});

test("a backlog is taken in blocks of as many calls as there are slots, and each call is made once, in order", async () => {
  const { store, commands } = recordingStore();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool, store });
  const calls: Awaited<ReturnType<typeof scheduling.acceptOne>>[] = [];
  for (let i = 0; i < 10; i++) calls.push(await scheduling.acceptOne());
  await scheduler.offerPending();
  for (const { row } of calls) await untilEnded(row.id);
  expect(jobs.map(({ id }) => id)).toEqual(calls.map(({ row }) => row.id));
  expect(commands.filter((name) => name !== "end" && name !== "take")).toEqual([]);
});

test("a block that is taken while the process begins to stop stays pending", async () => {
  const [asked, answered] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  const store: Store = {
    ...scheduling.store(),
    async execute(command, input) {
      const output = await scheduling.store().execute(command, input);
      if (command.kind === "look_up") return output;
      asked.resolve();
      await answered.promise;
      return output;
    },
  };
  const { jobs, pool } = makePool(well);
  const { scheduler } = scheduling.open({ pool, store });
  const one = await scheduling.acceptOne();
  await scheduler.offerPending();
  await asked.promise;
  const drained = scheduler.drain(10_000);
  answered.resolve();
  await drained;
  expect(jobs).toEqual([]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["pending", null]);
});

test("a call whose slot was reserved before a drain and which is stored after it stays pending", async () => {
  const { jobs, pool } = makePool(well);
  const { scheduler } = scheduling.open({ pool });
  const one = accepted(clock.now());
  const slot = scheduler.reserve(one);
  const drained = scheduler.drain(0);
  await accept(scheduling.store(), one, slot?.claim);
  slot?.run(one);
  await drained;
  expect(jobs).toEqual([]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["pending", null]);
});

test("a slot that is given back is free for the next call, and its claim is over", async () => {
  const claims = createClaims();
  const { scheduler, untilEnded } = scheduling.open({ agentMax: () => 1, claims });
  const refused = accepted(clock.now());
  const slot = scheduler.reserve(refused);
  expect(scheduler.reserve(accepted(clock.now()))).toBeNull();
  const waiting = await scheduling.acceptOne();
  offer(scheduler, waiting);
  expect(await scheduling.statusOf(waiting.row.id)).toEqual(["pending", null]);
  slot?.giveBack();
  await untilEnded(waiting.row.id);
  expect(claims.fateOf(slot?.claim.token ?? "")).toBe("release");
});

test("an outcome that can't be recorded ends the call as internal", async () => {
  let ends = 0;
  const store: Store = {
    ...scheduling.store(),
    execute: (command, input) =>
      command.name === "end" && ++ends === 1
        ? Promise.reject(new Error("a row that does not fit"))
        : scheduling.store().execute(command, input),
  };
  const { scheduler, untilEnded } = scheduling.open({ store });
  const one = await scheduling.acceptOne();
  offer(scheduler, one);
  await untilEnded(one.row.id);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "internal"]);
});

test("a drain lets what runs end, starts nothing more, and leaves the rest pending for the next process", async () => {
  const [begun, going] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  const { jobs, pool } = makePool(async () => {
    begun.resolve();
    await going.promise;
    return well();
  });
  const { scheduler, untilEnded } = scheduling.open({ pool, agentMax: () => 1 });
  const [first, second] = [await scheduling.acceptOne(), await scheduling.acceptOne()];
  offer(scheduler, first);
  offer(scheduler, second);
  await begun.promise;
  const drained = scheduler.drain(10_000);
  going.resolve();
  await drained;
  expect(await scheduling.statusOf(first.row.id)).toEqual(["succeeded", null]);
  expect(await scheduling.statusOf(second.row.id)).toEqual(["pending", null]);
  expect(jobs).toHaveLength(1);

  const next = scheduling.open({ pool, replica: "rep_2" });
  await (await scheduling.lease()).recover();
  await next.scheduler.offerPending();
  await next.untilEnded(second.row.id);
  expect(await scheduling.statusOf(second.row.id)).toEqual(["succeeded", null]);
  await untilEnded(first.row.id);
});

test("a call that ran when the process died ends as internal, and is not made again", async () => {
  const { pool } = makePool(() => new Promise<Outcome>(() => {}));
  const { scheduler } = scheduling.open({ pool });
  const one = await scheduling.acceptOne();
  offer(scheduler, one);
  // Commands are answered in order: when a later write is, the call is taken.
  await scheduling.store().write(async () => {});

  const next = makePool(well);
  const after = scheduling.open({ pool: next.pool, replica: "rep_2" });
  await (await scheduling.lease()).recover();
  await after.scheduler.offerPending();
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "internal"]);
  expect(next.jobs).toEqual([]);
});

test("a lease is renewed on time, however long the check for pending calls takes", async () => {
  let renewals = 0;
  const store: Store = {
    ...scheduling.store(),
    isShared: true,
    write(work, options) {
      if (options?.urgent) renewals++;
      return scheduling.store().write(work, options);
    },
  };
  const lease = await scheduling.lease(store);
  jest.useFakeTimers();
  try {
    const recovering = lease.recover();
    jest.advanceTimersByTime(1);
    await recovering;
    const stopSweeping = lease.startSweeping(() => new Promise(() => {}));
    for (let i = 0; i < 3; i++) jest.advanceTimersByTime(5_000);
    stopSweeping();
    expect(renewals).toBe(4);
  } finally {
    jest.useRealTimers();
  }
});

test("a call that is cancelled while its credential is resolved never reaches the upstream", async () => {
  const { resolving, resolved, resolveCredential } = slowCredential();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool, resolveCredential });
  const one = await scheduling.acceptOne("cred_1");
  offer(scheduler, one);
  await resolving.promise;
  await scheduling.store().write((tx) => endOpen(tx, one.row, "cancelled", clock.now()));
  scheduler.stop(one.row.id);
  resolved.resolve();
  await untilEnded(one.row.id);
  expect(jobs).toEqual([]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "cancelled"]);
});

test("a call that is cancelled during the last look before it is made never reaches the upstream", async () => {
  const { resolving, resolved, resolveCredential } = slowCredential();
  const { jobs, pool } = makePool(well);
  const one = await scheduling.acceptOne("cred_1");
  let cancelled: Promise<unknown> | undefined;
  let isLooking = false;
  const store: Store = {
    ...scheduling.store(),
    get read() {
      // The look still finds the claim, since the cancel is stored right after it.
      if (isLooking) cancelled ??= scheduling.store().write((tx) => endOpen(tx, one.row, "cancelled", clock.now()));
      if (isLooking) scheduler.stop(one.row.id);
      return scheduling.store().read;
    },
  };
  const { scheduler, untilEnded } = scheduling.open({ pool, resolveCredential, store });
  offer(scheduler, one);
  await resolving.promise;
  isLooking = true;
  const wall = Date.now();
  const later = spyOn(Date, "now").mockImplementation(() => wall + CLAIM_BELIEVED_MS);
  resolved.resolve();
  await untilEnded(one.row.id);
  await cancelled;
  later.mockRestore();
  expect([cancelled === undefined, jobs]).toEqual([false, []]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "cancelled"]);
});

test("a call that was ended while its process was paused is not made", async () => {
  const { resolving, resolved, resolveCredential } = slowCredential();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool, resolveCredential });
  const one = await scheduling.acceptOne("cred_1");
  offer(scheduler, one);
  await resolving.promise;
  const later = await scheduling.takenForDead(one);
  resolved.resolve();
  await untilEnded(one.row.id);
  later.mockRestore();
  expect(jobs).toEqual([]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "internal"]);
});

test("a worker that finds the claim too old sends nothing, and the call is tried again with its whole body", async () => {
  const bodies: string[] = [];
  const { jobs, pool } = makePool(async ({ body }) => {
    const [part] = bodyPartsOf(body);
    bodies.push(new TextDecoder().decode(part));
    // As the pool takes over a large one.
    if (part !== undefined) freeMemory(part);
    return { ...SUCCESS, detail: null, is_stale: jobs.length === 1 };
  });
  const { scheduler, untilEnded } = scheduling.open({ pool });
  const one = await scheduling.acceptOne();
  offer(scheduler, one);
  await untilEnded(one.row.id);
  expect(bodies).toEqual(["hello", "hello"]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["succeeded", null]);
});

const away = () => Promise.reject(new Fault("unavailable", "a key can't be opened at the moment"));

test("a call whose credential can't be read for ten seconds is given back, and made where the credential can be read", async () => {
  const { jobs, pool } = makePool(well);
  const now = performance.now.bind(performance);
  let [ahead, attempts] = [0, 0];
  const clockSpy = spyOn(performance, "now").mockImplementation(() => now() + ahead);
  try {
    const { scheduler, untilEnded } = scheduling.open({
      pool,
      async resolveCredential() {
        attempts++;
        if (ahead === 0) ahead = 10_001;
        return attempts <= 2 ? away() : { header: null, version: "1" };
      },
    });
    const one = await scheduling.acceptOne("cred_1");
    const writes = spyOn(scheduling.store(), "write");
    offer(scheduler, one);
    await untilEnded(one.row.id);
    expect(jobs).toHaveLength(1);
    expect(await scheduling.statusOf(one.row.id)).toEqual(["succeeded", null]);
    // The call was given back once, in a write of its own.
    expect(writes).toHaveBeenCalledTimes(1);
    writes.mockRestore();
  } finally {
    clockSpy.mockRestore();
  }
});

test("a process that stops gives back a call whose credential can't be read, for another process to make", async () => {
  const { jobs, pool } = makePool(well);
  const asked = Promise.withResolvers<void>();
  const resolveCredential = () => {
    asked.resolve();
    return away();
  };
  const { scheduler } = scheduling.open({ pool, resolveCredential });
  const one = await scheduling.acceptOne("cred_1");
  offer(scheduler, one);
  await asked.promise;
  await scheduler.drain(5_000);
  expect(jobs).toEqual([]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["pending", null]);
});

test("a secret that can't be resolved fails the call, and the call is not made", async () => {
  const { jobs, pool } = makePool(well);
  const resolveCredential = () => Promise.reject(new Error("no such secret"));
  const { scheduler, untilEnded } = scheduling.open({ pool, resolveCredential });
  const one = await scheduling.acceptOne("cred_1");
  offer(scheduler, one);
  await untilEnded(one.row.id);
  expect(jobs).toEqual([]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "credential_error"]);
});
