// A payment that nothing is against, from the simulation to its block: claimed with its share of the ceiling and of
// the payer's balance in one write, then sent, then waited for. What goes wrong before a transaction is stored gives
// the claim back, and that claim alone.

import { endsWithin } from "../../concurrency/deadline.ts";
import { mapLimit } from "../../concurrency/map-limit.ts";
import type { Reader } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { createPermits, mayTake } from "../mtls/permits.ts";
import {
  type Claimed,
  type ClaimedPayment,
  claimPayment,
  type FacilitatorPayment,
  openByAccount,
  withdrawClaim,
} from "../payments.ts";
import { type Balance, type Measured, sentNonces } from "./held-funds.ts";
import type { Gas, SettleOptions } from "./ports.ts";
import { requirementsText, type SettlementRequest, windowProblem } from "./request.ts";
import {
  inFlight,
  type SettlementRefusal,
  type SettlementResponses,
  type SettleResponse,
  unavailable,
} from "./response.ts";

/** Memory stays bounded while node and wallet are slow. */
const AT_WORK_MAX = 2_000;
/** To a node, for one payment. */
const QUESTIONS_PARALLEL = 8;

/** "taken": somebody else claimed it in between, so there is a record to answer from. */
export type Collected = SettleResponse | SettlementRefusal | "taken";

export interface Collect {
  /** @throws Fault `unavailable` as settle does */
  collect(asked: SettlementRequest): Promise<Collected>;
  /** Whether this process has it between the simulation and its transaction, or waits for its block. */
  isAtWork(payment: Pick<FacilitatorPayment, "account" | "payer" | "nonce">): boolean;
}

type ClaimWithGas = ClaimedPayment & { readonly gasAtRisk: bigint };

interface CollectOptions extends SettleOptions {
  readonly answers: SettlementResponses;
  /** A claim may have been left behind. */
  forsaken(): void;
}

export function createCollect(options: CollectOptions): Collect {
  const { store, log, chain, wallet, outcomes, limits, answers, forsaken } = options;
  const claimBeside = createClaim(options);
  /** By account: each payment at work holds a place, however slow it is. */
  const shares = createPermits(options.atWorkMax ?? AT_WORK_MAX);
  /** Requests between the simulation and their answer. */
  const atWork = new Set<string>();
  /** Payments that the wallet has not stored or refused yet: a database that is away may hold that up. */
  const sending = new Set<string>();

  function isBusy(name: string): boolean {
    return atWork.has(name) || sending.has(name);
  }

  function leave(set: Set<string>, { named }: Pick<SettlementRequest, "named">): void {
    const name = nameOf(named);
    if (set.delete(name) && !isBusy(name)) shares.release(named.account);
  }

  async function claimSendWait(asked: SettlementRequest, gas: Gas): Promise<Collected> {
    const { key, payment } = asked;
    const { authorization, signature } = payment;
    const wanted = { key, claim: crypto.randomUUID(), authorization, signature };
    const claimed = await claimBeside(asked, wanted, gas);
    if (claimed === "taken") return "taken";
    if (claimed === "ceiling") return { overLimit: "over_daily_ceiling" };
    if (claimed === "gas") return { overLimit: "over_daily_gas" };
    // No refusal: what holds the balance may fail yet, and it may have grown since it was looked at. So with the gas.
    if (claimed !== "claimed") throw answers.putOff(asked, claimed);
    // From the claim on, as whoever finds its record reckons.
    const until = performance.now() + limits.inclusionTimeoutMs;
    const isSent = await endsWithin(until - performance.now(), send(asked, wanted, gas));
    // The wallet goes on with it.
    if (!isSent) throw inFlight();
    const record = await outcomes.wait(key, until - performance.now());
    if (record === null) throw inFlight();
    // A later claim is judged by its terms, which may be others.
    return record.claim === wanted.claim ? answers.fromRecord(asked, record, false) : "taken";
  }

  /** @throws Fault `unavailable` when nothing was signed and stored; the payment can be presented again */
  async function send(asked: SettlementRequest, claimed: ClaimedPayment, gas: Gas): Promise<void> {
    const { named } = asked;
    sending.add(nameOf(named));
    try {
      await wallet.send(claimed, gas);
    } catch (error) {
      log.warn("payment_not_sent", { ...named, error });
      if (await withdraw(asked, claimed)) throw unavailable();
      // Not claimed any more, so it was sent or ended after all: the record tells.
    } finally {
      leave(sending, asked);
    }
  }

  async function withdraw({ named }: SettlementRequest, claimed: ClaimedPayment): Promise<boolean> {
    try {
      return await store.write((tx) => withdrawClaim(tx, claimed));
    } catch (error) {
      log.warn("claim_not_withdrawn", { ...named, error });
      forsaken();
      return true;
    }
  }

  return {
    async collect(asked) {
      const name = nameOf(asked.named);
      // Equal requests at once need no second simulation.
      if (isBusy(name)) throw inFlight();
      if (!shares.take(asked.account)) throw answers.unready(asked, "too many settlements at once");
      atWork.add(name);
      try {
        const readiness = await wallet.readiness();
        if (!readiness.ready) throw answers.unready(asked, readiness.reason);
        if (await isOverShare(store.read, asked.account, wallet.capacity))
          throw answers.unready(asked, "too many payments under way");
        const { authorization, signature } = asked.payment;
        const simulated = await chain.simulate(authorization, signature);
        if (!simulated.ok) return { failed: simulated.reason };
        // The simulation may have taken long.
        const late = windowProblem(asked, await chain.time());
        if (late !== null) return { failed: late };
        return await claimSendWait(asked, simulated.gas);
      } finally {
        leave(atWork, asked);
      }
    },
    isAtWork: ({ account, payer, nonce }) => isBusy(nameOf({ account, payer, nonce })),
  };
}

