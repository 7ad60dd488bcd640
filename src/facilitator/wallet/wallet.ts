// The gas wallets: which key sends a payment, whether any is able to, and what they had under way when the process
// ended. Composed of the senders (nonce, signature, store), the watcher (what became of it) and the replacer (fees).
import type { Clock } from "../../core/clock.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { Chain } from "../chain/chain.ts";
import { gweiToWei, quoteFees } from "../chain/fees.ts";
import type { ClaimedPayment } from "../payments/payments.ts";
import type { Gas } from "../settle/ports.ts";
import type { SettlementWaiters } from "../settle/waiters.ts";
import { createBroadcaster } from "./broadcast.ts";
import { createPendingNonces, type PendingNonces } from "./pending.ts";
import { createReadinessCheck, type ReadinessCheck } from "./readiness.ts";
import { createOutcomeRecorder } from "./record-outcome.ts";
import { createReplacer } from "./replace.ts";
import { createPaymentResolver } from "./resolution.ts";
import { createWatchSchedule } from "./schedule.ts";
import { createSender, type Sender, unavailable } from "./sender.ts";
import { createSharing } from "./sharing.ts";
import type { Signer } from "./signer.ts";
import { createNonceSync } from "./sync.ts";
import { createWatcher } from "./watcher.ts";

/** Transactions of one key under way, in no block yet. */
const IN_FLIGHT_MAX = 2000;
const BASE_FEE_AGE_MS = 1000;

export type Wallet = ReturnType<typeof createWallet>;

export interface WalletOptions {
  readonly chain: Chain;
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly signers: readonly Signer[];
  readonly outcomes: Pick<SettlementWaiters, "announce">;
  readonly limits: {
    readonly gasLowWaterWei: bigint;
    /** May have a fraction. */
    readonly maxFeeGwei: number;
    /** Blocks until an inclusion counts as final. */
    readonly confirmations: number;
    /** Until what a node has accepted is broadcast again. Tests shorten it. */
    readonly rebroadcastMs?: number;
    /** Most payments of one transaction, through Multicall3; up to 1: each has its own. */
    readonly batch: number;
  };
}

export function createWallet(options: WalletOptions) {
  const { chain, store, clock, log, signers, outcomes, limits } = options;
  const maxFee = gweiToWei(limits.maxFeeGwei);
  const pendingNonces = createPendingNonces();
  const schedule = createWatchSchedule(log);
  const nonceSync = createNonceSync(store, pendingNonces);
  const parts = { chain, store, clock, log, pendingNonces, schedule, maxFee };
  const senders = new Map<Hex, Sender>();
  const sharedMax = limits.batch;
  for (const signer of signers) senders.set(signer.address, createSender({ ...parts, signer, sharedMax }));
  const readiness = createReadinessCheck(chain, [...senders.values()], limits.gasLowWaterWei, log);
  const resynchronise = (wallet: Hex) => senders.get(wallet)?.resynchronise();
  const { simulate, costOf, send } = createSending({
    ...parts,
    readiness,
    senders,
    mayShare: createSharing(chain, sharedMax, log),
  });
  const recorder = createOutcomeRecorder({ ...parts, outcomes, onConflict: nonceSync.invalidate });
  const broadcaster = createBroadcaster({
    ...parts,
    onForeignNonce: resynchronise,
    againMs: limits.rebroadcastMs,
  });
  const watcher = createWatcher({
    ...parts,
    senders,
    resolver: createPaymentResolver({
      ...parts,
      recorder,
      wallets: new Set(senders.keys()),
      simulate,
      send: (payment, gas) => send(payment, gas, true),
    }),
    replace: createReplacer({ ...parts, onConflict: nonceSync.invalidate, onGap: resynchronise }),
    broadcast: broadcaster.broadcast,
    refresh: nonceSync.refresh,
    confirmations: limits.confirmations,
  });

  return {
    /** Payments that may be under way at once, by all keys together. */
    capacity: IN_FLIGHT_MAX * signers.length,
    /**
     * Takes up what was under way when the last process ended. No node has to answer for that: what is to be asked of
     * one is asked when it answers.
     */
    async start(): Promise<void> {
      await nonceSync.load();
      const count = [...pendingNonces.all()].length;
      if (count > 0) log.info("transactions_resumed", { count });
      schedule.wake();
    },
    /** The same for what another process has left behind; called now and then. @throws Fault `unavailable` */
    async takeUp(): Promise<void> {
      await nonceSync.refresh();
      if (pendingNonces.wallets().size > 0 || !pendingNonces.payments().next().done) schedule.wake();
    },
    /** At most about a second old. */
    readiness: readiness.readiness,
    simulate,
    costOf,
    /**
     * Resolves when a signed transaction for the payment is stored; it is broadcast and watched from then on.
     *
     * @throws Fault `unavailable`, NotClaimed: certainly nothing is stored then
     */
    send: (payment: ClaimedPayment, gas: Gas): Promise<void> => send(payment, gas, false),
    /** What is stored goes on at the next start. */
    async stop(): Promise<void> {
      await Promise.all([...[...senders.values()].map((sender) => sender.stop()), broadcaster.stop(), watcher.stop()]);
    },
  };
}

