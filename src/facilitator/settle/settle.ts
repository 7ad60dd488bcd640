// Settles one `/settle` request, from its parsed form to its outcome, in the order of checks that the interface names. A
// payment that has a record is answered from the record before any other check, so a retry after a lost response always
// learns the truth. Nothing here depends on the caller still being connected.
import type { Balance, Chain } from "../../chain/chain.ts";
import type { FindOwnTransfer } from "../../chain/find-use.ts";
import type { TimeSpan } from "../../chain/newest-block.ts";
import type { Meters } from "../../core/meters.ts";
import { MAX } from "../../kernel/limits.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { createReservedShare, mayTake } from "../../kernel/share.ts";
import { createEndWaiters, endsWithin, outlastRequest } from "../../kernel/wait.ts";
import type { Store, StoreTools } from "../../storage/store.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { checkRequirements, type Verifier } from "../../x402/verify.ts";
import type { DayOfAccount, FacilitatorAccount, Limits } from "../payments/guardrails.ts";
import { checkGuardrails, isShutOut, revertsOf, usedOn, utcDay } from "../payments/guardrails.ts";
import type { PaymentSpans } from "../payments/payment-spans.ts";
import type { Claimed, ClaimedPayment, FacilitatorPayment, Gas, PaymentClaim } from "../payments/payments.ts";
import * as payments from "../payments/payments.ts";
import { WalletNotHeld } from "../wallet/leases.ts";
import type { Wallet } from "../wallet/wallet.ts";
import type { CollectionOutcome, Named, SettlementRequest } from "./outcome.ts";
import {
  BEING_SETTLED,
  createRefusalLog,
  declined,
  isSameTerms,
  notNow,
  outcomeForOthers,
  outcomeOfRecord,
  overLimit,
  overShare,
  putOff,
  requirementsText,
  settledBy,
  settlementRequest,
  windowProblem,
} from "./outcome.ts";
import { createRecoveredPayments, createResume } from "./resume.ts";

export type Settle = ReturnType<typeof createSettle>;

export function createSettle(options: SettleOptions) {
  const { store, clock, log, meters, chain, verifier, limits } = options;
  const noteRefusal = createRefusalLog(options);
  const inFlight = createPaymentsInFlight(options.inFlightMax ?? MAX.settlements);
  const onRecovered = createRecoveredPayments(log, meters);
  const resume = createResume({ ...options, inFlight, onRecovered });
  const collect = createCollect({ ...options, inFlight, onOrphanedClaim: resume.soon });

  /**
   * The payment's record, if any. On another network the nonce belongs to another payment, unless the payer's signature is
   * for this network, whatever network the request names.
   */
  async function recordOf({ network, key, payment, signedBy }: SettlementRequest): Promise<FacilitatorPayment | null> {
    return payment.network === network.name || signedBy === "payer" ? payments.storedPayment(store.read, key) : null;
  }

  async function refuse({ named }: SettlementRequest, outcome: CollectionOutcome): Promise<CollectionOutcome> {
    meters.settlement(outcome.kind === "over_limit" ? "over_limit" : "refused");
    await noteRefusal(named, outcome.reason);
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
    // The count is for the operator, so a failure to store it fails no response.
    const counting = store.write((tx) => payments.countAttempt(tx, request.key));
    await counting.catch((error) => log.warn("retry_not_counted", { ...request.named, error }));
    return outcomeOfRecord(record, request, isAwaited(record), log);
  }

  /**
   * The outcome of a payment that was collected but has no record; null when it was not collected. Everything about it is
   * public on the chain, so anybody could present it; only the payer's signature is accepted.
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

  /** A contract wallet may accept signatures other than the record's, and only the wallet itself can confirm them. */
  async function isSigned({ signedBy, payment }: SettlementRequest, record: FacilitatorPayment): Promise<boolean> {
    if (signedBy === "payer" || payment.signature === record.signature) return true;
    return chain.isSignedByContract(payment.authorization, payment.signature);
  }

  /**
   * Whether a request waits for the payment's block. This process knows its own requests. For requests at other processes
   * the record's age decides, by a clock that may have been set forward or back since.
   */
  const isAwaited = (record: FacilitatorPayment): boolean =>
    inFlight.has(record) || Math.abs(clock.now() - record.created_at) < limits.inclusionTimeoutMs;

  /** Null when the payment has got a record meanwhile: the next attempt answers from it. */
  async function attempt(request: SettlementRequest): Promise<CollectionOutcome | null> {
    const known = await fromRecord(request);
    if (known !== null) return known;
    const refusal = await judge(options, request);
    const found = refusal === null ? await collect(request) : { refused: refusal };
    if (found === "taken") return null;
    if (!("refused" in found)) return found;
    // Another process may have collected the payment meanwhile, which would explain why it can't be collected again.
    if ((await recordOf(request)) !== null) return null;
    const own = found.refused.kind === "declined" ? await forgotten(request) : null;
    return own ?? refuse(request, found.refused);
  }

  return {
    /** @throws Fault `unavailable` when nodes, database or signature verifier can't be reached */
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
    /** Ends recovery. Requests in progress go on. */
    stop: resume.stop,
  };
}

