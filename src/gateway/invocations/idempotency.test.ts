import { expect, test } from "bun:test";
import { holdTable } from "../../../test/support/stores/database-faults.ts";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { eachStore, useStore } from "../../../test/support/stores/one-store.ts";
import { clock, postgresPlace } from "../../../test/support/stores/stores.ts";
import type { Store } from "../../storage/store.ts";
import { findInvocation } from "./history.ts";
import { findByIdempotencyKey } from "./idempotency.ts";
import { accept } from "./service.ts";

const NOW = clock.now();
const keyed = (key: string, body_sha256 = "s") => ({ key, body_sha256, asked_at: NOW, latest: NOW });
const outcomeOf = (found: Promise<string | null>) => found.catch(({ kind }) => kind);

eachStore((makePlace) => {
  let store: Store;
  useStore(makePlace, (opened) => {
    store = opened.store;
  });

  test("keys that are looked for together stand for their own calls, of their own tenant, caller and agent", async () => {
    const calls = await Promise.all(
      Array.from({ length: 100 }, async (_, i) => {
        const call = { ...accepted(NOW, { tenant: `t${i % 3}` }), idempotency: keyed(`k"\\,{}${i}`) };
        await accept(store, call);
        return call;
      }),
    );
    const look = ({ row, idempotency }: (typeof calls)[number], changed = {}, body = "s") =>
      outcomeOf(findByIdempotencyKey(store, { ...row, ...changed }, { ...idempotency, body_sha256: body }));
    const found = calls.flatMap((call) => [
      look(call),
      look(call, { tenant: "other" }),
      look(call, { caller: "other" }),
      look(call, { agent_id: "other" }),
      look(call, {}, "other"),
    ]);
    expect(await Promise.all(found)).toEqual(calls.flatMap(({ row }) => [row.id, null, null, null, "conflict"]));
    const own = calls[0] as (typeof calls)[number];
    expect(await store.write((tx) => findByIdempotencyKey(tx, own.row, own.idempotency))).toBe(own.row.id);
  });
});

test("a key is found, however many other reads wait for the database", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  const call = { ...accepted(NOW), idempotency: keyed("k") };
  await accept(store, call);
  const release = await holdTable(place.url, "invocations");
  const waiting = Array.from({ length: 100 }, () => findInvocation(store.read, call.row.tenant, call.row.id));
  expect(await findByIdempotencyKey(store, call.row, call.idempotency)).toBe(call.row.id);
  await release();
  await Promise.all(waiting);
  await store.close();
});
