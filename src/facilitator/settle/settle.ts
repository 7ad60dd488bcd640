// One `/settle` request from its parsed form to its answer, in the order of checks that the interface gives. What
// is known of a payment is answered before anything else is judged, so that a retry after a lost answer always
// learns the truth; and nothing here depends on the caller still being there.
import type { SettleRequest } from "../../x402/codec.ts";
import { NETWORK } from "../../x402/kind.ts";
import { checkRequirements } from "../../x402/verify.ts";
import { usedOn, utcDay } from "../daily-limits.ts";
import { checkGuardrails } from "../guardrails.ts";
import { countAttempt, type FacilitatorPayment, findPayment } from "../payments.ts";
import { createCollect } from "./collect.ts";
import type { SettleOptions } from "./ports.ts";
import { createRefusalLog } from "./refusals.ts";
import {
  isSameTerms,
  type SettleAccount,
  type SettlementRequest,
  settlementRequest,
  windowProblem,
} from "./request.ts";
import {
  createSettlementResponses,
  inFlight,
  type SettlementRefusal,
  type SettleResponse,
} from "./response.ts";
import { createResume } from "./resume.ts";

/** A record that comes and goes between two looks is one that others take and give back. */
const TURNS_MAX = 3;

export interface Settle {
  /**
   * @throws Fault `over_limit` for a guardrail, `unavailable` where a retry may find another answer
   */
  settle(account: SettleAccount, request: SettleRequest): Promise<SettleResponse>;
  /** Goes on with claims that a crash left without a transaction, until there are none. Never rejects. */
  recover(): Promise<void>;
  /** The same, now and then: another process may have ended, or lost its database, and left some. Never rejects. */
  takeUp(): Promise<void>;
  /** Ends recovering. Requests at work go on. */
  stop(): void;
}

export function createSettle(options: SettleOptions): Settle {
  const { store, clock, log, chain, limits } = options;
  const answers = createSettlementResponses(log, createRefusalLog({ store, clock, log }));
  const { collect, isAtWork } = createCollect({ ...options, answers, forsaken: () => resume.soon() });
  const resume = createResume({ ...options, isAtWork });

  /**
   * On another network the same nonce is another payment's; unless the payer has signed it for this one, whatever the
   * request calls it.
   */
  async function recordOf({ key, payment, signedBy }: SettlementRequest): Promise<FacilitatorPayment | null> {
    return payment.network === NETWORK || signedBy === "payer" ? findPayment(store.read, key) : null;
  }

  async function answerFromRecord(asked: SettlementRequest): Promise<SettleResponse | null> {
    const record = await recordOf(asked);
    if (record === null) return null;
    // Payer and nonce are no secret. Whoever has no signature of the payer learns nothing of what became of them.
    if (!(await isSigned(asked, record))) return answers.refuse(asked, { failed: "wrong_signature" });
    if (!isSameTerms(record, asked)) return answers.onOtherTerms(asked, record);
    await countRetry(asked);
    return answers.fromRecord(asked, record, isAwaited(record));
  }

  /** One that a contract wallet takes is as good as the record's: only the wallet itself can say that of another. */
  async function isSigned(
    { signedBy, payment }: SettlementRequest,
    record: FacilitatorPayment,
  ): Promise<boolean> {
    if (signedBy === "payer" || payment.signature === record.signature) return true;
    return chain.isSignedByContract(payment.authorization, payment.signature);
  }

  /**
   * Whether a request waits for the block: one of this process, which is known, or maybe one of another process. Then
   * the record's time says so, by a clock that may have been set since, forward or back.
   */
  function isAwaited(record: FacilitatorPayment): boolean {
    return isAtWork(record) || Math.abs(clock.now() - record.created_at) < limits.inclusionTimeoutMs;
  }

  /** For the operator: not worth failing an answer for. */
  async function countRetry({ key, named }: SettlementRequest): Promise<void> {
    try {
      await store.write((tx) => countAttempt(tx, key));
    } catch (error) {
      log.warn("retry_not_counted", { ...named, error });
    }
  }

  /** What can be said without a simulation; null when nothing is against it. */
  async function judge(asked: SettlementRequest): Promise<SettlementRefusal | null> {
    const { account, payment, requirements } = asked;
    const late = windowProblem(asked, await chain.time());
    if (late !== null) return { failed: late };
    const problem = checkRequirements(payment, requirements, { exactValue: false });
    // Network and asset are guardrails, which look at them again.
    if (problem !== null && problem !== "wrong_network" && problem !== "wrong_asset") {
      return { failed: problem };
    }
    const used = await usedOn(store.read, { account, day: utcDay(clock.now()) });
    const broken = checkGuardrails(payment, requirements, { used, limits: asked.limits });
    return broken === null ? null : { overLimit: broken };
  }

  return {
    async settle(account, request) {
      const wanted = settlementRequest(account, request, limits);
      for (let turn = 0; turn < TURNS_MAX; turn += 1) {
        const known = await answerFromRecord(wanted);
        if (known !== null) return known;
        const found = (await judge(wanted)) ?? (await collect(wanted));
        if (found === "taken") continue;
        if ("success" in found) return found;
        // Another process may have collected it meanwhile, which is just what makes it unfit for another time.
        if ((await recordOf(wanted)) === null) return answers.refuse(wanted, found);
      }
      throw inFlight();
    },
    recover: resume.run,
    takeUp: resume.takeUp,
    stop: resume.stop,
  };
}
