// Resumes claims without a transaction: claims that another process made for a wallet of this one, and claims left behind by
// a crash or a database outage. A resumed claim is sent while the payment is valid, and fails otherwise. Each write names
// the claim that was read and changes nothing if that claim is gone, so resuming is safe while another process still works
// on the payment, and when a later claim of the same authorization exists.
import type { Log } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { endsWithin } from "../../kernel/wait.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import type { ClaimedPayment, FacilitatorPayment, Gas } from "../payments/payments.ts";
import * as payments from "../payments/payments.ts";
import { windowProblem } from "./outcome.ts";
import type { PaymentsInFlight, SettleOptions } from "./settle.ts";

/** Claims read per round. More than MAX.walletTransactions, so a batch always holds claims that are not in flight. */
const CLAIMS_AT_ONCE = 5_000;
const SIMULATIONS_AT_ONCE = 16;
/** Payments sent at a time wait together for nonces, and may share transactions. */
const SENDS_AT_ONCE = 500;
const TRY_AGAIN_MS = 250;
/**
 * The wallet's holder sends a claim at once, so a claim this old was left behind. So was a claim dated this far in the
 * future: the clock was set back since. A wrong guess costs double work, never a double payment.
 */
const LEFT_BEHIND_MS = 10_000;

interface ResumeOptions extends SettleOptions {
  readonly inFlight: Pick<PaymentsInFlight, "sendingSince">;
  readonly onRecovered: ReturnType<typeof createRecoveredPayments>;
}

export function createResume(options: ResumeOptions) {
  const { store, clock, log, wallet, inFlight } = options;
  /** Payment names. */
  const beingResumed = new Set<string>();
  // Resumes the claims of this process's wallets, and any that were left behind; other processes see to the rest.
  const rounds = createRounds(log, async () => {
    const own = (await readClaims()).filter((row) => wallet.worksFor(row.wallet) || isLeftBehind(row));
    return resumeThose(own, () => null);
  });

  const isLeftBehind = ({ created_at }: FacilitatorPayment) => Math.abs(clock.now() - created_at) >= LEFT_BEHIND_MS;

  /** Claims without a transaction, except those that this process is sending or resuming. */
  async function readClaims(): Promise<FacilitatorPayment[]> {
    const isSending = inFlight.sendingSince();
    const resuming = new Set(beingResumed);
    const rows = await payments.claimedWithoutTransaction(store.read, CLAIMS_AT_ONCE);
    return rows.filter((row) => !isSending(row) && !resuming.has(payments.paymentName(row)));
  }

  /** No claims when the database is unavailable: the next poll comes soon. */
  const claimsNow = () =>
    readClaims().catch((error: unknown) => {
      log.debug("claims_not_searched", { error });
      return [];
    });

  /** @param gasOf the gas simulated a moment ago; null when the payment must be simulated again */
  async function resumeThose(rows: readonly FacilitatorPayment[], gasOf: (row: FacilitatorPayment) => Gas | null) {
    const counts = { done: 0, left: 0 };
    async function resume(row: FacilitatorPayment): Promise<void> {
      // Another run may have started on this claim meanwhile.
      if (beingResumed.has(payments.paymentName(row))) return;
      beingResumed.add(payments.paymentName(row));
      const isDone = !rounds.isStopped() && (await resumeOne(options, row, gasOf(row)));
      beingResumed.delete(payments.paymentName(row));
      counts[isDone ? "done" : "left"] += 1;
    }
    const { fresh = [], stale = [] } = Object.groupBy(rows, (row) => (gasOf(row) === null ? "stale" : "fresh"));
    await Promise.all([mapLimit(fresh, SENDS_AT_ONCE, resume), mapLimit(stale, SIMULATIONS_AT_ONCE, resume)]);
    return counts;
  }

  return {
    /** Resolves when no claim without a transaction is left. Never rejects. */
    run: (): Promise<void> => rounds.start(0),
    /** Resumes claims if any seem to have been left behind. Never rejects. */
    async takeUp(): Promise<void> {
      if ((await claimsNow()).some(isLeftBehind)) await rounds.start(0);
    },
    /** Sends what other processes have claimed for wallets of this one. Returns whether any was sent. Never rejects. */
    async takeClaimed(): Promise<boolean> {
      if (rounds.isStopped() || wallet.isAlone()) return false;
      const own = (await claimsNow()).filter((row) => wallet.worksFor(row.wallet));
      return (await resumeThose(own, (row) => (isLeftBehind(row) ? null : payments.simulatedGas(row)))).done > 0;
    },
    /** Starts a round soon, for a claim that may have been left behind: a commit whose response was lost may yet take effect. */
    soon: (): void => void rounds.start(TRY_AGAIN_MS),
    /** Starts no further rounds. Sends in progress end when the wallet stops. */
    stop: rounds.stop,
  };
}

