// One `/settle` request from its parsed form to its answer, in the interface's order of checks. A payment that has a
// record is answered from it before anything else is judged, so a retry after a lost answer always learns the truth.
// Nothing here depends on the caller still being there.
import { silentMeters } from "../../core/meters.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import { NETWORK } from "../../x402/kind.ts";
import type { Hex } from "../../x402/types.ts";
import { checkRequirements } from "../../x402/verify.ts";
import {
  checkGuardrails,
  type DayOfAccount,
  type FacilitatorAccount,
  isShutOut,
  revertsOf,
  usedOn,
  utcDay,
} from "../payments/guardrails.ts";
import { countAttempt, type FacilitatorPayment, findPayment } from "../payments/payments.ts";
import { createCollect, createInFlight } from "./claims.ts";
import type { SettleOptions } from "./ports.ts";
import { isSameTerms, type SettlementRequest, settlementRequest, windowProblem } from "./request.ts";
import {
  beingSettled,
  createRefusalLog,
  createSettlementResponses,
  type SettlementRefusal,
  type SettleResponse,
} from "./response.ts";
import { createRecoveredPayments, createResume } from "./resume.ts";

/** Attempts for one request: between two looks, others may claim the payment and withdraw the claim. */
const TURNS_MAX = 3;
/** Settlements at work at once. Memory stays bounded while node and wallet are slow. */
const IN_FLIGHT_MAX = 2_000;

export type Settle = ReturnType<typeof createSettle>;

export function createSettle(options: SettleOptions) {
  const { store, clock, log, meters = silentMeters, chain, verifier, limits } = options;
  const responses = createSettlementResponses(log, createRefusalLog({ store, clock, log }), meters);
  const inFlight = createInFlight(options.inFlightMax ?? IN_FLIGHT_MAX);
  const onRecovered = createRecoveredPayments(log, meters);
  const resume = createResume({ ...options, inFlight, onRecovered });
  const collect = createCollect({ ...options, responses, inFlight, onOrphanedClaim: resume.soon });

  /**
   * On another network the same nonce belongs to another payment, unless the payer signed it for this network, whatever
   * the request says.
   */
  async function recordOf({ key, payment, signedBy }: SettlementRequest): Promise<FacilitatorPayment | null> {
    return payment.network === NETWORK || signedBy === "payer" ? findPayment(store.read, key) : null;
  }

  async function answerFromRecord(request: SettlementRequest): Promise<SettleResponse | null> {
    const record = await recordOf(request);
    if (record === null) return null;
    // Payer and nonce are no secret. Without a signature of the payer, nobody learns what became of the payment.
    if (!(await isSigned(request, record))) return responses.refuse(request, { failed: "wrong_signature" });
    if (!isSameTerms(record, request)) return responses.onOtherTerms(request, record);
    await countRetry(request);
    return responses.fromRecord(request, record, isAwaited(record));
  }

  /**
   * By which transaction a payment was collected that has no record; null when it was not. All of it stands on the chain,
   * so anybody could present it; but not with another signature than the payer's.
   *
   * @throws Fault `unavailable` when nobody can tell
   */
  async function forgotten({ key, payment, signedBy }: SettlementRequest): Promise<Hex | null> {
    const { authorization, signature } = payment;
    const found = await options.findOwnTransfer(authorization);
    if (found === null) return null;
    if (signedBy !== "payer" && !(await chain.isSignedByContract(authorization, signature))) return null;
    if (found === "unknown") throw beingSettled();
    onRecovered(key, found.hash);
    return found.hash;
  }

  async function refuseUnlessForgotten(
    request: SettlementRequest,
    refusal: SettlementRefusal,
  ): Promise<SettleResponse> {
    const transaction = "failed" in refusal ? await forgotten(request) : null;
    return transaction === null ? responses.refuse(request, refusal) : responses.collected(request, transaction);
  }

  /** A contract wallet may accept other signatures than the record's, and only the wallet itself can say so. */
  async function isSigned({ signedBy, payment }: SettlementRequest, record: FacilitatorPayment): Promise<boolean> {
    if (signedBy === "payer" || payment.signature === record.signature) return true;
    return chain.isSignedByContract(payment.authorization, payment.signature);
  }

  /**
   * Whether a request waits for the block. This process knows its own. For those of other processes the record's time
   * tells, by a clock that may have been set forward or back since.
   */
  function isAwaited(record: FacilitatorPayment): boolean {
    return inFlight.has(record) || Math.abs(clock.now() - record.created_at) < limits.inclusionTimeoutMs;
  }

  /** For the operator; a failure to count fails no answer. */
  async function countRetry({ key, named }: SettlementRequest): Promise<void> {
    try {
      await store.write((tx) => countAttempt(tx, key));
    } catch (error) {
      log.warn("retry_not_counted", { ...named, error });
    }
  }

  /** What can be judged without a simulation; null when nothing is against it. */
  async function judge(request: SettlementRequest): Promise<SettlementRefusal | null> {
    const { account, payment, requirements } = request;
    const time = await chain.time();
    const late = windowProblem(request, time);
    if (late !== null) return { failed: late };
    const problem = checkRequirements(payment, requirements, { exactValue: false });
    // Network and asset are guardrails, which look at them again.
    if (problem !== null && problem !== "wrong_network" && problem !== "wrong_asset") {
      return { failed: problem };
    }
    const of = { account, day: utcDay(time.earliest) };
    const used = await usedOn(store.read, of);
    const broken = checkGuardrails(payment, requirements, { used, limits: request.limits });
    if (broken !== null) return { overLimit: broken };
    return (await isPayerShutOut(options, of, request.key.payer)) ? { overLimit: "payer_reverted" } : null;
  }

  return {
    /**
     * @throws Fault `over_limit` for a guardrail, `unavailable` where a retry may find another answer
     */
    async settle(account: FacilitatorAccount, presented: SettleRequest): Promise<SettleResponse> {
      const signedBy = await verifier.signedBy(account.name, presented.payment);
      const request = settlementRequest(account, presented, limits, signedBy);
      for (let turn = 0; turn < TURNS_MAX; turn += 1) {
        const known = await answerFromRecord(request);
        if (known !== null) return known;
        const found = (await judge(request)) ?? (await collect(request));
        if (found === "taken") continue;
        if ("success" in found) return found;
        // Another process may have collected it meanwhile, and that is why it can't be collected again.
        if ((await recordOf(request)) === null) return refuseUnlessForgotten(request, found);
      }
      throw beingSettled();
    },
    /** Goes on with claims that a crash left without a transaction, until there are none. Never rejects. */
    recover: resume.run,
    /** Resumes claims now and then: another process may have ended, or lost its database, and left some. Never rejects. */
    takeUp: resume.takeUp,
    /** Sends what others have claimed for wallets of this process; true when there was any. Never rejects. */
    takeClaimed: resume.takeClaimed,
    /** Ends recovering. Requests at work go on. */
    stop: resume.stop,
  };
}

async function isPayerShutOut({ store, chain }: SettleOptions, of: DayOfAccount, payer: Hex): Promise<boolean> {
  const reverts = await revertsOf(store.read, of, payer);
  if (!isShutOut(reverts, true)) return false;
  const { block: number, hash } = await chain.balanceOf(payer);
  return isShutOut(reverts, await chain.hasCode(payer, { number, hash }));
}