type ClaimBeside = (asked: SettlementRequest, wanted: ClaimedPayment, gas: Gas) => Promise<Claimed>;

function createClaim(options: CollectOptions): ClaimBeside {
  const { store, clock, chain, forsaken } = options;

  async function claim(asked: SettlementRequest, wanted: ClaimWithGas, balance: Measured): Promise<Claimed> {
    const requirements = requirementsText(asked.requirements);
    const claim = { ...wanted, account: asked.account, requirements, limits: asked.limits, balance };
    try {
      return await store.write((tx) => claimPayment(tx, claim, clock.now()));
    } catch (error) {
      // A connection lost during the commit leaves open whether the claim is stored.
      forsaken();
      throw error;
    }
  }

  /**
   * What is sent may be in the newest blocks already, and the watcher about to find out: then it is held against a
   * balance that it is out of. So the chain is asked which of it has landed by that block. No older balance has a
   * say, though our payments of that time are in it: it does not know what the payer itself has moved away since.
   */
  return async (asked, wanted, gas) => {
    const { payer } = wanted.key;
    const balance = await chain.balanceOf(payer);
    const gasAtRisk = await gasAtRiskOf(options, asked, { gas, balance });
    const measured = { ...wanted, gasAtRisk };
    const claimed = await claim(asked, measured, balance);
    if (claimed !== "held") return claimed;
    const landed = await landedBy(options, payer, balance);
    if (landed.size === 0) return claimed;
    // Looked at after that: a node may tell of a use a moment before it tells of its block.
    const after = await chain.balanceOf(payer);
    return after.block < balance.block ? claimed : claim(asked, measured, { ...after, landed });
  };
}

/** A payer without code can make its transfer revert only by a transaction of its own, which costs it as much. */
async function gasAtRiskOf(
  { chain, wallet }: Pick<CollectOptions, "chain" | "wallet">,
  { key, limits }: SettlementRequest,
  { gas, balance: { block: number, hash } }: { readonly gas: Gas; readonly balance: Balance },
): Promise<bigint> {
  if (limits.dailyGasWei === 0n) return 0n;
  return (await chain.hasCode(key.payer, { number, hash })) ? wallet.costOf(gas) : 0n;
}

/** Of what is sent for the payer. What no node tells counts as held. */
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

/** While blocks do not come, payments stay under way for longer than anybody waits for them. */
async function isOverShare(reader: Reader, account: string, capacity: number): Promise<boolean> {
  const open = await openByAccount(reader);
  const own = open.get(account) ?? 0;
  const taken = [...open.values()].reduce((sum, count) => sum + count, 0);
  return !mayTake(own, taken, open.size + (own === 0 ? 1 : 0), capacity);
}

/** Per account: one must not hold up another's payment by presenting it with a wrong signature. */
function nameOf({ account, payer, nonce }: SettlementRequest["named"]): string {
  return `${payer}:${nonce}:${account}`;
}
