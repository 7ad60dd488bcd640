// Claims for which nothing was ever broadcast: a crash, or a database that went away, left them behind. They are sent
// while they are valid, and fail otherwise; until one of the two is possible they are tried again. Each write names the
// claim that was read and changes nothing if that claim is gone, so this is safe beside others who still work on the
// payment, and beside a later claim of the same authorization.
import { endsWithin } from "../../concurrency/deadline.ts";
import type { Receipt } from "../chain/rpc-types.ts";
import { claimedWithoutTransaction } from "../payments/open-payments.ts";
import {
  type ClaimedPayment,
  claimedPayment,
  type FacilitatorPayment,
  markSent,
  recordFailed,
  recordSettled,
} from "../payments/payments.ts";
import type { AtWork } from "./at-work.ts";
import type { SettleOptions } from "./ports.ts";
import { windowProblem } from "./request.ts";

/** Larger than AT_WORK_MAX, so a batch always holds claims that are not in flight. */
const CLAIMS_AT_ONCE = 5_000;
const SIMULATIONS_AT_ONCE = 16;
const TRY_AGAIN_MS = 250;
/**
 * Another process sends its claim within a moment, so one this old was left behind. So was one that lies this far in
 * the future: the clock was set back since. A mistake here costs double work, never a double payment.
 */
const LEFT_BEHIND_MS = 10_000;

interface ResumeOptions extends SettleOptions {
  readonly atWork: Pick<AtWork, "has">;
}

export function createResume(options: ResumeOptions) {
  const { store, clock, log, chain, wallet } = options;
  const endUnsent = createUnsentEnd(options);
  const stopping = Promise.withResolvers<void>();
  let stopped = false;
  let wanted = false;
  let running: Promise<void> | null = null;

  function start(delayMs: number): Promise<void> {
    wanted = true;
    running ??= endsWithin(delayMs, stopping.promise).then(untilNoneIsLeft);
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
    // With the last look at `wanted`, so that whoever wants another run now starts one.
    running = null;
  }

  async function isAnyLeftBehind(): Promise<boolean> {
    try {
      const rows = await claimedWithoutTransaction(store.read, CLAIMS_AT_ONCE);
      const now = clock.now();
      return rows.some((row) => Math.abs(now - row.created_at) >= LEFT_BEHIND_MS && !options.atWork.has(row));
    } catch (error) {
      log.debug("claims_not_searched", { error });
      return false;
    }
  }

  /** Returns how many are left for the next time, without those at work in this process, which end by themselves. */
  async function resumeAll(): Promise<number> {
    const rows = await claimedWithoutTransaction(store.read, CLAIMS_AT_ONCE);
    const queue = rows.values();
    let left = 0;
    async function worker() {
      for (const row of queue) {
        if (options.atWork.has(row)) continue;
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
      if (late !== null) return await endUnsent(payment, late);
      if (!(await wallet.readiness()).ready) return false;
      const simulated = await chain.simulate(payment.authorization, payment.signature);
      if (!simulated.ok) return await endUnsent(payment, simulated.reason);
      await wallet.send(payment, simulated.gas);
      log.info("claim_resumed", { account, payer, nonce });
      return true;
    } catch (error) {
      log.warn("claim_not_resumed", { account, payer, nonce, error });
      return false;
    }
  }

  return {
    /** Resolves when no claim without a transaction is left. Never rejects. */
    run: (): Promise<void> => start(0),
    /** The same, if some process seems to have left any behind. Never rejects. */
    async takeUp(): Promise<void> {
      if (await isAnyLeftBehind()) await start(0);
    },
    /** For a claim that may have been left behind just now: a commit whose answer was lost may still be under way. */
    soon: (): void => void start(TRY_AGAIN_MS),
    /** What is being resumed ends by itself, when the wallet stops. */
    stop(): void {
      stopped = true;
      stopping.resolve();
    },
  };
}

function createUnsentEnd({ store, clock, log, outcomes, findOwnTransfer }: ResumeOptions) {
  async function collected(payment: ClaimedPayment, { hash, blockNumber, blockHash }: Receipt): Promise<boolean> {
    const { key } = payment;
    const inclusion = { transaction_hash: hash, block_number: blockNumber, block_hash: blockHash };
    const isSettled = await store.write(async (tx) => {
      const now = clock.now();
      return (await markSent(tx, payment, hash, now)) && recordSettled(tx, key, inclusion, now);
    });
    if (isSettled) {
      const { payer, nonce } = key;
      log.warn("forgotten_payment_found", { payer, nonce, transaction: hash });
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
