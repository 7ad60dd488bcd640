// What tests of settling need: a facilitator's settle over a real store, with hand-made doubles of the chain and of
// the wallet. The wallet's stores its mark as the real one does, and the test says what becomes of each payment.

import type { FindOwnTransfer } from "../../../src/chain/find-use.ts";
import { silentMeters } from "../../../src/core/meters.ts";
import { type FacilitatorAccount, usedOn, utcDay } from "../../../src/facilitator/payments/guardrails.ts";
import { createPaymentSpans } from "../../../src/facilitator/payments/payment-spans.ts";
import {
  type ClaimedPayment,
  claimPayment,
  type FacilitatorPayment,
  markSent,
  recordFailed,
  recordSettled,
  storedPayment,
} from "../../../src/facilitator/payments/payments.ts";
import { x402V1 } from "../../../src/facilitator/routes.ts";
import { requirementsText } from "../../../src/facilitator/settle/outcome.ts";
import {
  createSettle,
  createSettlementWaiters,
  type Settle,
  type SettleOptions,
} from "../../../src/facilitator/settle/settle.ts";
import type { Store } from "../../../src/storage/store.ts";
import { parseSettleRequest, type SettleRequest } from "../../../src/x402/codec.ts";
import type { Hex, PaymentKey } from "../../../src/x402/types.ts";
import { keyOf } from "../../../src/x402/verify.ts";
import { BASE } from "../network.ts";
import { newPayer, type PaymentOptions, signPayment, verifiedAtOnce } from "./payments.ts";

/** 2025-11-21T12:00:00Z. */
export const NOON = 1_763_726_400_000;
export const PAY_TO: Hex = "0x00000000000000000000000000000000000000aa";

/** What a claim is measured against, where that is nothing to the test. */
export const UNMEASURED = {
  limits: { dailyCeiling: 10n ** 30n, dailyGasWei: 0n, dailyGasAllWei: 0n },
  day: utcDay(NOON),
  hasCode: false,
  gasHeld: 0n,
  balance: { amount: 10n ** 30n, block: 0 },
  gasAtRisk: 0n,
  gas: { limit: 90_000n, from: PAY_TO, mayShare: false },
};

/** Of one account, by day. */
export const reservedOn = async (reader: Store["read"], name: string, day: string) =>
  (await usedOn(reader, { account: name, day })).reserved;

export const account = (name = "alpha", maxPerTransaction?: bigint, dailyCeiling?: bigint) => ({
  name,
  maxPerTransaction: maxPerTransaction ?? null,
  dailyCeiling: dailyCeiling ?? null,
});

/** A request signed by a payer of its own, unless one is named. */
export async function request(options: Partial<PaymentOptions> & { payer?: ReturnType<typeof newPayer> } = {}) {
  const { payer = newPayer(), ...rest } = options;
  const seconds = NOON / 1000;
  const signed = await signPayment(payer, {
    to: PAY_TO,
    value: 1_000n,
    validAfter: seconds - 600,
    validBefore: seconds + 600,
    ...rest,
  });
  return parsed(signed.settleRequest);
}

export function parsed(wire: unknown): SettleRequest {
  const request = parseSettleRequest(wire);
  if (!request.ok) throw new Error(request.reason);
  return request.value;
}

export const keyOfRequest = (asked: SettleRequest): PaymentKey => keyOf(BASE, asked.payment.authorization);

/** The name of a claim that another process has made. */
export const CLAIM = "another process";

/** As a process leaves it that dies between the claim and the transaction. */
export function claimedOn(store: Store, asked: SettleRequest, name = "alpha", attempt = CLAIM) {
  const { authorization, signature } = asked.payment;
  const requirements = requirementsText(asked.requirements);
  const key = keyOfRequest(asked);
  const claim = { key, claim: attempt, account: name, authorization, signature, requirements };
  return store.write((tx) => claimPayment(tx, { ...claim, ...UNMEASURED }, NOON));
}

interface Logged {
  readonly level: string;
  readonly event: string;
  readonly fields: Readonly<Record<string, unknown>>;
}

