import { expect, test } from "bun:test";
import { createCompletionWaiters } from "./history.ts";
import type { InvocationKey, InvocationRow } from "./service.ts";

const here = new AbortController().signal;
const LONG_S = 60;

/** Calls of which the test says when they have ended, and how often they were asked for. */
function world() {
  const ended = new Set<string>();
  const asked: number[] = [];
  const endings = createCompletionWaiters(async (keys) => {
    asked.push(keys.length);
    return keys.filter(({ id }) => ended.has(id)).map(({ id }) => id);
  });
  const look = (id: string) => async () => {
    return { id, status: ended.has(id) ? "succeeded" : "running" } as InvocationRow;
  };
  const wait = (tenant: string, id: string, signal = here) =>
    endings.wait({ tenant, id } satisfies InvocationKey, LONG_S, signal, look(id));
  return { ended, asked, endings, wait };
}

test("an end that is announced wakes its waiter at once, and nothing else does", async () => {
  const { ended, endings, wait } = world();
  const waiting = wait("acme", "inv_1");
  await Promise.resolve();
  endings.announce("inv_1");
  endings.announce("inv_2");
  ended.add("inv_1");
  endings.announce("inv_1");
  expect((await waiting).status).toBe("succeeded");
});

test("ends that other processes decide are found by one question for all who wait", async () => {
  const { ended, asked, wait } = world();
  const waiting = Array.from({ length: 300 }, (_, at) => wait("acme", `inv_${at}`));
  ended.add("inv_7");
  expect((await waiting[7])?.status).toBe("succeeded");
  expect(asked).toEqual([300]);
});

test("one tenant's waiting leaves others room to wait, and whoever finds none is answered at once", async () => {
  const { endings, wait } = world();
  const many = Array.from({ length: 9000 }, (_, at) => wait("greedy", `inv_${at}`));
  expect((await many[8999])?.status).toBe("running");
  let isOver = false;
  const other = wait("modest", "inv_x").finally(() => {
    isOver = true;
  });
  await many[8998];
  expect(isOver).toBe(false);
  endings.release();
  expect((await other).status).toBe("running");
  await Promise.all(many);
  // All places are free again.
  const gone = new AbortController();
  gone.abort();
  expect((await wait("greedy", "inv_1", gone.signal)).status).toBe("running");
});

test("of thousands that wait for one call few are woken in a turn of the event loop", async () => {
  const { ended, endings, wait } = world();
  let answered = 0;
  const all = Array.from({ length: 1000 }, () => wait("acme", "inv_1").then(() => answered++));
  await new Promise((resolve) => setImmediate(resolve));
  ended.add("inv_1");
  endings.announce("inv_1");
  for (let before = answered; answered < 1000; before = answered) {
    await new Promise((resolve) => setImmediate(resolve));
    expect(answered - before).toBeLessThanOrEqual(16);
  }
  await Promise.all(all);
});

test("a call that ends with the last work of a process is told as ended, and without a store as it was", async () => {
  const { ended, endings, wait } = world();
  const waiting = wait("acme", "inv_1");
  let looks = 0;
  const running = { id: "inv_2", status: "running" } as InvocationRow;
  const stuck = () => (++looks === 1 ? Promise.resolve(running) : new Promise<InvocationRow>(() => {}));
  const unknown = endings.wait({ tenant: "acme", id: "inv_2" }, LONG_S, here, stuck);
  await new Promise((resolve) => setImmediate(resolve));
  ended.add("inv_1");
  endings.release();
  expect((await waiting).status).toBe("succeeded");
  expect(await unknown).toBe(running);
});

test("a look that has no answer when the process ends is not waited for any longer", async () => {
  const { endings } = world();
  const stuck = new Promise<InvocationRow>(() => {});
  const running = { id: "inv_2", status: "running" } as InvocationRow;
  const unknown = endings.wait({ tenant: "acme", id: "inv_1" }, LONG_S, here, () => stuck).catch((error) => error);
  let looks = 0;
  const known = endings.wait({ tenant: "acme", id: "inv_2" }, LONG_S, here, async () => {
    looks += 1;
    return looks === 1 ? running : stuck;
  });
  await Promise.resolve();
  endings.announce("inv_2");
  while (looks < 2) await new Promise((resolve) => setImmediate(resolve));
  endings.release();
  expect(await unknown).toMatchObject({ kind: "unavailable" });
  expect(await known).toBe(running);
});
