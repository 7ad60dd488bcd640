// What is written to the outbox of a call: by its end, or by the write that makes its settlement final.
import { expect, test } from "bun:test";
import { and, eq } from "drizzle-orm";
import { accepted, PAID } from "../../../test/support/stores/invocations.ts";
import { eachStore } from "../../../test/support/stores/one-store.ts";
import { clock } from "../../../test/support/stores/stores.ts";
import type { Store } from "../../storage/store.ts";
import {
  accept,
  collectSettlement,
  confirmSettlement,
  denyReceipt,
  endOpen,
  type InvocationRow,
  invocationByKey,
} from "./service.ts";

const now = clock.now();

async function put(store: Store, fields: Partial<InvocationRow>) {
  const call = accepted(now, fields);
  await accept(store, call);
  return { tenant: call.row.tenant, id: call.row.id };
}

eachStore((makePlace) => {
  test("holds a row for each kind of a call once its end and its settlement are final, whatever the kinds", async () => {
    const place = await makePlace();
    const store = await place.open();
    const kinds = async ({ tenant, id }: { readonly tenant: string; readonly id: string }) => {
      const { outbox: t } = store.read.tables;
      const rows = await store.read.db
        .select({ kind: t.kind })
        .from(t)
        .where(and(eq(t.tenant, tenant), eq(t.invocation_id, id)));
      return rows.map(({ kind }) => kind as string).sort();
    };
    const outbox = "receipt other";
    const free = await put(store, { outbox });
    const single = await put(store, { outbox: "other" });
    const none = await put(store, { outbox: null });
    const paid = await put(store, { ...PAID, outbox, settlement_status: "settled" });
    const late = await put(store, { ...PAID, outbox, settlement_status: "pending" });
    const calls = [free, single, none, paid, late];
    const all = () => Promise.all(calls.map(kinds));
    expect(await all()).toEqual([[], [], [], [], []]);
    await Promise.all(calls.map((key) => endOpen(store, key, "internal", now)));
    const both = ["other", "receipt"];
    expect(await all()).toEqual([both, ["other"], [], both, []]);
    for (const _ of ["first", "again"]) {
      await store.write(async (tx) => {
        await collectSettlement(tx, late, "{}", now);
        for (const key of calls) await confirmSettlement(tx, key, null, now);
      });
      expect(await all()).toEqual([both, ["other"], [], both, both]);
    }
    await store.write(({ db, tables: { outbox: t } }) => db.delete(t));
    await store.write(async (tx) => {
      for (const key of calls) await confirmSettlement(tx, key, null, now);
    });
    expect(await all()).toEqual([[], [], [], [], []]);
    await store.close();
  });

  test("of a call that is denied its receipt holds what else is to be told", async () => {
    const store = await (await makePlace()).open();
    const left = async (outbox: string | null) => {
      const key = await put(store, { outbox });
      await store.write((tx) => denyReceipt(tx, key));
      return (await invocationByKey(store.read, key))?.outbox;
    };
    expect(await left("receipt")).toBeNull();
    expect(await left("receipt other")).toBe("other");
    expect(await left("other receipt third")).toBe("other third");
    expect(await left("other")).toBe("other");
    expect(await left(null)).toBeNull();
    await store.close();
  });
});
