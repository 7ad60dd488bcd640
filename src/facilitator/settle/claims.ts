// A payment that nothing is against, from the simulation to its block: claimed with its share of the ceiling and of
// the payer's balance in one write, then sent, then waited for. If something goes wrong before a transaction is stored, the
// claim is given back, and that claim alone.
import type { Balance } from "../../chain/chain.ts";
import { silentMeters } from "../../core/meters.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { createReservedShare, mayTake } from "../../kernel/share.ts";
import { endsWithin } from "../../kernel/wait.ts";
import type { Hex } from "../../x402/types.ts";
import { utcDay } from "../payments/guardrails.ts";
import { createPaymentSpans } from "../payments/payment-spans.ts";
import {
  type Claimed,
  type ClaimedPayment,
  claimPayment,
  type Measured,
  openByAccount,
  type PaymentClaim,
  sentNonces,
  withdrawClaim,
} from "../payments/payments.ts";
import { type Gas, type SettleOptions, WalletNotHeld } from "./ports.ts";
import { requirementsText, type SettlementRequest, windowProblem } from "./request.ts";
import {
  beingSettled,
  type SettlementRefusal,
  type SettlementResponses,
  type SettleResponse,
  unavailable,
} from "./response.ts";

/** To a node, for one payment. */
const QUESTIONS_PARALLEL = 8;

/** "taken": somebody else claimed it in between, so there is a record to answer from. */
export type Collected = SettleResponse | SettlementRefusal | "taken";

type ClaimWithGas = ClaimedPayment & Pick<PaymentClaim, "gas" | "gasAtRisk" | "gasHeld" | "hasCode" | "day">;

interface CollectOptions extends SettleOptions {
  readonly responses: SettlementResponses;
  readonly inFlight: InFlight;
  /** A claim may have been left behind. */
  onOrphanedClaim(): void;
}

