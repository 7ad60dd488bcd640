// Works that others are in the way of, on servers that undo them for it, and reads that are undone.
import { expect, test } from "bun:test";
import { eq, sql } from "drizzle-orm";
import { eachPostgres } from "../../../test/support/stores/postgres-kinds.ts";
import { outcome, postgresPlace } from "../../../test/support/stores/stores.ts";
import { endedTotal } from "../totals.ts";

const WORKS = 300;

eachPostgres((kind) => {
  test("of many works that change one row at once each is done once, however often it was undone", async () => {
    const place = await postgresPlace(await kind.freshDatabase());
    const store = await place.open();
    await store.write(({ db, tables }) =>
      db.insert(tables.processes).values({ id: "rep", kind: "gateway", lease_until: 0 }),
    );
    let runs = 0;
    const works = Array.from({ length: WORKS }, () =>
      store.write(async (tx) => {
        runs += 1;
        const { processes } = tx.tables;
        tx.count("acme", "model", "m", 1);
        await tx.db
          .update(processes)
          .set({ lease_until: sql`${processes.lease_until} + 1` })
          .where(eq(processes.id, "rep"));
      }),
    );
    expect(new Set(await Promise.all(works.map(outcome)))).toEqual(new Set(["stored"]));
    const [row] = await store.read.db.select().from(store.read.tables.processes);
    expect([row?.lease_until, await endedTotal(store.read, "acme", "model", "m")]).toEqual([WORKS, WORKS]);
    // At these the server really undoes; otherwise the second waits for the first.
    if (/repeatable|serializable/.test(kind.name)) expect(runs).toBeGreaterThan(WORKS);
    else expect(runs).toBe(WORKS);
    await store.close();
  });

  test("of two works that each go by what the other changes, one sees what the other has done", async () => {
    const place = await postgresPlace(await kind.freshDatabase());
    const store = await place.open();
    // At most one may be there: each looks first, under a lock.
    const works = Array.from({ length: 12 }, (_, n) =>
      store.write(async ({ db, tables: { processes }, lock }) => {
        await db.select().from(processes);
        await lock("only:one");
        const others = await db.select().from(processes);
        if (others.length === 0) await db.insert(processes).values({ id: `rep_${n}`, kind: "gateway", lease_until: 0 });
      }),
    );
    expect(new Set(await Promise.all(works.map(outcome)))).toEqual(new Set(["stored"]));
    expect(await store.read.db.select().from(store.read.tables.processes)).toHaveLength(1);
    await store.close();
  });

  test("a read that is undone is asked again", async () => {
    const place = await postgresPlace(await kind.freshDatabase());
    const store = await place.open();
    await place.execute("create table undone_until as select clock_timestamp() + interval '150 ms' as at");
    await place.execute(
      `create function undone_for_a_while() returns int language plpgsql as $$ begin
         if clock_timestamp() < (select at from undone_until) then
           raise 'in the way' using errcode = '40001'; end if;
         return 7; end $$`,
    );
    const asked = store.read.db.select({ n: sql<number>`n` }).from(sql`undone_for_a_while() as n`);
    expect(await asked).toEqual([{ n: 7 }]);
    await store.close();
  });
});
