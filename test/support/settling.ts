// What tests of settling need: a facilitator's settle over a real store, with hand-made doubles of the chain and of
// the wallet. The wallet's stores its mark as the real one does, and the test says what becomes of each payment.
import { createOutcomes } from "../../src/facilitator/outcomes.ts";
import {
  type ClaimedPayment,
  type FacilitatorPayment,
  findPayment,
  markSent,
  recordFailed,
  recordSettled,
  reservedOn,
  utcDay,
} from "../../src/facilitator/payments.ts";
import type { SettleChain, SettleWallet } from "../../src/facilitator/ports.ts";
import { createSettle } from "../../src/facilitator/settle.ts";
import type { Store } from "../../src/storage/store.ts";
import { parseSettleRequest, type SettleRequest } from "../../src/x402/codec.ts";
import type { Hex, PaymentKey } from "../../src/x402/types.ts";
import { keyOf } from "../../src/x402/verify.ts";
import { newPayer, type PaymentOptions, signPayment } from "./payments.ts";

/** 2025-11-21T12:00:00Z. */
export const NOON = 1_763_726_400_000;
export const PAY_TO: Hex = "0x00000000000000000000000000000000000000aa";

export const account = (name = "alpha", maxPerTransaction?: bigint, dailyCeiling?: bigint) => ({
  name,
  maxPerTransaction: maxPerTransaction ?? null,
  dailyCeiling: dailyCeiling ?? null,
});

/** A request signed by a payer of its own, unless one is named. */
export async function request(
  options: Partial<PaymentOptions> & { payer?: ReturnType<typeof newPayer> } = {},
) {
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

export const keyOfRequest = (asked: SettleRequest): PaymentKey => keyOf(asked.payment.authorization);

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
  readonly atWorkMax?: number;
  readonly maxPerTransaction?: bigint;
  readonly dailyCeiling?: bigint;
  readonly now?: number;
}

/** What the tests turn: everything may be changed at any time. */
export function settling(store: Store, options: SettlingOptions = {}) {
  const clock = { time: options.now ?? NOON, now: () => clock.time };
  const logged: Logged[] = [];
  const outcomes = createOutcomes(store);
  const sends: ClaimedPayment[] = [];
  const turns = {
    simulate: (async () => ({ ok: true, gas: 90_000n })) as SettleChain["simulate"],
    readiness: (async () => ({ ready: true })) as SettleWallet["readiness"],
    /** What becomes of a payment as soon as it is stored as sent: by default it is settled. */
    afterSend: ((key: PaymentKey) => settled(key)) as (key: PaymentKey) => Promise<unknown>,
    send: (async (payment: ClaimedPayment) => storeSent(payment)) as SettleWallet["send"],
  };

  async function storeSent(payment: ClaimedPayment) {
    const marked = await store.write((tx) => markSent(tx, payment.key, hashOf(payment.key), clock.now()));
    if (!marked) throw new Error("not claimed any more");
    sends.push(payment);
    void turns.afterSend(payment.key);
  }

  async function settled(key: PaymentKey): Promise<boolean> {
    const inclusion = { transaction_hash: hashOf(key), block_number: 7, block_hash: hashOf(key) };
    const done = await store.write((tx) => recordSettled(tx, key, inclusion, clock.now()));
    outcomes.announce(key);
    return done;
  }

  async function failed(key: PaymentKey, reason = "execution reverted", foreign: Hex | null = null) {
    const failure = { reason, foreign_transaction: foreign };
    const done = await store.write((tx) => recordFailed(tx, key, failure, { was: "sent", now: clock.now() }));
    outcomes.announce(key);
    return done;
  }

  const settle = createSettle({
    store,
    clock,
    log: recordingLog(logged),
    chain: { simulate: (...args) => turns.simulate(...args) },
    wallet: { readiness: () => turns.readiness(), send: (...args) => turns.send(...args) },
    outcomes,
    limits: {
      maxPerTransaction: options.maxPerTransaction ?? 10_000n,
      dailyCeiling: options.dailyCeiling ?? 1_000_000n,
      inclusionTimeoutMs: options.inclusionTimeoutMs ?? 15_000,
    },
    ...(options.atWorkMax === undefined ? {} : { atWorkMax: options.atWorkMax }),
  });

  return {
    ...settle,
    clock,
    logged,
    outcomes,
    sends,
    turns,
    settled,
    failed,
    storeSent,
    record: (asked: SettleRequest) => findPayment(store.read, keyOfRequest(asked)),
    reserved: (name = "alpha", time = clock.now()) => reservedOn(store.read, name, utcDay(time)),
    async refusals() {
      const { db, tables } = store.read;
      return db.select().from(tables.facilitatorRefusals);
    },
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
  });
}