/** Runs rounds until no claim is left, with exponential backoff while nothing can be done. */
function createRounds(log: Log, round: () => Promise<{ readonly done: number; readonly left: number }>) {
  let stopped = false;
  let wanted = false;
  let running: Promise<void> | null = null;
  let wake = () => {};
  let warnedAt = Number.NEGATIVE_INFINITY;

  function start(delayMs: number): Promise<void> {
    wanted = true;
    if (delayMs === 0) wake();
    running ??= pause(delayMs).then(runUntilNoneIsLeft);
    return running;
  }

  function pause(ms: number): Promise<unknown> {
    const { promise, resolve } = Promise.withResolvers<void>();
    wake = resolve;
    return endsWithin(ms, promise);
  }

  /** Logs at most once a minute. */
  function warn(rest: { readonly left: number } | { readonly error: unknown }): void {
    if (performance.now() - warnedAt < 60_000) return;
    warnedAt = performance.now();
    log.warn("claims_not_resumed", rest);
  }

  async function runUntilNoneIsLeft(): Promise<void> {
    let pauseMs = TRY_AGAIN_MS;
    while (wanted && !stopped) {
      wanted = false;
      const { done, ...rest } = await round().catch((error: unknown) => ({ done: 0, error }));
      if (!("left" in rest) || rest.left > 0) {
        wanted = true;
        warn(rest);
      }
      if (done > 0) pauseMs = TRY_AGAIN_MS;
      if (wanted && !stopped) await pause(pauseMs);
      pauseMs = Math.min(2 * pauseMs, 8_000);
    }
    // Reset in the same tick as the last check of `wanted`, so that a later call of `start` begins a new run.
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

/** False when nothing can be decided or done now. @param known the gas simulated a moment ago; null when it is too old */
async function resumeOne(options: ResumeOptions, row: FacilitatorPayment, known: Gas | null): Promise<boolean> {
  const { log, chain, wallet } = options;
  const payment = payments.claimedPayment(row);
  const { account, payer, nonce } = row;
  try {
    const late = windowProblem(payment, await chain.time());
    if (late !== null) return await endUnsent(options, payment, late);
    if (!(await wallet.readiness()).ready) return false;
    // No wallet of this process has gas. A claim on the wallet of another process counts as done, since that one sends it.
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

/** Records the failure, unless a restored database forgot that the payment was collected. False when nobody can tell. */
async function endUnsent(options: ResumeOptions, payment: ClaimedPayment, reason: string): Promise<boolean> {
  const { store, clock, log, meters, outcomes, findOwnTransfer, onRecovered } = options;
  const { key, claim } = payment;
  const own = await findOwnTransfer(payment.authorization);
  if (own === "unknown") return false;
  const now = clock.now();
  const isEnded = await store.write(async (tx) => {
    if (own === null) {
      const failure = { reason, foreign_transaction: null, gas_burned: null };
      return payments.recordFailed(tx, key, failure, { was: "claimed", claim, now });
    }
    return (await payments.markSent(tx, payment, own.hash, now)) && payments.recordSettled(tx, key, own, now);
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
 * Reports payments that a transaction of ours collected before the database was restored to an older state. Each payment is
 * logged and counted once, wherever it is found and however often it is presented.
 */
export function createRecoveredPayments(log: Log, meters: Pick<Meters, "settlement">) {
  const reported = boundedCache<string, true>(MAX.paymentsTold);
  return ({ payer, nonce }: Pick<PaymentKey, "payer" | "nonce">, transaction: Hex): void => {
    const name = payments.paymentName({ payer, nonce });
    if (reported.get(name) !== undefined) return;
    reported.set(name, true);
    meters.settlement("settled");
    log.warn("forgotten_payment_found", { payer, nonce, transaction });
  };
}