/** The refusal that follows from the checks before the simulation; null when all of them pass. */
async function judge(options: SettleOptions, request: SettlementRequest): Promise<CollectionOutcome | null> {
  const { store, chain } = options;
  const { account, payment, requirements } = request;
  const time = await chain.time();
  const late = windowProblem(payment, time);
  if (late !== null) return declined(late);
  const problem = checkRequirements(request.network, payment, requirements, { exactValue: false });
  // Network and asset are checked again by the guardrails, which give their own reason.
  if (problem !== null && problem !== "wrong_network" && problem !== "wrong_asset") return declined(problem);
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

// Collecting a payment that passed the checks. It is simulated, then claimed in one write with its share of the account's
// ceiling and of the payer's balance, then sent, then awaited. A failure before a transaction is stored withdraws the claim.

/**
 * "taken": another attempt has claimed the payment meanwhile, so there is a record to answer from. `refused`: nothing is
 * claimed, and the payment is refused unless it has got a record meanwhile.
 */
type Collected = CollectionOutcome | { readonly refused: CollectionOutcome } | "taken";

const REFUSALS = { ceiling: "over_daily_ceiling", reverts: "payer_reverted", gas: "over_daily_gas" } as const;

export interface SettleOptions extends StoreTools {
  readonly network: Network;
  readonly meters: Pick<Meters, "settlement" | "settlementTook">;
  readonly chain: Pick<Chain, "isSignedByContract" | "balanceOf" | "hasCode" | "isUsed"> &
    Pick<Wallet, "simulate"> & {
      /** The time of day by the chain. @throws Fault `unavailable` */
      time(): Promise<TimeSpan>;
    };
  readonly wallet: Pick<Wallet, "capacity" | "readiness" | "costOf" | "send" | "worksFor" | "canSend" | "isAlone">;
  readonly outcomes: SettlementWaiters;
  readonly verifier: Pick<Verifier, "signedBy">;
  readonly limits: Limits & { readonly inclusionTimeoutMs: number };
  readonly spans: PaymentSpans;
  /** Finds a transfer of ours that collected a payment without a record. */
  readonly findOwnTransfer: FindOwnTransfer;
  /** The most settlements in flight, of all accounts together; tests lower it. */
  readonly inFlightMax?: number;
}

interface CollectOptions extends SettleOptions {
  readonly inFlight: PaymentsInFlight;
  /** A claim may have been left behind. */
  onOrphanedClaim(): void;
}

function createCollect(options: CollectOptions) {
  const { store, log, meters, chain, wallet, outcomes, limits, inFlight, spans } = options;
  const claimWithBalance = createClaim(options);
  const isOverShare = createOpenShares(store, wallet.capacity);

  async function claimSendWait(request: SettlementRequest, gas: Gas): Promise<Collected> {
    const startedAt = performance.now();
    const { key, payment } = request;
    const { authorization, signature } = payment;
    const wanted = { key, claim: crypto.randomUUID(), authorization, signature };
    const claimed = await claimFirst(request, wanted, gas);
    if (claimed === "taken") return "taken";
    if (claimed === "held" || claimed === "gas held") {
      // Deferred, not refused: payments that hold the balance or the gas may still fail, and the balance may have grown.
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
    // The timeout counts from the claim, as it does for other requests that find the record.
    const until = performance.now() + limits.inclusionTimeoutMs;
    const sending = spans.step("sign and store", () => outlastRequest(() => send(request, wanted, gas)));
    const isSent = await endsWithin(until - performance.now(), sending).catch(() => null);
    if (isSent === null) return notNow("not sent");
    // The wallet goes on sending the payment after this request has ended.
    if (!isSent) return BEING_SETTLED;
    const record = await spans.step("wait for inclusion", () => outcomes.wait(wanted.key, until - performance.now()));
    if (record === null) return BEING_SETTLED;
    // A later claim may have other terms, so the request is compared with that record from the start.
    return record.claim === wanted.claim ? outcomeOfRecord(record, request, false, log) : "taken";
  }

  /** Claims the payment. A claimed payment counts as being sent by this process until `send` knows the result. */
  async function claimFirst(request: SettlementRequest, wanted: ClaimedPayment, gas: Gas): Promise<Claimed> {
    const { named } = request;
    let claimed: Claimed | null = null;
    inFlight.beginSending(named);
    try {
      claimed = await claimWithBalance(request, wanted, gas);
      return claimed;
    } finally {
      if (claimed !== "claimed") inFlight.endSending(named);
    }
  }

  /**
   * Sends the claimed payment. A claim on a wallet that another facilitator holds is left to that facilitator.
   * @throws when no transaction was signed and stored: the payment can be presented again
   */
  async function send({ named }: SettlementRequest, claimed: ClaimedPayment, gas: Gas): Promise<void> {
    try {
      await wallet.send(claimed, gas);
    } catch (error) {
      if (error instanceof WalletNotHeld) return;
      log.warn("payment_not_sent", { ...named, error });
      // If the claim can't be withdrawn, the payment was sent or has ended after all, and its record tells the outcome.
      if (await withdraw(options, named, claimed)) throw error;
    } finally {
      inFlight.endSending(named);
    }
  }

  /** @throws Fault `unavailable` as settle does */
  return async (request: SettlementRequest): Promise<Collected> => {
    const { account, named } = request;
    // A concurrent request for this payment needs no second simulation.
    if (inFlight.has(named)) return BEING_SETTLED;
    if (!inFlight.begin(named)) return notPossibleNow(options, named, overShare("too many settlements at once"));
    try {
      const readiness = await wallet.readiness();
      if (!readiness.ready) return notPossibleNow(options, named, notNow(readiness.reason));
      if (await isOverShare(account)) return notPossibleNow(options, named, overShare("too many payments under way"));
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
    return await store.write((tx) => payments.withdrawClaim(tx, claimed));
  } catch (error) {
    log.warn("claim_not_withdrawn", { ...named, error });
    onOrphanedClaim();
    return true;
  }
}

/** Logs that the payment can't be settled now although the payment itself is fine. */
function notPossibleNow({ log, meters }: CollectOptions, named: Named, outcome: CollectionOutcome) {
  log.warn("settlement_impossible", { ...named, reason: outcome.reason });
  if (outcome.kind === "over_limit") meters.settlement("over_limit");
  return outcome;
}

function createClaim(options: CollectOptions) {
  const { store, clock, chain, onOrphanedClaim } = options;

  async function claim(wanted: PaymentClaim): Promise<Claimed> {
    try {
      return await store.write((tx) => payments.claimPayment(tx, wanted, clock.now()));
    } catch (error) {
      // A connection lost during the commit leaves open whether the claim is stored.
      onOrphanedClaim();
      throw error;
    }
  }

  /**
   * A sent payment may already be in the newest block before the watcher has noticed. Its amount would then be held
   * against a balance that it has left already. So the chain is asked which sent payments have landed by the block of the
   * balance. An older balance would not do: it does not show what the payer has moved away since.
   */
  return async (request: SettlementRequest, wanted: ClaimedPayment, gas: Gas): Promise<Claimed> => {
    const { payer } = wanted.key;
    // The simulation has just moved this amount, so a node that reports a smaller balance may be behind.
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
    // The balance is read again, since a node may report an authorization as used before it reports the block of the use.
    const after = await chain.balanceOf(payer);
    return after.block < balance.block ? claimed : claim({ ...measured, balance: { ...after, landed } });
  };
}

/**
 * A payer with code can make each of its transfers revert at no cost, so each payment of such a payer holds its gas. A payer
 * without code needs a transaction of its own to make its open payments revert, and the claim bounds their number.
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

/** The nonces of the payer's sent payments that have landed. A payment that no node answers for counts as held. */
async function landedBy({ store, chain }: CollectOptions, from: Hex, { block: number, hash }: Balance) {
  const landed = new Set<Hex>();
  await mapLimit(await payments.sentNonces(store.read, from), 8, async (nonce) => {
    if (await chain.isUsed({ from, nonce }, { number, hash }).catch(() => false)) landed.add(nonce);
  });
  return landed;
}

/**
 * Bounds the open payments of each account: while no blocks come, payments stay open for longer than any request waits. They
 * are counted four times a second at most, and payments admitted between two counts are added.
 */
function createOpenShares({ read }: SettleOptions["store"], capacity: number) {
  let counted = { open: new Map<string, number>(), taken: 0 };
  let counting: Promise<void> = Promise.resolve();
  let at = Number.NEGATIVE_INFINITY;

  return async (account: string): Promise<boolean> => {
    if (performance.now() - at > 250) {
      at = performance.now();
      counting = payments.openByAccount(read).then((open) => {
        counted = { open, taken: [...open.values()].reduce((sum, count) => sum + count, 0) };
      });
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

/** The payments in flight here, which resuming leaves alone. Each account has a reserved share. @param max of all accounts */
export function createPaymentsInFlight(max: number) {
  const shares = createReservedShare(max);
  /** Payments of requests between the simulation and the response. */
  const collecting = new Set<string>();
  /** Payments from before the claim until the wallet has stored or refused them; a database outage may prolong that. */
  const sending = new Set<string>();

  const isBusy = (name: string): boolean => collecting.has(name) || sending.has(name);

  function leave(set: Set<string>, named: Named): void {
    const name = nameOf(named);
    if (set.delete(name) && !isBusy(name)) shares.giveBack(named.account);
  }

  return {
    /** Whether this process is collecting or sending the payment, or waits for its block. */
    has: (named: Named): boolean => isBusy(nameOf(named)),
    /** Tells which payments are being sent, or were at the time of this call: rows read after it may be older. */
    sendingSince(): (named: Named) => boolean {
      const before = new Set(sending);
      return (named) => before.has(nameOf(named)) || sending.has(nameOf(named));
    },
    /** False, with nothing begun, when the account has too many payments in flight. */
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

/** The account is part of the name, so that no account holds up another's payment by presenting it with a wrong signature. */
const nameOf = ({ account, payer, nonce }: Named): string => `${payer}:${nonce}:${account}`;

export type SettlementWaiters = ReturnType<typeof createSettlementWaiters>;

/** Requests that wait for a payment to end. An end in this process is announced; other ends are found by one shared query. */
export function createSettlementWaiters(store: Store) {
  const waiters = createEndWaiters<PaymentKey>({
    nameOf: payments.paymentName,
    // Other processes end payments only on a shared database; otherwise polling only covers lost responses of the database.
    lookAgainMs: store.isShared ? 250 : 1_000,
    async endedAmong(keys) {
      const open = await payments.openAmong(store.read, keys);
      return keys.map(payments.paymentName).filter((name) => !open.has(name));
    },
  });

  return {
    announce: (key: PaymentKey): void => waiters.announce(payments.paymentName(key)),
    /** Ends all present and future waits at shutdown: each gets the payment as it is. */
    release: waiters.release,
    /**
     * The payment once it is settled or failed, or as it is after `ms` or at the release; null when there is none.
     * @throws Fault `unavailable` when the database is unavailable at the last read
     */
    wait: (key: PaymentKey, ms: number): Promise<FacilitatorPayment | null> =>
      waiters.wait({ key, ms, look: (isLast) => look(key, isLast), isEnded }),
  };

  /** Reads the payment. Undefined when the database is unavailable and there is time left to read again. */
  function look(key: PaymentKey, isLast: () => boolean): Promise<FacilitatorPayment | null | undefined> {
    return outlastRequest(() => payments.storedPayment(store.read, key)).catch((error: unknown) => {
      if (isLast()) throw error;
      return undefined;
    });
  }
}

const isEnded = (row: FacilitatorPayment | null): boolean =>
  row === null || row.status === "settled" || row.status === "failed";
