import { expect, test } from "bun:test";
import { missingPostgres, startPostgres } from "../../../test/support/stores/postgres.ts";
import {
  BEGIN_COMMANDS,
  BEGIN_COUNTS,
  BEGIN_LOOK_UP,
  BEGIN_READ,
  BEGIN_WRITE,
  createPermits,
  postgresClient,
} from "./pool.ts";

const SOON = 60_000;

/** Permits, and in which order those who ask for one get it. */
function permitsOf(max: number) {
  const permits = createPermits(max);
  const order: string[] = [];
  const ask = (tenant?: string) =>
    void permits.take(performance.now() + SOON, tenant).then(
      () => order.push(tenant ?? "own"),
      () => {},
    );
  const settled = async () => {
    for (let step = 0; step < 20; step++) await null;
    return order.splice(0);
  };
  return { permits, ask, settled };
}

test("a tenant that many wait for holds nearly all connections, and the next tenant gets one at once", async () => {
  const { ask, settled } = permitsOf(7);
  for (let n = 0; n < 1_000; n++) ask("busy");
  expect(await settled()).toEqual(Array(6).fill("busy"));
  ask("quiet");
  expect(await settled()).toEqual(["quiet"]);
});

test("connections that become free go to tenants by turns, and to the process's own work first", async () => {
  const { permits, ask, settled } = permitsOf(1);
  ask("busy");
  for (let n = 0; n < 3; n++) ask("busy");
  ask("quiet");
  ask();
  ask();
  expect(await settled()).toEqual(["busy"]);
  const order: string[] = [];
  for (let last: string | undefined = "busy"; last !== undefined; last = order.at(-1)) {
    permits.give(last === "own" ? undefined : last);
    const next = await settled();
    if (next.length === 0) break;
    order.push(...next);
  }
  expect(order).toEqual(["own", "own", "busy", "quiet", "busy", "busy"]);
});

test("who waits too long is refused, and keeps nobody behind it waiting", async () => {
  const { permits, ask, settled } = permitsOf(1);
  ask("holder");
  const late = permits.take(performance.now() + 5, "late");
  ask("patient");
  await expect(late).rejects.toMatchObject({ kind: "unavailable" });
  permits.give("holder");
  expect(await settled()).toEqual(["holder", "patient"]);
});

const BEGINNINGS = { BEGIN_COMMANDS, BEGIN_COUNTS, BEGIN_LOOK_UP, BEGIN_READ, BEGIN_WRITE };

// The binaries of version 18 that the tests have can't compile statements.
test.skipIf(missingPostgres(15) !== null)(
  "Postgres compiles no statement, though a scan is given a cost beyond all others",
  async () => {
    await using client = postgresClient(await (await startPostgres(15)).freshDatabase());
    const compiled: string[] = [];
    for (const [name, begin] of Object.entries(BEGINNINGS)) {
      await client.unsafe(begin);
      const scan = "explain (analyze, format json) select sum(lease_until + 1) from processes where kind <> 'x'";
      const [row] = await client.unsafe(scan).values();
      await client.unsafe("rollback");
      if ("JIT" in row[0][0]) compiled.push(name);
    }
    expect(compiled).toEqual([]);
  },
);
