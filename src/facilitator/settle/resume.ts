// Claims that nothing was ever broadcast for: what a crash, or a database that went away, left behind. They are
// sent after all while they are good, else they fail, and until then they are tried again. Each is sent or failed as
// the claim that was read, and only while that stands: so this is safe beside whoever else may still be at work on it,
// and beside a later claim of the same authorization.
import { endsWithin } from "../../concurrency/deadline.ts";
import {
  type ClaimedPayment,
  claimedPayment,
  claimedWithoutTransaction,
  type FacilitatorPayment,
  recordFailed,
} from "../payments.ts";
import type { SettleOptions } from "./ports.ts";
import { windowProblem } from "./request.ts";

/** More than can be at work at once, so that there are others among them. */
const CLAIMS_AT_ONCE = 5_000;
const SIMULATIONS_AT_ONCE = 16;
const TRY_AGAIN_MS = 250;
/**
 * A claim this old is no other process's to send, which takes it a moment. So is one of a time that far ahead: the
 * clock was set back since. To be wrong about that is to do work twice, not to pay twice.
 */
const LEFT_BEHIND_MS = 10_000;

export interface Resume {
  /** Resolves when no claim without a transaction is left. Never rejects. */
  run(): Promise<void>;
  /** The same, if there are any that some process seems to have left behind. Never rejects. */
  takeUp(): Promise<void>;
  /** For a claim that may have been left behind just now: a commit whose answer was lost may still be under way. */
  soon(): void;
  /** What is at work ends by itself: the wallet's stop makes it. */
  stop(): void;
}

interface ResumeOptions extends SettleOptions {
  isAtWork(row: FacilitatorPayment): boolean;
}

export function createResume(options: ResumeOptions): Resume {
  const { store, clock, log, chain, wallet, outcomes } = options;
  const stopping = Promise.withResolvers<void>();
  let stopped = false;
  let wanted = false;
  let running: Promise<void> | null = null;

  function start(delayMs: number): Promise<void> {
    wanted = true;
    running ??= endsWithin(delayMs, stopping.promise)
      .then(untilNoneIsLeft)
      .finally(() => {
        running = null;
      });
    return running;
  }

  async function untilNoneIsLeft(): Promise<void> {
    while (wanted && !stopped) {
      wanted = false;
      try {
        if ((await resumeAll()) > 0) wanted = true;
      } catch (error) {
        log.warn("claims_not_resumed", { error });
        wanted = true;
      }
      if (wanted) await endsWithin(TRY_AGAIN_MS, stopping.promise);
    }
  }

  async function isAnyLeftBehind(): Promise<boolean> {
    try {
      const rows = await claimedWithoutTransaction(store.read, CLAIMS_AT_ONCE);
      const now = clock.now();
      return rows.some((row) => Math.abs(now - row.created_at) >= LEFT_BEHIND_MS && !options.isAtWork(row));
    } catch (error) {
      log.debug("claims_not_searched", { error });
      return false;
    }
  }

  /** How many are left for the next time. What this process is at work on is not among them: that ends by itself. */
  async function resumeAll(): Promise<number> {
    const rows = await claimedWithoutTransaction(store.read, CLAIMS_AT_ONCE);
    const queue = rows.values();
    let left = 0;
    async function worker() {
      for (const row of queue) {
        if (options.isAtWork(row)) continue;
        if (stopped || !(await resume(row))) left += 1;
      }
    }
    await Promise.all(Array.from({ length: SIMULATIONS_AT_ONCE }, worker));
    return left;
  }

  /** False when nothing can be said or done now. */
  async function resume(row: FacilitatorPayment): Promise<boolean> {
    const payment = claimedPayment(row);
    const { account, payer, nonce } = row;
    try {
      const late = windowProblem({ payment }, await chain.time());
      if (late !== null) return await fail(payment, late);
      if (!(await wallet.readiness()).ready) return false;
      const simulated = await chain.simulate(payment.authorization, payment.signature);
      if (!simulated.ok) return await fail(payment, simulated.reason);
      await wallet.send(payment, simulated.gas);
      log.info("claim_resumed", { account, payer, nonce });
      return true;
    } catch (error) {
      log.warn("claim_not_resumed", { account, payer, nonce, error });
      return false;
    }
  }

  async function fail(payment: ClaimedPayment, reason: string): Promise<boolean> {
    const { key, claim } = payment;
    const failure = { reason, foreign_transaction: null, gas_burned: null };
    const found = { was: "claimed", claim, now: clock.now() } as const;
    if (await store.write((tx) => recordFailed(tx, key, failure, found))) {
      const { payer, nonce } = key;
      log.info("payment_failed", { payer, nonce, reason });
      outcomes.announce(key);
    }
    return true;
  }

  return {
    run: () => start(0),
    async takeUp() {
      if (await isAnyLeftBehind()) await start(0);
    },
    soon: () => void start(TRY_AGAIN_MS),
    stop() {
      stopped = true;
      stopping.resolve();
    },
  };
}