export function createCollect(options: CollectOptions) {
  const { store, log, meters = silentMeters, chain, wallet, outcomes, limits, responses, inFlight } = options;
  const { onOrphanedClaim, spans = createPaymentSpans(null) } = options;
  const claimBeside = createClaim(options);
  const isOverShare = createOpenShares(store, wallet.capacity);

  async function claimSendWait(request: SettlementRequest, gas: Gas): Promise<Collected> {
    const startedAt = performance.now();
    const { key, payment } = request;
    const { authorization, signature } = payment;
    const wanted = { key, claim: crypto.randomUUID(), authorization, signature };
    const claimed = await claimFirst(request, wanted, gas);
    if (claimed === "taken") return "taken";
    if (claimed === "ceiling") return { overLimit: "over_daily_ceiling" };
    if (claimed === "reverts") return { overLimit: "payer_reverted" };
    if (claimed === "gas") return { overLimit: "over_daily_gas" };
    // Not a refusal: payments that hold the balance may still fail, and it may have grown since. Likewise with the gas.
    if (claimed !== "claimed") throw responses.putOff(request, claimed);
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
    const isSent = await endsWithin(until - performance.now(), sending);
    // The wallet goes on with it after this request.
    if (!isSent) throw beingSettled();
    const record = await spans.step("wait for inclusion", () => outcomes.wait(wanted.key, until - performance.now()));
    if (record === null) throw beingSettled();
    // A later claim may have other terms, and is judged by those.
    return record.claim === wanted.claim ? responses.fromRecord(request, record, false) : "taken";
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
   * @throws Fault `unavailable` when nothing was signed and stored; the payment can be presented again
   */
  async function send(request: SettlementRequest, claimed: ClaimedPayment, gas: Gas): Promise<void> {
    const { named } = request;
    try {
      await wallet.send(claimed, gas);
    } catch (error) {
      if (error instanceof WalletNotHeld) return;
      log.warn("payment_not_sent", { ...named, error });
      if (await withdraw(request, claimed)) throw unavailable();
      // No longer claimed, so it was sent or ended after all: its record tells.
    } finally {
      inFlight.endSending(named);
    }
  }

  async function withdraw({ named }: SettlementRequest, claimed: ClaimedPayment): Promise<boolean> {
    try {
      return await store.write((tx) => withdrawClaim(tx, claimed));
    } catch (error) {
      log.warn("claim_not_withdrawn", { ...named, error });
      onOrphanedClaim();
      return true;
    }
  }

  /** @throws Fault `unavailable` as settle does */
  return async (request: SettlementRequest): Promise<Collected> => {
    const { account, named } = request;
    // Equal requests at once need no second simulation.
    if (inFlight.has(named)) throw beingSettled();
    if (!inFlight.begin(named)) throw responses.overShare(request, "too many settlements at once");
    try {
      const readiness = await wallet.readiness();
      if (!readiness.ready) throw responses.unready(request, readiness.reason);
      if (await isOverShare(account)) throw responses.overShare(request, "too many payments under way");
      const { authorization, signature } = request.payment;
      const simulated = await chain.simulate(authorization, signature);
      if (!simulated.ok) return { failed: simulated.reason };
      // The simulation may have taken long.
      const late = windowProblem(request, await chain.time());
      if (late !== null) return { failed: late };
      return await claimSendWait(request, simulated.gas);
    } finally {
      inFlight.end(named);
    }
  };
}

function createClaim(options: CollectOptions) {
  const { store, clock, chain, onOrphanedClaim } = options;

  async function claim(request: SettlementRequest, wanted: ClaimWithGas, balance: Measured): Promise<Claimed> {
    const requirements = requirementsText(request.requirements);
    const claim = { ...wanted, account: request.account, requirements, limits: request.limits, balance };
    try {
      return await store.write((tx) => claimPayment(tx, claim, clock.now()));
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
    const measured = { ...wanted, day, gas, ...(await gasAtRiskOf(options, request, { gas, balance })) };
    const claimed = await claim(request, measured, balance);
    if (claimed !== "held") return claimed;
    const landed = await landedBy(options, payer, balance);
    if (landed.size === 0) return claimed;
    // Read again after that: a node may report a use a moment before it reports the block of it.
    const after = await chain.balanceOf(payer);
    return after.block < balance.block ? claimed : claim(request, measured, { ...after, landed });
  };
}

/**
 * The code of a payer can make each of its transfers revert for nothing, so each holds its gas. A payer without code needs
 * one transaction for all that it has under way, and the claim bounds their number.
 */
async function gasAtRiskOf(
  { chain, wallet }: Pick<CollectOptions, "chain" | "wallet">,
  { key, limits, payment }: SettlementRequest,
  { gas, balance: { block: number, hash } }: { readonly gas: Gas; readonly balance: Balance },
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
  await mapLimit(await sentNonces(store.read, from), QUESTIONS_PARALLEL, async (nonce) => {
    if (await chain.isUsed({ from, nonce }, { number, hash }).catch(() => false)) landed.add(nonce);
  });
  return landed;
}

/**
 * While no blocks come, payments stay under way for longer than anybody waits for them. They are counted a few times in a
 * second at most, and those that are let in since are added, so that no settlement pays for all that are open.
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

type Named = SettlementRequest["named"];

/**
 * The payments that this process has in flight, with a share of them for each account. Collecting enters them here, and
 * resuming leaves them alone, so neither has to ask the other.
 *
 * @param max payments of all accounts together
 */
export function createInFlight(max: number) {
  /** By account: each payment in flight holds a slot, however slow it is. */
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
    /**
     * Tells which payments are being claimed, or are with the wallet of this process, or were when this was asked for: what
     * was read since may be older than their transaction.
     */
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

export type InFlight = ReturnType<typeof createInFlight>;

/** Per account: one must not hold up another's payment by presenting it with a wrong signature. */
function nameOf({ account, payer, nonce }: Named): string {
  return `${payer}:${nonce}:${account}`;
}
