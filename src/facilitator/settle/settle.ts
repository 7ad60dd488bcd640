// One `/settle` request from its parsed form to its outcome, in the interface's order of checks. A payment that has a
// record is answered from it before anything else is judged, so a retry after a lost answer always learns the truth.
// Nothing here depends on the caller still being there.
import type { Balance, Chain } from "../../chain/chain.ts";
import type { FindOwnTransfer } from "../../chain/find-use.ts";
import type { TimeSpan } from "../../chain/newest-block.ts";
import type { Log } from "../../core/log.ts";
import { type Meters, silentMeters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import { MAX } from "../../kernel/limits.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { createReservedShare, mayTake } from "../../kernel/share.ts";
import { createEndWaiters, endsWithin } from "../../kernel/wait.ts";
import type { Store } from "../../storage/store.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import type { Verifier } from "../../x402/verifier.ts";
import { checkRequirements } from "../../x402/verify.ts";
import {
  checkGuardrails,
  type DayOfAccount,
  type FacilitatorAccount,
  isShutOut,
  type Limits,
  revertsOf,
  usedOn,
  utcDay,
} from "../payments/guardrails.ts";
import { createPaymentSpans, type PaymentSpans } from "../payments/payment-spans.ts";
import {
  type Claimed,
  type ClaimedPayment,
  claimPayment,
  countAttempt,
  type FacilitatorPayment,
  type Gas,
  openAmong,
  openByAccount,
  type PaymentClaim,
  paymentName,
  sentNonces,
  storedPayment,
  withdrawClaim,
} from "../payments/payments.ts";
import { WalletNotHeld } from "../wallet/leases.ts";
import type { Wallet } from "../wallet/wallet.ts";
import {
  BEING_SETTLED,
  type CollectionOutcome,
  createRefusalLog,
  declined,
  isSameTerms,
  type Named,
  notNow,
  outcomeForOthers,
  outcomeOfRecord,
  overLimit,
  overShare,
  putOff,
  requirementsText,
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
  const inFlight = createPaymentsInFlight(options.inFlightMax ?? MAX.settlements);
  const onRecovered = createRecoveredPayments(log, meters);
  const resume = createResume({ ...options, inFlight, onRecovered });
  const collect = createCollect({ ...options, inFlight, onOrphanedClaim: resume.soon });

  /**
   * On another network the same nonce belongs to another payment, unless the payer signed it for this network, whatever
   * the request says.
   */
  async function recordOf({ network, key, payment, signedBy }: SettlementRequest): Promise<FacilitatorPayment | null> {
    return payment.network === network.name || signedBy === "payer" ? storedPayment(store.read, key) : null;
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
      const request = settlementRequest(options.network, account, presented, limits, signedBy);
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
  const problem = checkRequirements(request.network, payment, requirements, { exactValue: false });
  // Network and asset are guardrails, which look at them again.
  if (problem !== null && problem !== "wrong_network" && problem !== "wrong_asset") {
    return declined(problem);
  }
  const of = { account, day: utcDay(time.earliest) };
  const used = await usedOn(store.read, of);
  const broken = checkGuardrails(payment, requirements, { ...request, used });
  if (broken !== null) return overLimit(broken, request);
  return (await isPayerShutOut(options, of, request.key.payer)) ? overLimit("payer_reverted", request) : null;
}

async function isPayerShutOut({ store, chain }: SettleOptions, of: DayOfAccount, payer: Hex): Promise<boolean> {
  const reverts = await revertsOf(store.read, of, payer);
  if (!isShutOut(reverts, true)) return false;
  const { block: number, hash } = await chain.balanceOf(payer);
  return isShutOut(reverts, await chain.hasCode(payer, { number, hash }));
}

// A payment that nothing is against, from the simulation to its block: claimed with its share of the ceiling and of the payer's
// balance in one write, then sent, then waited for. Before a transaction is stored, a failure gives back this one claim.

/**
 * "taken": somebody else claimed it in between, so there is a record to answer from. `refused`: nothing is claimed, and it is
 * refused unless it has a record by now.
 */
type Collected = CollectionOutcome | { readonly refused: CollectionOutcome } | "taken";

const REFUSALS = { ceiling: "over_daily_ceiling", reverts: "payer_reverted", gas: "over_daily_gas" } as const;

/** Of the chain and the wallets only what settling asks of them. */
export interface SettleOptions {
  readonly network: Network;
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly meters?: Pick<Meters, "settlement" | "settlementTook">;
  readonly chain: Pick<Chain, "isSignedByContract" | "balanceOf" | "hasCode" | "isUsed"> &
    Pick<Wallet, "simulate"> & {
      /** The time of day by the chain. @throws Fault `unavailable` */
      time(): Promise<TimeSpan>;
    };
  readonly wallet: Pick<Wallet, "capacity" | "readiness" | "costOf" | "send" | "worksFor" | "canSend" | "isAlone">;
  readonly outcomes: SettlementWaiters;
  readonly verifier: Pick<Verifier, "signedBy">;
  readonly limits: Limits & { readonly inclusionTimeoutMs: number };
  /** Left out where traces are off. */
  readonly spans?: PaymentSpans;
  /** Finds what was collected and is not recorded. */
  readonly findOwnTransfer: FindOwnTransfer;
  /** Settlements at work at once, of all accounts together; tests lower it. */
  readonly inFlightMax?: number;
}

interface CollectOptions extends SettleOptions {
  readonly inFlight: PaymentsInFlight;
  /** A claim may have been left behind. */
  onOrphanedClaim(): void;
}

function createCollect(options: CollectOptions) {
  const { store, log, meters = silentMeters, chain, wallet, outcomes, limits, inFlight } = options;
  const { spans = createPaymentSpans(null) } = options;
  const claimBeside = createClaim(options);
  const isOverShare = createOpenShares(store, wallet.capacity);

  async function claimSendWait(request: SettlementRequest, gas: Gas): Promise<Collected> {
    const startedAt = performance.now();
    const { key, payment } = request;
    const { authorization, signature } = payment;
    const wanted = { key, claim: crypto.randomUUID(), authorization, signature };
    const claimed = await claimFirst(request, wanted, gas);
    if (claimed === "taken") return "taken";
    if (claimed === "held" || claimed === "gas held") {
      // Not a refusal: payments that hold the balance may still fail, and it may have grown since. Likewise with the gas.
      const outcome = putOff(claimed);
      log.info("settlement_deferred", { ...request.named, reason: outcome.reason });
      return outcome;
    }
    if (claimed !== "claimed") return { refused: overLimit(REFUSALS[claimed], request) };
    try {
      return await spans.during(wanted.key, () => sendAndWait(request, wanted, gas));
    } finally {
      meters.settlementTook(performance.now() - startedAt);
    }
  }

  async function sendAndWait(request: SettlementRequest, wanted: ClaimedPayment, gas: Gas): Promise<Collected> {
    // Counted from the claim, as others do who find its record.
    const until = performance.now() + limits.inclusionTimeoutMs;
    const sending = spans.step("sign and store", () => send(request, wanted, gas));
    const isSent = await endsWithin(until - performance.now(), sending).catch(() => null);
    if (isSent === null) return notNow("not sent");
    // The wallet goes on with it after this request.
    if (!isSent) return BEING_SETTLED;
    const record = await spans.step("wait for inclusion", () => outcomes.wait(wanted.key, until - performance.now()));
    if (record === null) return BEING_SETTLED;
    // A later claim may have other terms, and is judged by those.
    return record.claim === wanted.claim ? outcomeOfRecord(record, request, false, log) : "taken";
  }

  /** Once it is claimed, it counts as being sent here, until `send` knows whether it is. */
  async function claimFirst(request: SettlementRequest, wanted: ClaimedPayment, gas: Gas): Promise<Claimed> {
    const { named } = request;
    let claimed: Claimed | null = null;
    inFlight.beginSending(named);
    try {
      claimed = await claimBeside(request, wanted, gas);
      return claimed;
    } finally {
      if (claimed !== "claimed") inFlight.endSending(named);
    }
  }

  /**
   * A claim for the wallet of another facilitator is left to that one.
   *
   * @throws when nothing was signed and stored: the payment can be presented again
   */
  async function send({ named }: SettlementRequest, claimed: ClaimedPayment, gas: Gas): Promise<void> {
    try {
      await wallet.send(claimed, gas);
    } catch (error) {
      if (error instanceof WalletNotHeld) return;
      log.warn("payment_not_sent", { ...named, error });
      // No longer claimed, it was sent or ended after all: its record tells.
      if (await withdraw(options, named, claimed)) throw error;
    } finally {
      inFlight.endSending(named);
    }
  }

  /** @throws Fault `unavailable` as settle does */
  return async (request: SettlementRequest): Promise<Collected> => {
    const { account, named } = request;
    // Equal requests at once need no second simulation.
    if (inFlight.has(named)) return BEING_SETTLED;
    if (!inFlight.begin(named)) return impossible(options, named, overShare("too many settlements at once"));
    try {
      const readiness = await wallet.readiness();
      if (!readiness.ready) return impossible(options, named, notNow(readiness.reason));
      if (await isOverShare(account)) return impossible(options, named, overShare("too many payments under way"));
      const { authorization, signature } = request.payment;
      const simulated = await chain.simulate(authorization, signature);
      if (!simulated.ok) return { refused: declined(simulated.reason) };
      // The simulation may have taken long.
      const late = windowProblem(request.payment, await chain.time());
      if (late !== null) return { refused: declined(late) };
      return await claimSendWait(request, simulated.gas);
    } finally {
      inFlight.end(named);
    }
  };
}

/** False when the claim is gone. */
async function withdraw({ store, log, onOrphanedClaim }: CollectOptions, named: Named, claimed: ClaimedPayment) {
  try {
    return await store.write((tx) => withdrawClaim(tx, claimed));
  } catch (error) {
    log.warn("claim_not_withdrawn", { ...named, error });
    onOrphanedClaim();
    return true;
  }
}

/** Nothing is against the payment itself. */
function impossible({ log, meters = silentMeters }: CollectOptions, named: Named, outcome: CollectionOutcome) {
  log.warn("settlement_impossible", { ...named, reason: outcome.reason });
  if (outcome.kind === "over_limit") meters.settlement("over_limit");
  return outcome;
}

function createClaim(options: CollectOptions) {
  const { store, clock, chain, onOrphanedClaim } = options;

  async function claim(wanted: PaymentClaim): Promise<Claimed> {
    try {
      return await store.write((tx) => claimPayment(tx, wanted, clock.now()));
    } catch (error) {
      // A connection lost during the commit leaves open whether the claim is stored.
      onOrphanedClaim();
      throw error;
    }
  }

  /**
   * A sent payment may already be in the newest blocks before the watcher has noticed. It would then be held against a
   * balance that it has left. So the chain is asked which sent payments have landed by the block of the balance. An
   * older balance would not do: it does not show what the payer has moved away since.
   */
  return async (request: SettlementRequest, wanted: ClaimedPayment, gas: Gas): Promise<Claimed> => {
    const { payer } = wanted.key;
    // The simulation has just moved that much, so a node that knows of less may be wrong.
    const balance = await chain.balanceOf(payer, wanted.authorization.value);
    const day = utcDay((await chain.time()).earliest);
    const { account, limits } = request;
    const requirements = requirementsText(request.requirements);
    const risk = await gasAtRiskOf(options, request, gas, balance);
    const measured = { ...wanted, ...risk, account, requirements, limits, day, gas, balance };
    const claimed = await claim(measured);
    if (claimed !== "held") return claimed;
    const landed = await landedBy(options, payer, balance);
    if (landed.size === 0) return claimed;
    // Read again after that: a node may report a use a moment before it reports the block of it.
    const after = await chain.balanceOf(payer);
    return after.block < balance.block ? claimed : claim({ ...measured, balance: { ...after, landed } });
  };
}

/**
 * The code of a payer can make each of its transfers revert for nothing, so each holds its gas. A payer without code needs
 * one transaction for all that it has under way, and the claim bounds their number.
 */
async function gasAtRiskOf(
  { chain, wallet }: Pick<CollectOptions, "chain" | "wallet">,
  { key, limits, payment }: SettlementRequest,
  gas: Gas,
  { block: number, hash }: Balance,
): Promise<Pick<PaymentClaim, "gasAtRisk" | "gasHeld" | "hasCode">> {
  const hasCode = await chain.hasCode(key.payer, { number, hash });
  const isAtRisk = hasCode && limits.dailyGasWei > 0n;
  const isHeld = limits.dailyGasAllWei > 0n;
  const cost = isAtRisk || isHeld ? await wallet.costOf(gas, payment.signature) : 0n;
  return { gasAtRisk: isAtRisk ? cost : 0n, gasHeld: isHeld ? cost : 0n, hasCode };
}

/** The nonces of sent payments of the payer that have landed. What no node tells counts as held. */
async function landedBy(
  { store, chain }: Pick<CollectOptions, "store" | "chain">,
  from: Hex,
  { block: number, hash }: Balance,
): Promise<ReadonlySet<Hex>> {
  const landed = new Set<Hex>();
  await mapLimit(await sentNonces(store.read, from), 8, async (nonce) => {
    if (await chain.isUsed({ from, nonce }, { number, hash }).catch(() => false)) landed.add(nonce);
  });
  return landed;
}

/**
 * While no blocks come, payments stay under way for longer than anybody waits for them. They are counted a few times in a
 * second at most, and those that are let in since are added.
 */
function createOpenShares({ read }: SettleOptions["store"], capacity: number) {
  let counted = { open: new Map<string, number>(), taken: 0 };
  let counting: Promise<void> = Promise.resolve();
  let at = Number.NEGATIVE_INFINITY;

  async function recount(): Promise<void> {
    const open = new Map(await openByAccount(read));
    counted = { open, taken: [...open.values()].reduce((sum, count) => sum + count, 0) };
  }

  return async (account: string): Promise<boolean> => {
    if (performance.now() - at > 250) {
      at = performance.now();
      counting = recount();
    }
    await counting;
    const { open } = counted;
    const own = open.get(account) ?? 0;
    if (!mayTake(own, counted.taken, open.size + (own === 0 ? 1 : 0), capacity)) return true;
    open.set(account, own + 1);
    counted.taken += 1;
    return false;
  };
}

/**
 * The payments that this process has in flight, with a share of them for each account. Resuming leaves them alone.
 *
 * @param max payments of all accounts together
 */
export function createPaymentsInFlight(max: number) {
  const shares = createReservedShare(max);
  /** Requests between the simulation and their answer. */
  const collecting = new Set<string>();
  /** From before the claim until the wallet has stored or refused it: a database that is away may hold that up. */
  const sending = new Set<string>();

  function isBusy(name: string): boolean {
    return collecting.has(name) || sending.has(name);
  }

  function leave(set: Set<string>, named: Named): void {
    const name = nameOf(named);
    if (set.delete(name) && !isBusy(name)) shares.giveBack(named.account);
  }

  return {
    /** Whether this process has it between the simulation and its transaction, or waits for its block. */
    has: (named: Named): boolean => isBusy(nameOf(named)),
    /** Tells which payments are being sent, or were when this was asked for: what was read since may be older. */
    sendingSince(): (named: Named) => boolean {
      const before = new Set(sending);
      return (named) => before.has(nameOf(named)) || sending.has(nameOf(named));
    },
    /** False when the account has too many in flight: then it is not begun. */
    begin(named: Named): boolean {
      if (!shares.take(named.account)) return false;
      collecting.add(nameOf(named));
      return true;
    },
    end: (named: Named): void => leave(collecting, named),
    beginSending: (named: Named): void => void sending.add(nameOf(named)),
    endSending: (named: Named): void => leave(sending, named),
  };
}

export type PaymentsInFlight = ReturnType<typeof createPaymentsInFlight>;

/** Per account: one must not hold up another's payment by presenting it with a wrong signature. */
function nameOf({ account, payer, nonce }: Named): string {
  return `${payer}:${nonce}:${account}`;
}

export type SettlementWaiters = ReturnType<typeof createSettlementWaiters>;

/** Requests that wait for a payment to end: told at once where it ends here, else found by one query for all of them. */
export function createSettlementWaiters(store: Store) {
  const waiters = createEndWaiters<PaymentKey>({
    nameOf: paymentName,
    // Other processes work for wallets only on a shared database; elsewhere a look is for lost answers.
    lookAgainMs: store.isShared ? 250 : 1_000,
    async endedAmong(keys) {
      const open = await openAmong(store.read, keys);
      return keys.map(paymentName).filter((name) => !open.has(name));
    },
  });

  return {
    announce: (key: PaymentKey): void => waiters.announce(paymentName(key)),
    /** Ends all waits, now and from now on, since the process is about to end: each gets the payment as it is. */
    release: waiters.release,
    /**
     * The payment once it is settled or failed, or as it is after `ms` or at the release; null when there is none.
     *
     * @throws Fault `unavailable` when the last look finds no database
     */
    wait: (key: PaymentKey, ms: number): Promise<FacilitatorPayment | null> =>
      waiters.wait({ key, ms, look: (isLast) => look(key, isLast), isEnded }),
  };

  /** Undefined when the database is away and there is time left to look again. */
  function look(key: PaymentKey, isLast: () => boolean): Promise<FacilitatorPayment | null | undefined> {
    return storedPayment(store.read, key).catch((error: unknown) => {
      if (isLast()) throw error;
      return undefined;
    });
  }
}

function isEnded(row: FacilitatorPayment | null): boolean {
  return row === null || row.status === "settled" || row.status === "failed";
}
