import { expect, spyOn, test } from "bun:test";
import { SUCCESS } from "../../../test/support/stores/invocations.ts";
import { clock, makePool, slowCredential, useScheduling, well } from "../../../test/support/stores/scheduling.ts";
import { CLAIM_BELIEVED_MS } from "../../core/age.ts";
import type { Store } from "../../storage/store.ts";
import { freeMemory, partsOf } from "../../wire/body.ts";
import { abandon } from "../invocations/service.ts";

const scheduling = useScheduling();

test("a call that is cancelled while its credential is resolved never reaches the upstream", async () => {
  const { resolving, resolved, resolveCredential } = slowCredential();
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool, resolveCredential });
  const one = await scheduling.acceptOne("cred_1");
  scheduler.offer(one);
  await resolving.promise;
  await scheduling.store().write((tx) => abandon(tx, one.row, "cancelled", clock.now()));
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
      if (isLooking) cancelled ??= scheduling.store().write((tx) => abandon(tx, one.row, "cancelled", clock.now()));
      if (isLooking) scheduler.stop(one.row.id);
      return scheduling.store().read;
    },
  };
  const { scheduler, untilEnded } = scheduling.open({ pool, resolveCredential, store });
  scheduler.offer(one);
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
  scheduler.offer(one);
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
    const [part] = partsOf(body);
    bodies.push(new TextDecoder().decode(part));
    // As the pool takes over a large one.
    if (part !== undefined) freeMemory(part);
    return { ...SUCCESS, detail: null, is_stale: jobs.length === 1 };
  });
  const { scheduler, untilEnded } = scheduling.open({ pool });
  const one = await scheduling.acceptOne();
  scheduler.offer({ ...one, body: new Uint8Array(partsOf(one.body)[0] ?? []) });
  await untilEnded(one.row.id);
  expect(bodies).toEqual(["hello", "hello"]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["succeeded", null]);
});

test("a secret that can't be resolved fails the call, and the call is not made", async () => {
  const { jobs, pool } = makePool(well);
  const resolveCredential = () => Promise.reject(new Error("no such secret"));
  const { scheduler, untilEnded } = scheduling.open({ pool, resolveCredential });
  const one = await scheduling.acceptOne("cred_1");
  scheduler.offer(one);
  await untilEnded(one.row.id);
  expect(jobs).toEqual([]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "credential_error"]);
});
