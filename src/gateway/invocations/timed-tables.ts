// The tables of calls whose rows go by age, with what must outlive the others of its time.
import { HOUR_MS } from "../../core/time.ts";
import { type DroppedRange, keyedById, type TimedTable } from "../../storage/store.ts";

const among = (column: string, { from, to }: DroppedRange) => `${column} >= ${from} and ${column} < ${to}`;

/** Tenant by tenant, along the index of its payments. */
const paidCalls = (range: DroppedRange) => `
  with recursive tenants (tenant) as (
    select min(tenant) from payments
    union all
    select (select min(p.tenant) from payments p where p.tenant > t.tenant) from tenants t where t.tenant is not null
  )
  select p.tenant, p.invocation_id as id from tenants t
    join payments p on p.tenant = t.tenant and ${among("p.invocation_id", range)}`;

/** A call stays while its payment does, which is removed when it is settled and past, and while it is owed a receipt. */
export const ENDED_CALLS: TimedTable = {
  name: "ended_invocations",
  key: "id",
  ...keyedById("inv"),
  isCounted: true,
  kept: (range) => `select tenant, id from (${paidCalls(range)}) as paid
    union select tenant, invocation_id as id from receipts_due where ${among("invocation_id", range)}`,
};

/** A call that has not ended must still be made, and its body may be there. */
const openCalls = (range: DroppedRange) =>
  `select tenant, id as invocation_id from open_invocations where ${among("id", range)}`;

/** Bodies that go before their calls. */
export const BODIES: TimedTable = {
  name: "invocation_bodies",
  key: "invocation_id",
  ...keyedById("inv"),
  isCounted: false,
  kept: openCalls,
};

/** Bodies that go with their calls, and so after them. */
export const BODIES_OF_CALLS: TimedTable = {
  ...BODIES,
  kept: (range) =>
    `${openCalls(range)} union select tenant, id as invocation_id from ended_invocations where ${among("id", range)}`,
};

/** The same for large ones. */
export const PARTS: TimedTable = { ...BODIES, name: "body_parts" };
export const PARTS_OF_CALLS: TimedTable = { ...BODIES_OF_CALLS, name: "body_parts" };

/** See idempotency.ts. */
export const IDEMPOTENCY_KEYS: TimedTable = {
  name: "idempotency_keys",
  key: "slot",
  keyAt: (time) => String(Math.floor(time / HOUR_MS)),
  timeAt: (key) => Number(key) * HOUR_MS,
  isCounted: false,
  kept: null,
};