function recordingLog(lines: Logged[]) {
  const at =
    (level: string) =>
    (event: string, fields: Readonly<Record<string, unknown>> = {}) =>
      void lines.push({ level, event, fields });
  return { debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error") };
}

interface SettlingOptions {
  readonly inclusionTimeoutMs?: number;
  readonly inFlightMax?: number;
  /** Payments that may be under way at once. */
  readonly capacity?: number;
  readonly maxPerTransaction?: bigint;
  readonly dailyCeiling?: bigint;
  readonly dailyGasWei?: bigint;
  readonly dailyGasAllWei?: bigint;
  readonly minValue?: bigint;
  readonly now?: number;
}

type Simulate = (
  ...args: Parameters<SettleOptions["chain"]["simulate"]>
) => Promise<{ readonly ok: true; readonly gas: bigint } | { readonly ok: false; readonly reason: string }>;

/** What the tests turn: everything may be changed at any time. */
export function settling(store: Store, options: SettlingOptions = {}) {
  const clock = { time: options.now ?? NOON, now: () => clock.time };
  const logged: Logged[] = [];
  const outcomes = createSettlementWaiters(store);
  const sends: ClaimedPayment[] = [];
  const turns = {
    simulate: (async () => ({ ok: true, gas: 90_000n })) as Simulate,
    /** What the chain's time is, in milliseconds: at first that of the clock. */
    time: (async () => ({ earliest: clock.time, latest: clock.time })) as SettleOptions["chain"]["time"],
    isSignedByContract: (async () => false) as SettleOptions["chain"]["isSignedByContract"],
    balanceOf: (async () => ({ amount: 10n ** 30n, block: 0 })) as (
      payer: Hex,
    ) => Promise<{ readonly amount: bigint; readonly block: number }>,
    hasCode: (async () => false) as SettleOptions["chain"]["hasCode"],
    isUsed: (async () => false) as SettleOptions["chain"]["isUsed"],
    findOwnTransfer: (async () => null) as FindOwnTransfer,
    readiness: (async () => ({ ready: true })) as SettleOptions["wallet"]["readiness"],
    /** What becomes of a payment as soon as it is stored as sent: by default it is settled. */
    afterSend: ((key: PaymentKey) => settled(key)) as (key: PaymentKey) => Promise<unknown>,
    send: (async (payment: ClaimedPayment) => storeSent(payment)) as SettleOptions["wallet"]["send"],
  };

  async function storeSent(payment: ClaimedPayment) {
    const marked = await store.write((tx) => markSent(tx, payment, hashOf(payment.key), clock.now()));
    if (!marked) throw new Error("not claimed any more");
    sends.push(payment);
    void turns.afterSend(payment.key);
  }

  async function settled(key: PaymentKey): Promise<boolean> {
    const inclusion = { hash: hashOf(key), blockNumber: 7, blockHash: hashOf(key) };
    const done = await store.write((tx) => recordSettled(tx, key, inclusion, clock.now()));
    outcomes.announce(key);
    return done;
  }

  async function failed(
    key: PaymentKey,
    reason = "execution reverted",
    foreign: Hex | null = null,
    gasBurned: bigint | null = null,
  ) {
    const failure = { reason, foreign_transaction: foreign, gas_burned: gasBurned };
    const day = utcDay((await turns.time()).latest);
    const done = await store.write((tx) => recordFailed(tx, key, failure, { was: "sent", day, now: clock.now() }));
    outcomes.announce(key);
    return done;
  }

  const settle = createSettle({
    network: BASE,
    store,
    clock,
    meters: silentMeters,
    spans: createPaymentSpans(null),
    verifier: verifiedAtOnce,
    log: recordingLog(logged),
    chain: {
      async simulate(...args) {
        const found = await turns.simulate(...args);
        return found.ok ? { ok: true, gas: { limit: found.gas, from: PAY_TO, mayShare: false } } : found;
      },
      time: () => turns.time(),
      isSignedByContract: (...args) => turns.isSignedByContract(...args),
      balanceOf: async (payer) => ({ ...(await turns.balanceOf(payer)), hash: PAY_TO }),
      hasCode: (...args) => turns.hasCode(...args),
      isUsed: (...args) => turns.isUsed(...args),
    },
    wallet: {
      capacity: options.capacity ?? 2_000,
      readiness: () => turns.readiness(),
      costOf: async ({ limit }) => limit,
      send: (...args) => turns.send(...args),
      worksFor: () => true,
      canSend: () => true,
      isAlone: () => true,
    },
    outcomes,
    findOwnTransfer: (authorization) => turns.findOwnTransfer(authorization),
    limits: {
      maxPerTransaction: options.maxPerTransaction ?? 10_000n,
      dailyCeiling: options.dailyCeiling ?? 1_000_000n,
      dailyGasWei: options.dailyGasWei ?? 0n,
      dailyGasAllWei: options.dailyGasAllWei ?? 0n,
      minValue: options.minValue ?? 0n,
      inclusionTimeoutMs: options.inclusionTimeoutMs ?? 15_000,
    },
    ...(options.inFlightMax === undefined ? {} : { inFlightMax: options.inFlightMax }),
  });

  return {
    ...settle,
    settle: answered(settle),
    clock,
    logged,
    outcomes,
    sends,
    turns,
    settled,
    failed,
    storeSent,
    record: (asked: SettleRequest) => storedPayment(store.read, keyOfRequest(asked)),
    reserved: (name = "alpha", time = clock.now()) => reservedOn(store.read, name, utcDay(time)),
    async refusals() {
      const { db, tables } = store.read;
      return db.select().from(tables.facilitatorRefusals);
    },
  };
}

/** Settles as the caller is answered. */
export function answered({ settle }: Pick<Settle, "settle">) {
  return async (account: FacilitatorAccount, asked: SettleRequest) => {
    return x402V1(BASE).answer(asked, await settle(account, asked));
  };
}

/** The double's transaction for a payment. */
export function hashOf({ payer, nonce }: PaymentKey): Hex {
  return `0x${new Bun.CryptoHasher("sha256").update(payer + nonce).digest("hex")}`;
}

/** `settled`, `declined`, `unknown <hash>`, or the Fault's kind. */
export async function ending(answer: Promise<unknown>): Promise<string> {
  try {
    const response = (await answer) as { success: boolean; transaction: string };
    if (response.success) return "settled";
    return response.transaction === "" ? "declined" : `unknown ${response.transaction}`;
  } catch (error) {
    return (error as { kind?: string }).kind ?? String(error);
  }
}

export async function allPayments(store: Store): Promise<FacilitatorPayment[]> {
  const { db, tables } = store.read;
  return db.select().from(tables.facilitatorPayments);
}

export async function emptied(store: Store): Promise<void> {
  await store.write(async ({ db, tables }) => {
    await db.delete(tables.facilitatorPayments);
    await db.delete(tables.facilitatorDays);
    await db.delete(tables.facilitatorRefusals);
    await db.delete(tables.facilitatorTransactions);
  });
}
