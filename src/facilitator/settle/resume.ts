// Claims without a transaction that this process is to see to: claimed elsewhere for a wallet that it works for, or left
// behind by a crash, or by a database that went away. They are sent while they are valid, and fail otherwise; until one of
// the two is possible they are tried again. Each write names the claim that was read and changes nothing if that claim is
// gone, so this is safe beside others who still work on the payment, and beside a later claim of the same authorization.
import type { Receipt } from "../../chain/rpc-types.ts";
import type { Log, LogFields } from "../../core/log.ts";
import { type Meters, silentMeters } from "../../core/meters.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { endsWithin } from "../../kernel/wait.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import {
  type ClaimedPayment,
  claimedPayment,
  claimedWithoutTransaction,
  type FacilitatorPayment,
  markSent,
  paymentName,
  recordFailed,
  recordSettled,
  simulatedGas,
} from "../payments/payments.ts";
import type { InFlight } from "./claims.ts";
import type { Gas, SettleOptions } from "./ports.ts";
import { windowProblem } from "./request.ts";

/** Larger than IN_FLIGHT_MAX, so a batch always holds claims that are not in flight. */
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
  readonly inFlight: Pick<InFlight, "sendingSince">;
  readonly onRecovered: RecoveredPayments;
}

export function createResume(options: ResumeOptions) {
  const { store, clock, log, wallet, inFlight } = options;
  const resumeOne = createResumeOne(options);
  /** By payment. */
  const underWay = new Set<string>();
  const rounds = createRounds(log, resumeAll);

  const isLeftBehind = ({ created_at }: FacilitatorPayment) => Math.abs(clock.now() - created_at) >= LEFT_BEHIND_MS;

  /** Without those that this process is sending. */
  async function readClaims(): Promise<FacilitatorPayment[]> {
    const isSending = inFlight.sendingSince();
    const resuming = new Set(underWay);
    const rows = await claimedWithoutTransaction(store.read, CLAIMS_AT_ONCE);
    return rows.filter((row) => !isSending(row) && !resuming.has(paymentName(row)));
  }

  async function isAnyLeftBehind(): Promise<boolean> {
    try {
      return (await readClaims()).some(isLeftBehind);
    } catch (error) {
      log.debug("claims_not_searched", { error });
      return false;
    }
  }

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
      if (underWay.has(paymentName(row))) return;
      underWay.add(paymentName(row));
      const isDone = !rounds.isStopped() && (await resumeOne(row, gasOf(row)));
      underWay.delete(paymentName(row));
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
      if (await isAnyLeftBehind()) await rounds.start(0);
    },
    /** Sends what others have claimed for wallets of this process. Whether there was any. Never rejects. */
    async takeClaimed(): Promise<boolean> {
      if (rounds.isStopped() || wallet.isAlone()) return false;
      try {
        const own = (await readClaims()).filter((row) => wallet.worksFor(row.wallet));
        return (await resumeThose(own, (row) => (isLeftBehind(row) ? null : simulatedGas(row)))).done > 0;
      } catch (error) {
        log.debug("claims_not_searched", { error });
        return false;
      }
    },
    /** For a claim that may have been left behind just now: a commit whose answer was lost may still be under way. */
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
  function say(fields: LogFields): void {
    wanted = true;
    if (performance.now() - saidAt < 60_000) return;
    saidAt = performance.now();
    log.warn("claims_not_resumed", fields);
  }

  /** Returns how many are done. */
  async function attempt(): Promise<number> {
    try {
      const { done, left } = await round();
      if (left > 0) say({ left });
      return done;
    } catch (error) {
      say({ error });
      return 0;
    }
  }

  async function untilNoneIsLeft(): Promise<void> {
    let pauseMs = TRY_AGAIN_MS;
    while (wanted && !stopped) {
      wanted = false;
      if ((await attempt()) > 0) pauseMs = TRY_AGAIN_MS;
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

function createResumeOne(options: ResumeOptions) {
  const { log, chain, wallet } = options;
  const endUnsent = createUnsentEnd(options);

  /** False when nothing can be said or done now. @param known what was simulated a moment ago; null when it is too old */
  return async (row: FacilitatorPayment, known: Gas | null): Promise<boolean> => {
    const payment = claimedPayment(row);
    const { account, payer, nonce } = row;
    try {
      const late = windowProblem({ payment }, await chain.time());
      if (late !== null) return await endUnsent(payment, late);
      if (!(await wallet.readiness()).ready) return false;
      // Another process can send it, and does.
      if (!wallet.canSend()) return !wallet.worksFor(row.wallet);
      let gas = known;
      if (gas === null) {
        const simulated = await chain.simulate(payment.authorization, payment.signature);
        if (!simulated.ok) return await endUnsent(payment, simulated.reason);
        ({ gas } = simulated);
      }
      await wallet.send(payment, gas);
      log.info("claim_resumed", { account, payer, nonce });
      return true;
    } catch (error) {
      log.debug("claim_not_resumed", { account, payer, nonce, error });
      return false;
    }
  };
}

function createUnsentEnd(options: ResumeOptions) {
  const { store, clock, log, meters = silentMeters, outcomes, findOwnTransfer, onRecovered } = options;

  async function collected(payment: ClaimedPayment, { hash, blockNumber, blockHash }: Receipt): Promise<boolean> {
    const { key } = payment;
    const inclusion = { transaction_hash: hash, block_number: blockNumber, block_hash: blockHash };
    const isSettled = await store.write(async (tx) => {
      const now = clock.now();
      return (await markSent(tx, payment, hash, now)) && recordSettled(tx, key, inclusion, now);
    });
    if (isSettled) {
      onRecovered(key, hash);
      outcomes.announce(key);
    }
    return true;
  }

  async function fail(payment: ClaimedPayment, reason: string): Promise<boolean> {
    const { key, claim } = payment;
    const failure = { reason, foreign_transaction: null, gas_burned: null };
    const found = { was: "claimed", claim, now: clock.now() } as const;
    if (await store.write((tx) => recordFailed(tx, key, failure, found))) {
      const { payer, nonce } = key;
      meters.settlement("failed");
      log.info("payment_failed", { payer, nonce, reason });
      outcomes.announce(key);
    }
    return true;
  }

  /** It has failed, unless the claim is of a state before it was sent. False when nobody can tell. */
  return async (payment: ClaimedPayment, reason: string): Promise<boolean> => {
    const own = await findOwnTransfer(payment.authorization);
    if (own === "unknown") return false;
    return own === null ? fail(payment, reason) : collected(payment, own);
  };
}

/** Half of them are remembered for certain. A process that starts again counts from zero anyway. */
const REMEMBERED_MAX = 20_000;

type RecoveredPayments = ReturnType<typeof createRecoveredPayments>;

/**
 * Payments that were collected by a transaction of ours before a restore, and that the database has forgotten: each is told
 * and counted once, wherever it is found and however often it is presented.
 */
export function createRecoveredPayments(log: Log, meters: Pick<Meters, "settlement">) {
  const told = boundedCache<string, true>(REMEMBERED_MAX);
  return ({ payer, nonce }: Pick<PaymentKey, "payer" | "nonce">, transaction: Hex): void => {
    const name = paymentName({ payer, nonce });
    if (told.get(name) !== undefined) return;
    told.set(name, true);
    meters.settlement("settled");
    log.warn("forgotten_payment_found", { payer, nonce, transaction });
  };
}
