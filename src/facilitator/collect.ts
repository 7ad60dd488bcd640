// A payment that nothing is against, from the simulation to its block: claimed with its share of the ceiling in one
// write, then sent, then waited for. What goes wrong before a transaction is stored gives the claim back.
import { type Answers, inFlight, type Refusal, type SettleResponse, unavailable } from "./answers.ts";
import { type Asked, requirementsText, windowProblem } from "./asked.ts";
import { claimPayment, type FacilitatorPayment, withdrawClaim } from "./payments.ts";
import type { SettleOptions } from "./ports.ts";

/** Memory stays bounded while node and wallet are slow. */
const AT_WORK_MAX = 2_000;

/** "taken": somebody else claimed it in between, so there is a record to answer from. */
export type Collected = SettleResponse | Refusal | "taken";

export interface Collect {
  /** @throws Fault `unavailable` as settle does */
  collect(asked: Asked): Promise<Collected>;
  /** Whether this process has it between the simulation and its transaction, or waits for its block. */
  isAtWork(payment: Pick<FacilitatorPayment, "account" | "payer" | "nonce">): boolean;
}

interface CollectOptions extends SettleOptions {
  readonly answers: Answers;
  /** A claim may have been left behind. */
  forsaken(): void;
}

export function createCollect(options: CollectOptions): Collect {
  const { store, clock, log, chain, wallet, outcomes, limits, answers, forsaken } = options;
  const { atWorkMax = AT_WORK_MAX } = options;
  /** Requests between the simulation and their answer. */
  const atWork = new Set<string>();
  /** Payments that the wallet has not stored or refused yet: a database that is away may hold that up. */
  const sending = new Set<string>();

  function isBusy(name: string): boolean {
    return atWork.has(name) || sending.has(name);
  }

  async function claimSendWait(asked: Asked, gas: bigint): Promise<Collected> {
    const until = performance.now() + limits.inclusionTimeoutMs;
    const claimed = await claim(asked);
    if (claimed === "taken") return "taken";
    if (claimed === "ceiling") return { overLimit: "over_daily_ceiling" };
    const isSent = await within(until - performance.now(), send(asked, gas));
    // The wallet goes on with it.
    if (!isSent) throw inFlight();
    const record = await outcomes.wait(asked.key, until - performance.now());
    if (record === null) throw inFlight();
    return answers.fromRecord(asked, record, false);
  }

  async function claim({ key, account, payment, requirements, limits: { dailyCeiling } }: Asked) {
    const { authorization, signature } = payment;
    const terms = requirementsText(requirements);
    const wanted = { key, account, authorization, signature, requirements: terms, dailyCeiling };
    try {
      return await store.write((tx) => claimPayment(tx, wanted, clock.now()));
    } catch (error) {
      // A connection lost during the commit leaves open whether the claim is stored.
      forsaken();
      throw error;
    }
  }

  /** @throws Fault `unavailable` when nothing was signed and stored; the payment can be presented again */
  async function send({ key, payment, named }: Asked, gas: bigint): Promise<void> {
    const { authorization, signature } = payment;
    const name = nameOf(named);
    sending.add(name);
    try {
      await wallet.send({ key, authorization, signature }, gas);
    } catch (error) {
      log.warn("payment not sent", { ...named, error });
      if (await withdraw({ key, named })) throw unavailable();
      // Not claimed any more, so it was sent or ended after all: the record tells.
    } finally {
      sending.delete(name);
    }
  }

  async function withdraw({ key, named }: Pick<Asked, "key" | "named">): Promise<boolean> {
    try {
      return await store.write((tx) => withdrawClaim(tx, key));
    } catch (error) {
      log.warn("claim not withdrawn", { ...named, error });
      forsaken();
      return true;
    }
  }

  return {
    async collect(asked) {
      const name = nameOf(asked.named);
      // Equal requests at once need no second simulation.
      if (isBusy(name)) throw inFlight();
      if (Math.max(atWork.size, sending.size) >= atWorkMax)
        throw answers.unready(asked, "too many settlements at once");
      atWork.add(name);
      try {
        const readiness = await wallet.readiness();
        if (!readiness.ready) throw answers.unready(asked, readiness.reason);
        const simulated = await chain.simulate(asked.payment.authorization, asked.payment.signature);
        if (!simulated.ok) return { failed: simulated.reason };
        // The simulation may have taken long.
        const late = windowProblem(asked, clock.now());
        if (late !== null) return { failed: late };
        return await claimSendWait(asked, simulated.gas);
      } finally {
        atWork.delete(name);
      }
    },
    isAtWork: ({ account, payer, nonce }) => isBusy(nameOf({ account, payer, nonce })),
  };
}

/** Per account: one must not hold up another's payment by presenting it with a wrong signature. */
function nameOf({ account, payer, nonce }: Asked["named"]): string {
  return `${payer}:${nonce}:${account}`;
}

/** False when `work` has not ended after `ms`. */
async function within(ms: number, work: Promise<void>): Promise<boolean> {
  const { promise: late, resolve } = Promise.withResolvers<false>();
  const timer = setTimeout(resolve, Math.max(0, ms), false);
  try {
    return await Promise.race([work.then(() => true), late]);
  } finally {
    clearTimeout(timer);
  }
}
