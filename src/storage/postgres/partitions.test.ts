// How partitions are made and dropped while the table is in use, and from tables that were not laid out before.
import { afterAll, describe, expect, test } from "bun:test";
import { SQL } from "bun";
import { holdTable } from "../../../test/support/stores/database-faults.ts";
import { missingPostgres, type PostgresVersion, startPostgres } from "../../../test/support/stores/postgres.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { idFloor } from "../../core/id.ts";
import { silentLog } from "../../core/log.ts";
import { DAY_MS, HOUR_MS } from "../../core/time.ts";
import { DECISIONS as TABLE } from "../../gateway/policy/decisions.ts";
import { RECEIPTS } from "../../gateway/receipts/store.ts";
import { createPartitions, dropPartitions, dropPassedEnds, partitionsOf, preparePartitions } from "./partitions.ts";

const NOW = Date.UTC(2026, 5, 1, 12);
const HOURS = 24;
const clients: SQL[] = [];
afterAll(async () => {
  for (const client of clients) await client.close();
});

async function open(version: PostgresVersion) {
  const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
  await (await place.open()).close();
  const connect = () => {
    const client = new SQL(place.url, { max: 1 });
    clients.push(client);
    return client;
  };
  const client = connect();
  const put = (time: number, name = "x") =>
    client.unsafe(`insert into policy_decisions (tenant, id, agent_id, protocol, action, reason)
      values ('acme', '${idFloor("pdec", time)}-${name}', 'agt', 'http', 'allow', 'r')`);
  return {
    client,
    connect,
    put,
    prepare: (now: number, smallBytes?: number, by = client) =>
      preparePartitions(by, TABLE, { hours: HOURS, now, ...(smallBytes === undefined ? {} : { smallBytes }) }),
    drop: (before: number, by = client) => dropPartitions(by, TABLE, { before, hours: HOURS, log: silentLog }),
    dropMuch: (before: number) =>
      dropPartitions(client, TABLE, { before, hours: HOURS, log: silentLog, firstBytesMin: 0 }),
    ids: async (): Promise<string[]> =>
      (await client.unsafe("select id from policy_decisions order by id")).map(({ id }: { id: string }) => id),
    /** Of each partition, whether what stands in it belongs there. */
    async expectWhole() {
      const partitions = await partitionsOf(client, TABLE);
      expect([partitions[0]?.from, partitions.at(-1)?.to]).toEqual([0, Number.POSITIVE_INFINITY]);
      for (const [place, { to }] of partitions.slice(0, -1).entries())
        expect(to).toBe(partitions[place + 1]?.from as number);
      const [row] = await client.unsafe(
        `select count(*)::int as many from pg_constraint where conname = 'ends' and conrelid in (
           select inhrelid from pg_inherits where inhparent = 'policy_decisions'::regclass)`,
      );
      expect(row.many).toBe(0);
      return partitions;
    },
  };
}

const name = (time: number, suffix = "x") => `${idFloor("pdec", time)}-${suffix}`;

test("work on partitions is given up when it gets no answer, as on a connection that hangs after a failover", async () => {
  const { url, open: openStore } = await postgresPlace();
  await (await openStore()).close();
  const letGo = await holdTable(url, "pg_inherits");
  const partitions = createPartitions({ databaseUrl: url, clock: { now: () => NOW }, log: silentLog, workMsMax: 200 });
  const outcome = await partitions.prepare(TABLE, HOURS).then(
    () => "done",
    (error) => error.kind,
  );
  expect(outcome).toBe("unavailable");
  await letGo();
}, 20_000);

