// The gas wallets: which key sends a payment, whether any is able to, and what they had under way when the process
// ended. Composed of the senders (nonce, signature, store), the watcher (what became of it) and the renewal (fees).
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { Chain } from "../chain/chain.ts";
import type { ClaimedPayment } from "../payments.ts";
import type { Gas, SettleChain } from "../settle/ports.ts";
import type { SettlementWaiters } from "../settle/waiters.ts";
import type { SignedJob } from "./batch.ts";
import { createBroadcaster } from "./broadcast.ts";
import { gweiToWei, quoteFees } from "./fees.ts";
import { createPendingNonces, type PendingNonces } from "./pending.ts";
import { createReadinessCheck, type Readiness, type ReadinessCheck } from "./readiness.ts";
import { createOutcomeRecorder } from "./record-outcome.ts";
import { createReplacer } from "./replace.ts";
import { createPaymentResolver } from "./resolution.ts";
import { createSender, type Sender } from "./sender.ts";
import type { Signer } from "./signer.ts";
import { createNonceSync } from "./sync.ts";
import { createWatcher } from "./watcher.ts";

/** Transactions of one key under way, in no block yet. */
const IN_FLIGHT_MAX = 2000;
const RETRY_AFTER_SECONDS = 5;
const BASE_FEE_AGE_MS = 1000;

export interface Wallet {
  /** Payments that may be under way at once, by all keys together. */
  readonly capacity: number;
  /**
   * Takes up what was under way when the last process ended. It needs no node: what it can't look up now it looks up
   * when one answers.
   */
  start(): Promise<void>;
  /** The same, now and then, for what another process has left behind. @throws Fault `unavailable` */
  takeUp(): Promise<void>;
  /** At most about a second old. */
  readiness(): Promise<Readiness>;
  /**
   * Simulated for the wallet that has the least to do, which is the one that sends it then.
   *
   * @throws Fault `unavailable`
   */
  readonly simulate: SettleChain["simulate"];
  /** Wei that a transaction with that gas may cost, at the fees of now. @throws Fault `unavailable` */
  costOf(gas: Gas): Promise<bigint>;
  /**
   * Resolves when a signed transaction for the payment is stored; it is broadcast and watched from then on.
   *
   * @throws Fault `unavailable`, NotClaimed: certainly nothing is stored then
   */
  send(payment: ClaimedPayment, gas: Gas): Promise<void>;
  /** What is stored goes on at the next start. */
  stop(): Promise<void>;
}

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
  };
}

export function createWallet(options: WalletOptions): Wallet {
  const { chain, store, clock, log, signers, outcomes, limits } = options;
  const maxFee = gweiToWei(limits.maxFeeGwei);
  const pendingNonces = createPendingNonces();
  const nonceSync = createNonceSync(store, pendingNonces);
  const senders = new Map<Hex, Sender>();
  for (const signer of signers) {
    senders.set(signer.address, createSender({ signer, chain, store, clock, log, maxFee, onStored }));
  }
  const readiness = createReadinessCheck(chain, [...senders.values()], limits.gasLowWaterWei, log);
  const resynchronise = (wallet: Hex) => senders.get(wallet)?.resynchronise();
  const { simulate, costOf, send } = createSending({ chain, pendingNonces, readiness, senders, maxFee });
  const parts = { chain, store, clock, log, pendingNonces, maxFee };
  const recorder = createOutcomeRecorder({ ...parts, outcomes, onConflict: nonceSync.doubt });
  const broadcaster = createBroadcaster({
    ...parts,
    onForeignNonce: resynchronise,
    onDoubt: () => watcher.lookAgain(),
    againMs: limits.rebroadcastMs,
  });
  const watcher = createWatcher({
    ...parts,
    senders,
    judge: createPaymentResolver({
      ...parts,
      recorder,
      simulate,
      send: (payment, gas) => send(payment, gas, true),
    }),
    renew: createReplacer({ ...parts, onConflict: nonceSync.doubt, onGap: resynchronise }),
    broadcast: () => broadcaster.broadcast(),
    refresh: nonceSync.refresh,
    confirmations: limits.confirmations,
  });

  function onStored(jobs: readonly SignedJob[]): void {
    for (const { job, row } of jobs) pendingNonces.add(row, job.payment, "sent");
    watcher.wake();
  }

  return {
    capacity: IN_FLIGHT_MAX * signers.length,
    async start() {
      await nonceSync.load();
      const count = [...pendingNonces.all()].length;
      if (count > 0) log.info("transactions_resumed", { count });
      watcher.wake();
    },
    async takeUp() {
      await nonceSync.refresh();
      if (pendingNonces.wallets().size > 0 || !pendingNonces.payments().next().done) watcher.wake();
    },
    readiness: readiness.readiness,
    simulate,
    costOf,
    send: (payment, gas) => send(payment, gas, false),
    async stop() {
      await Promise.all([
        ...[...senders.values()].map((sender) => sender.stop()),
        broadcaster.stop(),
        watcher.stop(),
      ]);
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
}

type Sending = Pick<Wallet, "simulate" | "costOf"> & {
  /** @param again it has been sent before */
  send(payment: ClaimedPayment, gas: Gas, again: boolean): Promise<void>;
};

/** Which wallet sends a payment: the choice is made once, for a payer's code may take only what one of them sends. */
function createSending({ chain, pendingNonces, readiness, senders, maxFee }: SendingOptions): Sending {
  let turns = 0;

  function loadOf(sender: Sender): number {
    return sender.waiting() + (pendingNonces.loads().get(sender.signer.address) ?? 0);
  }

  /** The one with the least to do, of equal ones each in its turn; where none is able, any: it will not send then. */
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

  async function costOf({ limit }: Gas): Promise<bigint> {
    const [{ baseFee }, tip] = await Promise.all([chain.newest(BASE_FEE_AGE_MS), chain.tip()]);
    return limit * (quoteFees(baseFee, tip, maxFee)?.maxFee ?? maxFee);
  }

  async function simulate(authorization: Authorization, signature: Hex) {
    const sender = await leastBusy();
    if (sender === undefined) throw unavailable("no wallet");
    const { address } = sender.signer;
    const simulation = await chain.simulate(authorization, signature, address);
    if (!simulation.ok) return simulation;
    return { ok: true as const, gas: { limit: simulation.gas, from: address } };
  }

  async function send(payment: ClaimedPayment, { limit, from }: Gas, again: boolean): Promise<void> {
    const found = await readiness.readiness();
    if (!found.ready) throw unavailable(found.reason);
    const sender = readiness.able().find(({ signer }) => signer.address === from);
    if (sender === undefined) throw unavailable("gas wallet low");
    if (loadOf(sender) >= IN_FLIGHT_MAX) throw unavailable("too many payments under way");
    await sender.send({ payment, gas: limit, again });
  }

  return { simulate, costOf, send };
}

function unavailable(message: string): Fault {
  return new Fault("unavailable", message, { retryAfterSeconds: RETRY_AFTER_SECONDS });
}
