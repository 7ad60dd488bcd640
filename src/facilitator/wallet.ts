// The gas wallets: which key sends a payment, whether any is able to, and what they had under way when the process
// ended. Composed of the lanes (nonce, signature, store), the watcher (what became of it) and the renewal (fees).
import type { Clock } from "../core/clock.ts";
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import type { Store } from "../storage/store.ts";
import type { Hex } from "../x402/types.ts";
import type { Job, SignedJob } from "./batch.ts";
import { createBroadcaster } from "./broadcast.ts";
import type { Chain } from "./chain.ts";
import { gweiToWei } from "./fees.ts";
import { createJudge } from "./judge.ts";
import { createLane, type Lane } from "./lane.ts";
import { createLedger } from "./ledger.ts";
import type { Outcomes } from "./outcomes.ts";
import type { ClaimedPayment } from "./payments.ts";
import { createGauge, type Readiness } from "./readiness.ts";
import { createRenew } from "./renew.ts";
import type { Signer } from "./signer.ts";
import { createSlots } from "./slots.ts";
import { createVerdicts } from "./verdicts.ts";
import { createWatcher } from "./watch.ts";

/** Transactions of one key under way, in no block yet. */
const IN_FLIGHT_MAX = 2000;
const RETRY_AFTER_SECONDS = 5;

export interface Wallet {
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
   * Resolves when a signed transaction for the payment is stored; it is broadcast and watched from then on.
   *
   * @param gas its limit
   * @throws Fault `unavailable`, NotClaimed: certainly nothing is stored then
   */
  send(payment: ClaimedPayment, gas: bigint): Promise<void>;
  /** What is stored goes on at the next start. */
  stop(): Promise<void>;
}

export interface WalletOptions {
  readonly chain: Chain;
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly signers: readonly Signer[];
  readonly outcomes: Pick<Outcomes, "announce">;
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
  const slots = createSlots();
  const ledger = createLedger(store, slots);
  const lanes = new Map<Hex, Lane>();
  for (const signer of signers) {
    lanes.set(signer.address, createLane({ signer, chain, store, clock, log, maxFee, onStored }));
  }
  const gauge = createGauge(chain, [...lanes.values()], limits.gasLowWaterWei, log);
  const resynchronise = (wallet: Hex) => lanes.get(wallet)?.resynchronise();
  const verdicts = createVerdicts({ store, clock, log, outcomes, slots, onConflict: ledger.doubt });
  const send = (payment: ClaimedPayment, gas: bigint) => sendJob({ payment, gas, again: true });
  const broadcaster = createBroadcaster({
    chain,
    log,
    slots,
    onForeignNonce: resynchronise,
    onDoubt: () => watcher.lookAgain(),
    againMs: limits.rebroadcastMs,
  });
  const watcher = createWatcher({
    chain,
    store,
    log,
    slots,
    lanes,
    judge: createJudge({ chain, store, log, verdicts, send }),
    renew: createRenew({
      chain,
      store,
      clock,
      log,
      slots,
      maxFee,
      onConflict: ledger.doubt,
      onGap: resynchronise,
    }),
    broadcast: () => broadcaster.broadcast(),
    refresh: ledger.refresh,
    confirmations: limits.confirmations,
  });

  function onStored(jobs: readonly SignedJob[]): void {
    for (const { job, row } of jobs) slots.add(row, job.payment, "sent");
    watcher.wake();
  }

  /** Through the able lane with the least to do. */
  async function sendJob(job: Job): Promise<void> {
    const found = await gauge.readiness();
    if (!found.ready) throw unavailable(found.reason);
    const loads = slots.loads();
    const [chosen] = gauge
      .able()
      .map((lane) => ({ lane, load: lane.waiting() + (loads.get(lane.signer.address) ?? 0) }))
      .sort((a, b) => a.load - b.load);
    if (chosen === undefined || chosen.load >= IN_FLIGHT_MAX)
      throw unavailable("too many payments under way");
    await chosen.lane.send(job);
  }

  return {
    async start() {
      await ledger.load();
      const count = [...slots.all()].length;
      if (count > 0) log.info("transactions of an earlier run are taken up", { count });
      watcher.wake();
    },
    async takeUp() {
      await ledger.refresh();
      if (slots.wallets().size > 0 || !slots.payments().next().done) watcher.wake();
    },
    readiness: gauge.readiness,
    send: (payment, gas) => sendJob({ payment, gas, again: false }),
    async stop() {
      await Promise.all([
        ...[...lanes.values()].map((lane) => lane.stop()),
        broadcaster.stop(),
        watcher.stop(),
      ]);
    },
  };
}

function unavailable(message: string): Fault {
  return new Fault("unavailable", message, { retryAfterSeconds: RETRY_AFTER_SECONDS });
}