for (const version of [18, 15] as const) {
  const missing = missingPostgres(version);
  describe.skipIf(missing !== null)(
    `on Postgres ${version}${missing === null ? "" : `: not tried, since ${missing}`}`,
    () => {
      test("what a process left that was killed while it ended a partition refuses nothing after the next start, days later", async () => {
        await using made = await openDisposable(version);
        const { client, put } = made;
        const [last] = (await partitionsOf(client, TABLE)).slice(-1);
        const end = (time: number) => `'${idFloor("pdec", time)}'`;
        const leave = (time: number) =>
          client.unsafe(`alter table ${last?.name} add constraint ends check (id < ${end(time)}) not valid`);
        await leave(NOW - HOUR_MS);
        await expect(put(NOW)).rejects.toThrow("ends");
        await dropPassedEnds(client, [TABLE], NOW);
        await put(NOW);
        // One that is far off is another process's, which is at it.
        await leave(NOW + 3 * DAY_MS);
        await dropPassedEnds(client, [TABLE], NOW);
        await expect(put(NOW + 4 * DAY_MS)).rejects.toThrow("ends");
      });

      test("a table that was not laid out becomes the first one, small or large, and is dropped when all of it is old", async () => {
        for (const smallBytes of [undefined, 0]) {
          await using made = await openDisposable(version);
          const { put, prepare, drop, dropMuch, ids, expectWhole } = made;
          for (const days of [400, 30, 0]) await put(NOW - days * DAY_MS);
          const [first] = await prepare(NOW, smallBytes);
          expect(first?.to).toBeGreaterThan(NOW / HOUR_MS);
          // Nothing is read or moved for it: the rows are where they were.
          expect((await expectWhole())[0]?.name).toBe("policy_decisions_0");
          expect(await ids()).toHaveLength(3);
          // Until then its old rows go one by one.
          expect(await drop(NOW - 10 * DAY_MS)).toBe(NOW - 10 * DAY_MS);
          const later = NOW + 100 * DAY_MS;
          await put(later);
          await prepare(later);
          expect(await drop(later - 10 * DAY_MS)).toBeGreaterThan(NOW);
          // So few are not worth a drop.
          expect(await ids()).toHaveLength(4);
          await dropMuch(later - 10 * DAY_MS);
          expect(await ids()).toEqual([name(later)]);
          await expectWhole();
        }
      }, 60_000);

      test("rows for which no partition was made stand in nobody's way", async () => {
        await using made = await openDisposable(version);
        const { put, prepare, ids, expectWhole } = made;
        await prepare(NOW);
        // The job was away for long, and a clock was wrong for a while.
        const late = NOW + 50 * DAY_MS;
        const times = [NOW + 20 * DAY_MS, late, late + HOURS * HOUR_MS, late + 5_000 * DAY_MS];
        for (const time of times) await put(time);
        const partitions = await prepare(late);
        expect(partitions.at(-1)?.from).toBeGreaterThanOrEqual(late / HOUR_MS + HOURS);
        expect(await ids()).toEqual(times.map((time) => name(time)));
        await expectWhole();
        await prepare(late + 10 * DAY_MS);
        expect(await ids()).toEqual(times.map((time) => name(time)));
        await expectWhole();
      }, 60_000);

      test("a large table whose end was begun by a program that was killed gets it from the next one", async () => {
        await using made = await openDisposable(version);
        const { client, put, prepare, ids, expectWhole } = made;
        const begin = (time: number) =>
          client.unsafe(
            `alter table policy_decisions_0 add constraint ends check (id < '${idFloor("pdec", time)}') not valid`,
          );
        await put(NOW);
        const near = NOW + 6 * HOUR_MS;
        // Too near by now: it would soon refuse calls.
        await begin(near);
        await prepare(NOW, 0);
        await put(near, "later");
        expect(await ids()).toHaveLength(2);
        await expectWhole();

        await using other = await openDisposable(version);
        await other.put(NOW);
        const far = NOW - (NOW % DAY_MS) + 4 * DAY_MS;
        await other.client.unsafe(
          `alter table policy_decisions_0 add constraint ends check (id < '${idFloor("pdec", far)}') not valid`,
        );
        const [first] = await other.prepare(NOW, 0);
        expect(first?.to).toBe(far / HOUR_MS);
        await other.expectWhole();
      }, 60_000);

      test("several that prepare and drop at once do it once, beside writers", async () => {
        await using made = await openDisposable(version);
        const { connect, put, prepare, drop, ids, expectWhole } = made;
        const others = [connect(), connect(), connect()];
        await prepare(NOW - 10 * DAY_MS);
        for (let day = 10; day > 0; day--) {
          await prepare(NOW - day * DAY_MS);
          await put(NOW - day * DAY_MS);
        }
        const writing = (async () => {
          for (let i = 0; i < 50; i++) await put(NOW + i);
        })();
        await Promise.all(others.map((other) => prepare(NOW, undefined, other)));
        const left = await Promise.all(others.map((other) => drop(NOW - 5 * DAY_MS, other)));
        await writing;
        await drop(NOW - 5 * DAY_MS);
        expect(Math.max(...left)).toBeLessThanOrEqual(NOW - 5 * DAY_MS);
        const kept = await ids();
        expect(kept).toEqual(expect.arrayContaining([5, 4, 3, 2, 1].map((day) => name(NOW - day * DAY_MS))));
        expect(kept).not.toContain(name(NOW - 7 * DAY_MS));
        expect(kept.filter((id) => id >= idFloor("pdec", NOW))).toHaveLength(50);
        const partitions = await expectWhole();
        const [row] = await made.client.unsafe(
          "select count(*)::int as many from pg_class where relkind = 'r' and relname like '%policy\\_decisions%'",
        );
        expect(row.many).toBe(partitions.length);
      }, 60_000);

      test("what is left of a chain of receipts has no gap, though a call of long ago ended late", async () => {
        await using made = await openDisposable(version);
        const { client } = made;
        for (let day = 0; day < 4; day++) {
          await preparePartitions(client, RECEIPTS, { hours: HOURS, now: NOW + day * DAY_MS });
        }
        // The days of the calls, in the order of their ends.
        const days = [0, 0, 1, 0, 1, 2, 3];
        await client.unsafe("insert into receipt_chains values ('acme', 7, 's')");
        for (const [place, day] of days.entries()) {
          const id = `${idFloor("inv", NOW + day * DAY_MS)}-${place}`;
          await client.unsafe(`insert into receipts values ('acme', ${place + 1}, 'rcpt_${place}', '${id}', 'j')`);
        }
        await dropPartitions(client, RECEIPTS, { before: NOW + DAY_MS / 2, hours: HOURS, log: silentLog });
        const rows = await client.unsafe("select sequence::int as place from receipts order by sequence");
        expect(rows.map(({ place }: { place: number }) => place)).toEqual([3, 4, 5, 6, 7]);
      }, 60_000);

      test("a long reader keeps a partition from being dropped, and nobody from writing", async () => {
        await using made = await openDisposable(version);
        const { connect, put, prepare, drop, ids } = made;
        await put(NOW - 20 * DAY_MS);
        await prepare(NOW - 20 * DAY_MS);
        await prepare(NOW);
        const reader = await connect().reserve();
        await reader.unsafe("begin");
        await reader.unsafe("select count(*) from policy_decisions");
        const dropping = drop(NOW - DAY_MS);
        await put(NOW);
        await dropping;
        expect(await ids()).toContain(name(NOW - 20 * DAY_MS));
        await reader.unsafe("commit");
        reader.release();
        await drop(NOW - DAY_MS);
        expect(await ids()).toContain(name(NOW));
      }, 60_000);
    },
  );
}

async function openDisposable(version: PostgresVersion) {
  const made = await open(version);
  return { ...made, [Symbol.asyncDispose]: () => made.client.close() };
}
