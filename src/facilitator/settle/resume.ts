// Claims without a transaction that this process is to see to: claimed elsewhere for a wallet that it works for, or left
// behind by a crash, or by a database that went away. They are sent while they are valid, and fail otherwise. Each write names
// the claim that was read and changes nothing if that claim is gone, so this is safe beside others who still work on the
// payment, and beside a later claim of the same authorization.
import type { Log } from "../../core/log.ts";
import { type Meters, silentMeters } from "../../core/meters.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { endsWithin } from "../../kernel/wait.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import {
  type ClaimedPayment,
  claimedPayment,
  claimedWithoutTransaction,
  type FacilitatorPayment,
  type Gas,
  markSent,
  paymentName,
  recordFailed,
  recordSettled,
  simulatedGas,
} from "../payments/payments.ts";
import { windowProblem } from "./outcome.ts";
import type { PaymentsInFlight, SettleOptions } from "./settle.ts";

/** Larger than MAX.walletTransactions, so a batch always holds claims that are not in flight. */
const CLAIMS_AT_ONCE = 5_000;
const SIMULATIONS_AT_ONCE = 16;
/** They wait together for a nonce each, and may share transactions. */
const SENDS_AT_ONCE = 500;
const TRY_AGAIN_MS = 250;
/**
 * The wallet's holder sends a claim within a moment, so one this old was left behind. So was one that lies this far in
 * the future: the clock was set back since. A mistake here costs double work, never a double payment.
 */
const LEFT_BEHIND_MS = 10_000;

interface ResumeOptions extends SettleOptions {
  readonly inFlight: Pick<PaymentsInFlight, "sendingSince">;
  readonly onRecovered: ReturnType<typeof createRecoveredPayments>;
}

export function createResume(options: ResumeOptions) {
  const { store, clock, log, wallet, inFlight } = options;
  /** By payment. */
  const beingResumed = new Set<string>();
  const rounds = createRounds(log, resumeAll);

  const isLeftBehind = ({ created_at }: FacilitatorPayment) => Math.abs(clock.now() - created_at) >= LEFT_BEHIND_MS;

  /** Without those that this process is sending. */
  async function readClaims(): Promise<FacilitatorPayment[]> {
    const isSending = inFlight.sendingSince();
    const resuming = new Set(beingResumed);
    const rows = await claimedWithoutTransaction(store.read, CLAIMS_AT_ONCE);
    return rows.filter((row) => !isSending(row) && !resuming.has(paymentName(row)));
  }

  /** None where the database is away: the next look comes soon. */
  const claimsNow = () =>
    readClaims().catch((error: unknown) => {
      log.debug("claims_not_searched", { error });
      return [];
    });

  /** What is left for the next time is without those that others are at work on, here or elsewhere. */
  async function resumeAll() {
    const own = (await readClaims()).filter((row) => wallet.worksFor(row.wallet) || isLeftBehind(row));
    return resumeThose(own, () => null);
  }

  /** @param gasOf as it was simulated a moment ago; null when it has to be simulated again */
  async function resumeThose(rows: readonly FacilitatorPayment[], gasOf: (row: FacilitatorPayment) => Gas | null) {
    const counts = { done: 0, left: 0 };
    async function resume(row: FacilitatorPayment): Promise<void> {
      // Another run may have begun with it meanwhile.
      if (beingResumed.has(paymentName(row))) return;
      beingResumed.add(paymentName(row));
      const isDone = !rounds.isStopped() && (await resumeOne(options, row, gasOf(row)));
      beingResumed.delete(paymentName(row));
      counts[isDone ? "done" : "left"] += 1;
    }
    const { now = [], after = [] } = Object.groupBy(rows, (row) => (gasOf(row) === null ? "after" : "now"));
    await Promise.all([mapLimit(now, SENDS_AT_ONCE, resume), mapLimit(after, SIMULATIONS_AT_ONCE, resume)]);
    return counts;
  }

  return {
    /** Resolves when no claim without a transaction is left. Never rejects. */
    run: (): Promise<void> => rounds.start(0),
    /** Resumes claims if some process seems to have left any behind. Never rejects. */
    async takeUp(): Promise<void> {
      if ((await claimsNow()).some(isLeftBehind)) await rounds.start(0);
    },
    /** Sends what others have claimed for wallets of this process. Whether there was any. Never rejects. */
    async takeClaimed(): Promise<boolean> {
      if (rounds.isStopped() || wallet.isAlone()) return false;
      const own = (await claimsNow()).filter((row) => wallet.worksFor(row.wallet));
      return (await resumeThose(own, (row) => (isLeftBehind(row) ? null : simulatedGas(row)))).done > 0;
    },
    /** For a claim that may have been left behind: a commit whose answer was lost may still be under way. */
    soon: (): void => void rounds.start(TRY_AGAIN_MS),
    /** What is being resumed ends by itself, when the wallet stops. */
    stop: rounds.stop,
  };
}

