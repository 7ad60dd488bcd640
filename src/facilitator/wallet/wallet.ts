// The gas wallets: which key sends a payment, whether any is able to, and what they had under way when the process
// ended. Composed of the lanes (nonce, signature, store), the watcher (what became of it) and the renewal (fees).
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { Chain } from "../chain/chain.ts";
import type { ClaimedPayment } from "../payments.ts";
import type { Gas, SettleChain } from "../settle/ports.ts";
import type { Outcomes } from "../settle/waiters.ts";
import type { SignedJob } from "./batch.ts";
import { createBroadcaster } from "./broadcast.ts";
import { gweiToWei, quoteFees } from "./fees.ts";
import { createSlots, type Slots } from "./pending.ts";
import { createGauge, type Gauge, type Readiness } from "./readiness.ts";
import { createVerdicts } from "./record-outcome.ts";
import { createRenew } from "./replace.ts";
import { createJudge } from "./resolution.ts";
import { createLane, type Lane } from "./sender.ts";
import type { Signer } from "./signer.ts";
import { createLedger } from "./sync.ts";
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
  const { simulate, costOf, send } = createSender({ chain, slots, gauge, lanes, maxFee });
  const verdicts = createVerdicts({ store, clock, log, outcomes, slots, onConflict: ledger.doubt });
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
    judge: createJudge({
      chain,
      store,
      log,
      verdicts,
      simulate,
      send: (payment, gas) => send(payment, gas, true),
    }),
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

  return {
    capacity: IN_FLIGHT_MAX * signers.length,
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
    simulate,
    costOf,
    send: (payment, gas) => send(payment, gas, false),
    async stop() {
      await Promise.all([
        ...[...lanes.values()].map((lane) => lane.stop()),
        broadcaster.stop(),
        watcher.stop(),
      ]);
    },
  };
}

interface SenderOptions {
  readonly chain: Chain;
  readonly slots: Slots;
  readonly gauge: Gauge;
  readonly lanes: ReadonlyMap<Hex, Lane>;
  /** Wei per gas. */
  readonly maxFee: bigint;
}

type Sender = Pick<Wallet, "simulate" | "costOf"> & {
  /** @param again it has been sent before */
  send(payment: ClaimedPayment, gas: Gas, again: boolean): Promise<void>;
};

/** Which wallet sends a payment: the choice is made once, for a payer's code may take only what one of them sends. */
function createSender({ chain, slots, gauge, lanes, maxFee }: SenderOptions): Sender {
  let turns = 0;

  function loadOf(lane: Lane): number {
    return lane.waiting() + (slots.loads().get(lane.signer.address) ?? 0);
  }

  /** The one with the least to do, of equal ones each in its turn; where none is able, any: it will not send then. */
  async function leastBusy(): Promise<Lane | undefined> {
    await gauge.readiness();
    const able = gauge.able().length > 0 ? gauge.able() : [...lanes.values()];
    const first = turns++ % able.length;
    const loads = [...able.slice(first), ...able.slice(0, first)].map((lane) => ({
      lane,
      load: loadOf(lane),
    }));
    return loads.sort((a, b) => a.load - b.load)[0]?.lane;
  }

  async function costOf({ limit }: Gas): Promise<bigint> {
    const [{ baseFee }, tip] = await Promise.all([chain.newest(BASE_FEE_AGE_MS), chain.tip()]);
    return limit * (quoteFees(baseFee, tip, maxFee)?.maxFee ?? maxFee);
  }

  async function simulate(authorization: Authorization, signature: Hex) {
    const lane = await leastBusy();
    if (lane === undefined) throw unavailable("no wallet");
    const { address } = lane.signer;
    const simulation = await chain.simulate(authorization, signature, address);
    if (!simulation.ok) return simulation;
    return { ok: true as const, gas: { limit: simulation.gas, from: address } };
  }

  async function send(payment: ClaimedPayment, { limit, from }: Gas, again: boolean): Promise<void> {
    const found = await gauge.readiness();
    if (!found.ready) throw unavailable(found.reason);
    const lane = gauge.able().find(({ signer }) => signer.address === from);
    if (lane === undefined) throw unavailable("gas wallet low");
    if (loadOf(lane) >= IN_FLIGHT_MAX) throw unavailable("too many payments under way");
    await lane.send({ payment, gas: limit, again });
  }

  return { simulate, costOf, send };
}

function unavailable(message: string): Fault {
  return new Fault("unavailable", message, { retryAfterSeconds: RETRY_AFTER_SECONDS });
}
