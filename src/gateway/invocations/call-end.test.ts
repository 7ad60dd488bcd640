import { expect, test } from "bun:test";
import { accepted, PAID, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { clock, places } from "../../../test/support/stores/stores.ts";
import type { CallEnd } from "../../core/call.ts";
import type { Store } from "../../storage/store.ts";
import { findInvocation } from "./history.ts";
import {
  accept,
  claim,
  collectSettlement,
  endOpen,
  endPending,
  finish,
  type InvocationKey,
  type InvocationRow,
  refuseSettlement,
} from "./service.ts";

const UNSETTLED: Partial<InvocationRow> = { ...PAID, settlement_status: "pending" };

const now = clock.now();
const put = (store: Store, fields: Partial<InvocationRow> = {}) => {
  const call = accepted(now, { model: "opus", ...fields });
  return store.write(async (tx) => {
    await accept(tx, call);
    return { tenant: call.row.tenant, id: call.row.id };
  });
};
const take = (store: Store, key: InvocationKey) =>
  store.write((tx) => claim(tx, { key, owner: "rep_1", token: "t", now }));
const end = (store: Store, key: InvocationKey, ending = SUCCESS) =>
  store.write((tx) => finish(tx, { key, token: "t", request_id: "req-1" }, ending, now));

/** Every way in which a call can end. */
const WAYS: [string, (store: Store) => Promise<InvocationKey>, Partial<CallEnd>][] = [
  [
    "with its answer",
    async (store) => {
      const key = await put(store);
      await take(store, key);
      await end(store, key, { ...SUCCESS, detail: "fine" });
      return key;
    },
    { status: "succeeded", error_class: null, request_id: "req-1", detail: "fine", payment: null },
  ],
  [
    "paid for, and failed by its upstream",
    async (store) => {
      const key = await put(store, UNSETTLED);
      await store.write((tx) => collectSettlement(tx, key, "{}", now));
      await take(store, key);
      await end(store, key, { ...SUCCESS, status: "failed", error_class: "upstream_5xx" });
      return key;
    },
    {
      status: "failed",
      error_class: "upstream_5xx",
      payment: {
        network: "base",
        asset: "USDC",
        amount: "1500",
        settlement_status: "settled_upstream_failed",
      },
    },
  ],
  [
    "with its answer, and a payment that nobody collects",
    async (store) => {
      const key = await put(store, {
        ...UNSETTLED,
        payment_nonce: `0x${"ef".repeat(32)}`,
        settlement_status: null,
      });
      await take(store, key);
      await end(store, key);
      return key;
    },
    {
      status: "succeeded",
      payment: { network: "base", asset: "USDC", amount: "1500", settlement_status: null },
    },
  ],
  [
    "by a cancel while it runs",
    async (store) => {
      const key = await put(store);
      await take(store, key);
      await store.write((tx) => endOpen(tx, key, "cancelled", now));
      return key;
    },
    { status: "failed", error_class: "cancelled", request_id: null, resp_size: null },
  ],
  [
    "withdrawn before it ran",
    async (store) => {
      const key = await put(store, { mode: "streaming" });
      await store.write((tx) => endPending(tx, key, "cancelled", now));
      return key;
    },
    { status: "failed", error_class: "cancelled", mode: "streaming" },
  ],
  [
    "by a payment that is declined",
    async (store) => {
      const key = await put(store, { ...UNSETTLED, payment_nonce: `0x${"cd".repeat(32)}` });
      await store.write((tx) => refuseSettlement(tx, key, "{}", now));
      return key;
    },
    { status: "failed", error_class: null },
  ],
];

for (const [name, place] of Object.entries(places)) {
  test(`on ${name} a call's end is told once, however it ends, as its record says`, async () => {
    const where = await place();
    const store = await where.open();
    try {
      const told: CallEnd[] = [];
      store.onCallEnded((told_) => told.push(told_));
      for (const [way, run, expected] of WAYS) {
        const key = await run(store);
        // Whoever comes too late ends nothing.
        await end(store, key);
        await store.write((tx) => endOpen(tx, key, "internal", now));
        const row = await findInvocation(store.read, key.tenant, key.id);
        const ends = told.splice(0);
        expect([way, ends.length]).toEqual([way, 1]);
        expect(ends[0]).toMatchObject({
          tenant: row.tenant,
          invocation_id: row.id,
          agent_id: row.agent_id,
          caller: row.caller,
          mode: row.mode,
          model: "opus",
          error_class: row.error_class,
          upstream_status: row.upstream_status,
          latency_ms: row.latency_ms,
          req_size: row.req_size,
          resp_size: row.resp_size,
          accepted_at: now,
          ended_at: row.completed_at ?? 0,
          ...expected,
        });
        expect(ends[0]?.payment?.settlement_status ?? null).toBe(row.settlement_status);
      }
    } finally {
      await store.close();
      where.remove();
    }
  });
}
