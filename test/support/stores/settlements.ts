// Payments of one or several replicas over a store of a test, whose facilitator answers as the test says.

import { afterAll, beforeAll } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { Fault } from "../../../src/core/fault.ts";
import { newId } from "../../../src/core/id.ts";
import { silentLog } from "../../../src/core/log.ts";
import { silentMeters } from "../../../src/core/meters.ts";
import { findInvocation } from "../../../src/gateway/invocations/history.ts";
import { accept, type InvocationRow } from "../../../src/gateway/invocations/service.ts";
import type { SettleOutcome } from "../../../src/gateway/payment/outcome.ts";
import { createRestoreGuard } from "../../../src/gateway/payment/restored.ts";
import { type Charge, createPayments, type PricedCall, paidColumns } from "../../../src/gateway/payment/service.ts";
import { createSettler, type Settler, type SettlerOptions } from "../../../src/gateway/payment/settler.ts";
import { insertPayment, isOpen } from "../../../src/gateway/payment/store.ts";
import { openStore } from "../../../src/storage/open.ts";
import type { Store } from "../../../src/storage/store.ts";
import { newPayer, signPayment, verifiedAtOnce } from "../chain/payments.ts";
import { BASE } from "../network.ts";
import { temporaryPlace } from "../temporary.ts";
import { accepted, counted } from "./invocations.ts";
import { startPostgres } from "./postgres.ts";

export const DAY_MS = 86_400_000;
const SETTLE_WAIT_MS = 1_000;
export const LEASE_MS = SETTLE_WAIT_MS + 5_000;
const PAY_TO = newPayer().address;
const HASH = `0x${"cd".repeat(32)}` as const;
export const COLLECTED: SettleOutcome = { kind: "collected", transaction: HASH, fee: 100n };
export const DECLINED: SettleOutcome = { kind: "declined", definite: true, why: "" };
export const UNKNOWN: SettleOutcome = { kind: "unknown", why: "" };

export const databases: Record<string, () => Promise<string | null>> = {
  sqlite: async () => null,
  postgres: async () => (await startPostgres()).freshDatabase(),
};

/** A store for the tests of one block. */
export function usePayments(databaseUrl: () => Promise<string | null>) {
  const clock = { time: Date.now(), now: () => clock.time };
  let dir: string;
  let store: Store;
  const running: Settler[] = [];
  beforeAll(async () => {
    dir = mkdtempSync(join(temporaryPlace(), "tollgate-payments-"));
    store = await openStore({ databaseUrl: await databaseUrl(), dataDir: dir, log: silentLog, clock });
  }, 30_000);
  afterAll(async () => {
    await Promise.all(running.map((settler) => settler.stop(0)));
    await store.close();
    rmSync(dir, { recursive: true });
  });

  type Answer = (attempt: number) => SettleOutcome | Promise<SettleOutcome>;

  /** The payments of one replica, whose facilitator answers by the number of the attempt here. */
  function replica(answer: Answer, changes: Partial<SettlerOptions> = {}) {
    const told: string[] = [];
    store.onCallEnded(({ invocation_id }) => void told.push(`ended ${invocation_id}`));
    let attempts = 0;
    const settler = createSettler({
      network: BASE,
      store,
      clock,
      time: { earliest: clock.now },
      log: silentLog,
      meters: silentMeters,
      settleWaitMs: SETTLE_WAIT_MS,
      client: { settle: async () => answer(++attempts) },
      paid: (_tenant, agentId) => void told.push(`paid ${agentId}`),
      guard: createRestoreGuard(null),
      ...changes,
    });
    running.push(settler);
    const look = (tenant: string, id: string) => findInvocation(store.read, tenant, id);
    const payments = createPayments({
      network: BASE,
      store,
      clock,
      meters: silentMeters,
      settler,
      verifier: verifiedAtOnce,
      settleWaitMs: SETTLE_WAIT_MS,
      publicUrl: null,
      guard: createRestoreGuard(null),
      findInvocation: look,
    });
    return { settler, payments, told, attempts: () => attempts };
  }

  type Replica = ReturnType<typeof replica>;

  const attemptsShown = async (tenant: string, id: string) => {
    const { settlement } = await findInvocation(store.read, tenant, id);
    return (JSON.parse(settlement ?? "{}") as { attempts?: number }).attempts;
  };

  async function configured(tenant: string = crypto.randomUUID()): Promise<string> {
    await store.write((tx) =>
      tx.db.insert(tx.tables.settlementConfigs).values({
        tenant,
        facilitator_url: `https://${encodeURIComponent(tenant)}.example.com`,
        facilitator_credential_ref: "cred_x",
        created_at: 0,
        updated_at: 0,
      }),
    );
    return tenant;
  }

  async function priced(tenant: string, validForSeconds = 60): Promise<PricedCall> {
    const validBefore = Math.floor(clock.now() / 1000) + validForSeconds;
    const { header } = await signPayment(newPayer(), {
      to: PAY_TO,
      value: 1000n,
      validBefore,
      validAfter: 0,
    });
    return {
      tenant,
      caller: "alice",
      agent_id: newId("agt", clock.now()),
      path: "/v1/proxy/agt_x",
      price: { amount: 1000n, pay_to: PAY_TO },
      payment: { v1: header, v2: null },
      host: "localhost",
      body: new Uint8Array(3),
      note() {},
    };
  }

  async function chargeOf({ payments }: Replica, call: PricedCall): Promise<Charge> {
    const checked = await payments.check(call);
    if (checked.kind !== "charge") throw new Error(`${checked.kind} instead of a charge`);
    return checked.charge;
  }

  /** Everything up to the record, as admission does it. */
  async function recorded(at: Replica, call: PricedCall) {
    const charge = await chargeOf(at, call);
    const { tenant, agent_id } = call;
    const one = accepted(clock.now(), { tenant, agent_id, ...paidColumns(charge) });
    const payment = at.payments.paymentRow(charge, one.row, null);
    if (!isOpen(payment)) throw new Error("the payment has no facilitator");
    await store.write(async (tx) => {
      await accept(tx, one);
      await insertPayment(tx, payment);
    });
    return { payment, key: { tenant, id: one.row.id } };
  }

  const shown = async ({ tenant, id }: { tenant: string; id: string }): Promise<unknown[]> => {
    const row = await findInvocation(store.read, tenant, id);
    return [row.status, row.error_class, row.settlement_status];
  };
  const total = (tenant: string, status: NonNullable<InvocationRow["settlement_status"]>) =>
    counted(store.read, tenant, "settlement", status);
  const kindOf = (work: Promise<unknown>) =>
    work.then(
      () => "done",
      (error: unknown) => (error instanceof Fault ? error.kind : String(error)),
    );

  return {
    clock,
    store: () => store,
    replica,
    attemptsShown,
    configured,
    priced,
    chargeOf,
    recorded,
    shown,
    total,
    kindOf,
  };
}
