// One `/settle` request from its parsed form to its outcome, in the interface's order of checks. A payment that has a
// record is answered from it before anything else is judged, so a retry after a lost answer always learns the truth.
// Nothing here depends on the caller still being there.
import { silentMeters } from "../../core/meters.ts";
import { MAX } from "../../kernel/limits.ts";
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
import { countAttempt, type FacilitatorPayment, storedPayment } from "../payments/payments.ts";
import { createCollect, createInFlight, type SettleOptions } from "./claims.ts";
import {
  BEING_SETTLED,
  type CollectionOutcome,
  createRefusalLog,
  declined,
  isSameTerms,
  outcomeForOthers,
  outcomeOfRecord,
  overLimit,
  type SettlementRequest,
  settledBy,
  settlementRequest,
  windowProblem,
} from "./outcome.ts";
import { createRecoveredPayments, createResume } from "./resume.ts";

export type Settle = ReturnType<typeof createSettle>;

export function createSettle(options: SettleOptions) {
  const { store, clock, log, meters = silentMeters, chain, verifier, limits } = options;
  const refusals = createRefusalLog(options);
  const inFlight = createInFlight(options.inFlightMax ?? MAX.settlements);
  const onRecovered = createRecoveredPayments(log, meters);
  const resume = createResume({ ...options, inFlight, onRecovered });
  const collect = createCollect({ ...options, inFlight, onOrphanedClaim: resume.soon });

  /**
   * On another network the same nonce belongs to another payment, unless the payer signed it for this network, whatever
   * the request says.
   */
  async function recordOf({ key, payment, signedBy }: SettlementRequest): Promise<FacilitatorPayment | null> {
    return payment.network === NETWORK || signedBy === "payer" ? storedPayment(store.read, key) : null;
  }

  async function refuse({ named }: SettlementRequest, outcome: CollectionOutcome): Promise<CollectionOutcome> {
    meters.settlement(outcome.kind === "over_limit" ? "over_limit" : "refused");
    await refusals.note(named, outcome.reason);
    return outcome;
  }

  async function fromRecord(request: SettlementRequest): Promise<CollectionOutcome | null> {
    const record = await recordOf(request);
    if (record === null) return null;
    // Payer and nonce are no secret. Without a signature of the payer, nobody learns what became of the payment.
    if (!(await isSigned(request, record))) return refuse(request, declined("wrong_signature"));
    if (!isSameTerms(record, request)) {
      await refuse(request, declined("claimed_on_other_terms"));
      return outcomeForOthers(record);
    }
    // For the operator; a failure to count fails no answer.
    const counting = store.write((tx) => countAttempt(tx, request.key));
    await counting.catch((error) => log.warn("retry_not_counted", { ...request.named, error }));
    return outcomeOfRecord(record, request, isAwaited(record), log);
  }

  /**
   * Whether a payment was collected that has no record; null when it was not. All of it stands on the chain, so anybody could
   * present it; but not with another signature than the payer's.
   */
  async function forgotten({ key, payment, signedBy }: SettlementRequest): Promise<CollectionOutcome | null> {
    const { authorization, signature } = payment;
    const found = await options.findOwnTransfer(authorization);
    if (found === null) return null;
    if (signedBy !== "payer" && !(await chain.isSignedByContract(authorization, signature))) return null;
    if (found === "unknown") return BEING_SETTLED;
    onRecovered(key, found.hash);
    return settledBy(found.hash);
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

  /** Null when others have claimed the payment meanwhile, so that its record tells. */
  async function attempt(request: SettlementRequest): Promise<CollectionOutcome | null> {
    const known = await fromRecord(request);
    if (known !== null) return known;
    const against = await judge(options, request);
    const found = against === null ? await collect(request) : { refused: against };
    if (found === "taken") return null;
    if (!("refused" in found)) return found;
    // Another process may have collected it meanwhile, and that is why it can't be collected again.
    if ((await recordOf(request)) !== null) return null;
    const own = found.refused.kind === "declined" ? await forgotten(request) : null;
    return own ?? refuse(request, found.refused);
  }

  return {
    /** @throws Fault `unavailable` when nodes, database or the checker of signatures can't be asked */
    async settle(account: FacilitatorAccount, presented: SettleRequest): Promise<CollectionOutcome> {
      const signedBy = await verifier.signedBy(account.name, presented.payment);
      const request = settlementRequest(account, presented, limits, signedBy);
      // Between two attempts, others may claim the payment and withdraw the claim.
      for (let attempts = 0; attempts < 3; attempts += 1) {
        const outcome = await attempt(request);
        if (outcome !== null) return outcome;
      }
      return BEING_SETTLED;
    },
    recover: resume.run,
    takeUp: resume.takeUp,
    takeClaimed: resume.takeClaimed,
    /** Ends recovering. Requests at work go on. */
    stop: resume.stop,
  };
}

/** What can be judged without a simulation; null when nothing is against it. */
async function judge(options: SettleOptions, request: SettlementRequest): Promise<CollectionOutcome | null> {
  const { store, chain } = options;
  const { account, payment, requirements } = request;
  const time = await chain.time();
  const late = windowProblem(payment, time);
  if (late !== null) return declined(late);
  const problem = checkRequirements(payment, requirements, { exactValue: false });
  // Network and asset are guardrails, which look at them again.
  if (problem !== null && problem !== "wrong_network" && problem !== "wrong_asset") {
    return declined(problem);
  }
  const of = { account, day: utcDay(time.earliest) };
  const used = await usedOn(store.read, of);
  const broken = checkGuardrails(payment, requirements, { used, limits: request.limits });
  if (broken !== null) return overLimit(broken, request);
  return (await isPayerShutOut(options, of, request.key.payer)) ? overLimit("payer_reverted", request) : null;
}

async function isPayerShutOut({ store, chain }: SettleOptions, of: DayOfAccount, payer: Hex): Promise<boolean> {
  const reverts = await revertsOf(store.read, of, payer);
  if (!isShutOut(reverts, true)) return false;
  const { block: number, hash } = await chain.balanceOf(payer);
  return isShutOut(reverts, await chain.hasCode(payer, { number, hash }));
}