interface SendingOptions {
  readonly chain: Chain;
  readonly pendingNonces: PendingNonces;
  readonly readiness: ReadinessCheck;
  readonly senders: ReadonlyMap<Hex, Sender>;
  /** Wei per gas. */
  readonly maxFee: bigint;
  /** Whether payments of this payer may share a transaction with others. */
  readonly mayShare: (payer: Hex) => Promise<boolean>;
}

/** Which wallet sends a payment. It is chosen once, since a payer's code may accept the sender of the simulation only. */
function createSending({ chain, pendingNonces, readiness, senders, maxFee, mayShare }: SendingOptions) {
  let turns = 0;

  function loadOf(sender: Sender): number {
    return sender.waiting() + (pendingNonces.loads().get(sender.signer.address) ?? 0);
  }

  /** The sender with the least to do; equal ones take turns. If none has gas, any will do, since it won't send then. */
  async function leastBusy(): Promise<Sender | undefined> {
    await readiness.readiness();
    const able = readiness.able().length > 0 ? readiness.able() : [...senders.values()];
    const first = turns++ % able.length;
    const loads = [...able.slice(first), ...able.slice(0, first)].map((sender) => ({
      sender,
      load: loadOf(sender),
    }));
    return loads.sort((a, b) => a.load - b.load)[0]?.sender;
  }

  /** Wei that a transaction with that gas may cost, at the fees of now. @throws Fault `unavailable` */
  async function costOf({ limit }: Gas): Promise<bigint> {
    const [{ baseFee }, tip] = await Promise.all([chain.newest(BASE_FEE_AGE_MS), chain.tip()]);
    return limit * (quoteFees(baseFee, tip, maxFee)?.maxFee ?? maxFee);
  }

  /**
   * Simulated for the wallet that has the least to do, which is the one that sends it then.
   *
   * @throws Fault `unavailable`
   */
  async function simulate(authorization: Authorization, signature: Hex) {
    const sender = await leastBusy();
    if (sender === undefined) throw unavailable("no wallet");
    const { address } = sender.signer;
    const [simulation, isShareable] = await Promise.all([
      chain.simulate(authorization, signature, address),
      mayShare(authorization.from),
    ]);
    if (!simulation.ok) return simulation;
    return { ok: true as const, gas: { limit: simulation.gas, from: address, mayShare: isShareable } };
  }

  /** @param again it has been sent before */
  async function send(payment: ClaimedPayment, { limit, from, mayShare }: Gas, again: boolean): Promise<void> {
    const found = await readiness.readiness();
    if (!found.ready) throw unavailable(found.reason);
    const sender = readiness.able().find(({ signer }) => signer.address === from);
    if (sender === undefined) throw unavailable("gas wallet low");
    if (loadOf(sender) >= IN_FLIGHT_MAX) throw unavailable("too many payments under way");
    // What failed among others is sent alone, so that it can't fail because of a neighbour again.
    await sender.send({ payment, gas: limit, again, mayShare: mayShare && !again });
  }

  return { simulate, costOf, send };
}
