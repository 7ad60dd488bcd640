import { expect, test } from "bun:test";
import { IdleConnections, type KeptConnection } from "./idle-connections.ts";

function connection(idleMs: number, ended: () => void = () => {}, place = "here"): KeptConnection {
  return { place, tenant: "acme", weight: 1, idleUntil: performance.now() + idleMs, end: ended };
}

test("of the connections to a place the one that waited shortest is taken, and none that is too old", () => {
  const pool = new IdleConnections();
  let ended = 0;
  const [first, last] = [connection(60_000), connection(60_000)];
  for (const each of [first, last, connection(-1, () => ended++), connection(0, () => ended++)]) pool.isFree(each);
  pool.isFree(connection(60_000, undefined, "there"));
  expect([pool.take("here"), pool.take("here"), pool.take("here"), ended]).toEqual([last, first, null, 2]);
});

test("one that nobody takes is closed when it is too old, and the others stay", async () => {
  const pool = new IdleConnections(5);
  const young = connection(60_000);
  pool.isFree(young);
  await new Promise<void>((resolve) => {
    const old = connection(10, () => {
      pool.isOver(old);
      resolve();
    });
    pool.isFree(old);
  });
  expect([pool.take("here"), pool.take("here")]).toEqual([young, null]);
});