/** One round after the other until none is left, with growing pauses while nothing can be done. */
function createRounds(log: Log, round: () => Promise<{ readonly done: number; readonly left: number }>) {
  let stopped = false;
  let wanted = false;
  let running: Promise<void> | null = null;
  let wake = () => {};
  let saidAt = Number.NEGATIVE_INFINITY;

  function start(delayMs: number): Promise<void> {
    wanted = true;
    if (delayMs === 0) wake();
    running ??= pause(delayMs).then(untilNoneIsLeft);
    return running;
  }

  function pause(ms: number): Promise<unknown> {
    const { promise, resolve } = Promise.withResolvers<void>();
    wake = resolve;
    return endsWithin(ms, promise);
  }

  /** Now and then only. */
  function tell(rest: { readonly left: number } | { readonly error: unknown }): void {
    if (performance.now() - saidAt < 60_000) return;
    saidAt = performance.now();
    log.warn("claims_not_resumed", rest);
  }

  async function untilNoneIsLeft(): Promise<void> {
    let pauseMs = TRY_AGAIN_MS;
    while (wanted && !stopped) {
      wanted = false;
      const { done, ...rest } = await round().catch((error: unknown) => ({ done: 0, error }));
      if (!("left" in rest) || rest.left > 0) {
        wanted = true;
        tell(rest);
      }
      if (done > 0) pauseMs = TRY_AGAIN_MS;
      if (wanted && !stopped) await pause(pauseMs);
      pauseMs = Math.min(2 * pauseMs, 8_000);
    }
    // With the last look at `wanted`, so that a wish for another run from now on starts one.
    running = null;
  }

  return {
    start,
    isStopped: (): boolean => stopped,
    stop(): void {
      stopped = true;
      wake();
    },
  };
}

/** False when nothing can be said or done now. @param known what was simulated a moment ago; null when it is too old */
async function resumeOne(options: ResumeOptions, row: FacilitatorPayment, known: Gas | null): Promise<boolean> {
  const { log, chain, wallet } = options;
  const payment = claimedPayment(row);
  const { account, payer, nonce } = row;
  try {
    const late = windowProblem(payment, await chain.time());
    if (late !== null) return await endUnsent(options, payment, late);
    if (!(await wallet.readiness()).ready) return false;
    // Another process can send it, and does.
    if (!wallet.canSend()) return !wallet.worksFor(row.wallet);
    let gas = known;
    if (gas === null) {
      const simulated = await chain.simulate(payment.authorization, payment.signature);
      if (!simulated.ok) return await endUnsent(options, payment, simulated.reason);
      ({ gas } = simulated);
    }
    await wallet.send(payment, gas);
    log.info("claim_resumed", { account, payer, nonce });
    return true;
  } catch (error) {
    log.debug("claim_not_resumed", { account, payer, nonce, error });
    return false;
  }
}

/** It has failed, unless the claim is of a state before it was sent. False when nobody can tell. */
async function endUnsent(options: ResumeOptions, payment: ClaimedPayment, reason: string): Promise<boolean> {
  const { store, clock, log, meters = silentMeters, outcomes, findOwnTransfer, onRecovered } = options;
  const { key, claim } = payment;
  const own = await findOwnTransfer(payment.authorization);
  if (own === "unknown") return false;
  const now = clock.now();
  const isEnded = await store.write(async (tx) => {
    if (own === null) {
      const failure = { reason, foreign_transaction: null, gas_burned: null };
      return recordFailed(tx, key, failure, { was: "claimed", claim, now });
    }
    return (await markSent(tx, payment, own.hash, now)) && recordSettled(tx, key, own, now);
  });
  if (!isEnded) return true;
  if (own !== null) onRecovered(key, own.hash);
  else {
    meters.settlement("failed");
    log.info("payment_failed", { payer: key.payer, nonce: key.nonce, reason });
  }
  outcomes.announce(key);
  return true;
}

/**
 * Payments that were collected by a transaction of ours before a restore, and that the database has forgotten: each is told
 * and counted once, wherever it is found and however often it is presented.
 */
export function createRecoveredPayments(log: Log, meters: Pick<Meters, "settlement">) {
  const told = boundedCache<string, true>(MAX.paymentsTold);
  return ({ payer, nonce }: Pick<PaymentKey, "payer" | "nonce">, transaction: Hex): void => {
    const name = paymentName({ payer, nonce });
    if (told.get(name) !== undefined) return;
    told.set(name, true);
    meters.settlement("settled");
    log.warn("forgotten_payment_found", { payer, nonce, transaction });
  };
}
