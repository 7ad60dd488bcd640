import { expect, test } from "bun:test";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { eachStore } from "../../../test/support/stores/one-store.ts";
import { silentLog } from "../../core/log.ts";
import { findKey } from "../invocations/idempotency.ts";
import { createRefusals } from "../invocations/refusals.ts";
import { accept } from "../invocations/service.ts";
import { renewLease } from "../replicas/store.ts";
import { clearDead } from "./clear-dead.ts";

const clock = { now: () => Date.now() };

eachStore((makePlace) => {
  test.each([
    ["pending", null],
    ["claimed in the same write", { owner: "rep_dead", token: "t" }],
  ] as const)("a call that was refused and appeared %s leaves nothing when its replica dies", async (_, claim) => {
    const place = await makePlace();
    const store = await place.open();
    const refusals = () => createRefusals({ store, clock, log: silentLog });
    const { row, ...one } = accepted(clock.now(), { accepted_by: "rep_dead" });
    const idempotency = { key: "k", body_sha256: "b", asked_at: clock.now(), latest: clock.now() };
    const call = { ...one.call, headers: [["idempotency-key", "k"]] as const };
    expect(await refusals().wasStored({ tenant: row.tenant, id: row.id, claim: claim?.token ?? null })).toBe(false);
    await accept(store, { ...one, row, call, idempotency }, claim);
    await store.write((tx) => renewLease(tx, "rep_2"));
    await clearDead(() => refusals().removeAppeared(), store, clock, "rep_2");
    expect(await store.read.db.select().from(store.read.tables.invocations)).toEqual([]);
    expect(await findKey(store, row, idempotency)).toBeNull();
    await store.close();
    place.remove();
  });
});
