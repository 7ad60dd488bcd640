// The gas wallets, composed of the leases (which wallets this process works for), the senders (nonce, signature, store), the
// watcher (what became of it) and the replacer (fees).

import type { Chain } from "../../chain/chain.ts";
import { quoteFees } from "../../chain/fees.ts";
import { MULTICALL3_CHECKSUMMED } from "../../chain/token.ts";
import { Fault } from "../../core/fault.ts";
import type { Meters } from "../../core/meters.ts";
import { StartupProblem } from "../../core/startup.ts";
import { MAX } from "../../kernel/limits.ts";
import type { Authorization, Hex, PaymentKey } from "../../x402/types.ts";
import type { PaymentSpans } from "../payments/payment-spans.ts";
import type { ClaimedPayment, Gas } from "../payments/payments.ts";
import { createOwnWallets, type LeaseListener, WalletNotHeld } from "./leases.ts";
import { createNonceSync, createPendingNonces, type WalletParts } from "./pending.ts";
import { createOutcomeRecorder, createPaymentResolver } from "./resolution.ts";
import { cannotSend, createSender, type Sender } from "./sender.ts";
import { type Signer, watchSigners } from "./signer.ts";
import { createWatcher } from "./watcher.ts";

export type Wallet = ReturnType<typeof createWallet>;

export interface WalletLimits {
  readonly gasLowWaterWei: bigint;
  /** Of all transactions of an account and day; 0, or left out, for no bound. */
  readonly dailyGasAllWei?: bigint;
  /** Wei per gas. */
  readonly maxFee: bigint;
  /** Blocks until an inclusion counts as final. */
  readonly confirmations: number;
  /** Until what a node has accepted is broadcast again. Tests shorten it. */
  readonly rebroadcastMs?: number;
  /** Most payments of one transaction, through Multicall3; up to 1: each has its own. */
  readonly batch: number;
}

export interface WalletOptions extends Pick<WalletParts, "chain" | "store" | "clock" | "log" | "leases"> {
  readonly meters?: Pick<Meters, "settlement">;
  readonly signers: readonly Signer[];
  /** Told of each payment that has ended, after the write is durable. */
  readonly outcomes: { announce(key: PaymentKey): void };
  /** Left out where traces are off. */
  readonly spans?: PaymentSpans;
  readonly limits: WalletLimits;
}

export function createWallet(options: WalletOptions) {
  const { chain, store, clock, log, leases, outcomes, meters, spans, limits } = options;
  const { signers, isFailing } = watchSigners(options.signers);
  const pendingNonces = createPendingNonces();
  const sync = createNonceSync({ chain, store, pendingNonces, leases });
  const senders = new Map<Hex, Sender>();
  const parts: WalletParts = {
    ...{ chain, store, clock, log, leases, pendingNonces },
    maxFee: limits.maxFee,
    wake: () => watcher.wake(),
    lookAgain: () => watcher.lookAgain(),
    reload: sync.invalidate,
    resynchronise: (wallet) => senders.get(wallet)?.resynchronise(),
  };
  const sharedMax = limits.batch;
  for (const signer of signers) senders.set(signer.address, createSender({ ...parts, signer, sharedMax }));
  const { gasLowWaterWei, rebroadcastMs: againMs, confirmations } = limits;
  const choice = createWalletChoice({ ...parts, senders: [...senders.values()], gasLowWaterWei, sharedMax });
  const { send, ...chosen } = choice;
  const countsAll = (limits.dailyGasAllWei ?? 0n) > 0n;
  const resolver = createPaymentResolver({
    ...parts,
    recorder: createOutcomeRecorder({ ...parts, meters, outcomes, countsAll }),
    ownWallets: createOwnWallets(store, [...senders.keys()]),
    simulate: choice.simulate,
    send: (payment, gas) => send(payment, gas, true),
  });
  const { refresh } = sync;
  const watcher = createWatcher({ ...parts, senders, resolver, confirmations, refresh, againMs, spans });
  const handOver = createHandOver(parts, sync.load, async () => {
    const found = await choice.readiness();
    return !isFailing() && (found.ready || found.reason === "gas wallet low");
  });

  return {
    ...chosen,
    /** Payments that may be under way at once, by all keys together. */
    capacity: MAX.walletTransactions * signers.length,
    /**
     * Takes up what was under way when the last process ended. No node has to answer for that: what is to be asked of
     * one is asked when it answers.
     *
     * @param onTaken called when wallets are taken over: claims may wait for them
     */
    async start(onTaken = () => {}): Promise<void> {
      await leases.start(handOver.listener(onTaken));
      await handOver.takeOver([]);
    },
    /** Takes up what another process has left behind. @throws Fault `unavailable` */
    async takeUp(): Promise<void> {
      await refresh();
      if (pendingNonces.wallets().size > 0 || !pendingNonces.payments().next().done) watcher.wake();
    },
    worksFor: (wallet: Hex | null): boolean => (wallet === null ? !store.isShared : leases.holds(wallet)),
    isAlone: leases.isAlone,
    /**
     * Resolves when a signed transaction for the payment is stored; it is broadcast and watched from then on.
     *
     * @throws Fault `unavailable`, NotClaimed: certainly nothing is stored then; WalletNotHeld: it is the holder's
     */
    send: (payment: ClaimedPayment, gas: Gas): Promise<void> => send(payment, gas, false),
    /** What is stored goes on at the next start, or by another facilitator at once. */
    async stop(): Promise<void> {
      await Promise.all([...[...senders.values()].map((sender) => sender.stop()), watcher.stop()]);
      await leases.stop();
    },
  };
}

/**
 * What this process does when wallets come to it, and when they go.
 *
 * @param isAble whether this process can send at all now
 */
function createHandOver(parts: WalletParts, load: () => Promise<void>, isAble: () => Promise<boolean>) {
  const { log, leases, pendingNonces, resynchronise, reload, wake } = parts;

  /** What is open of wallets that this process works for from now on, is taken up. */
  async function takeOver(wallets: readonly Hex[]): Promise<void> {
    for (const wallet of wallets) resynchronise(wallet);
    await load();
    const count = [...pendingNonces.all()].length;
    if (count > 0) log.info("transactions_resumed", { count });
    wake();
  }

  return {
    takeOver,
    listener: (onTaken: () => void): LeaseListener => ({
      async taken(wallets) {
        reload();
        await takeOver(wallets).catch((error) => log.warn("taking_up_failed", { error }));
        onTaken();
      },
      lost() {
        pendingNonces.release(leases.holds);
        // Some of what was let go may concern a wallet that is kept.
        reload();
      },
      isAble,
    }),
  };
}

// Which wallet sends a payment, and whether any can. The wallet is chosen once, at the simulation, since a payer's code may
// accept the sender of the simulation only; and so is whether the payment may share a transaction with others.

/** How old the newest block may be, by which fees are estimated and a payer's code is looked up. */
const BLOCK_AGE_MS_MAX = 1000;

interface ChoiceOptions extends WalletParts {
  readonly senders: readonly Sender[];
  readonly gasLowWaterWei: bigint;
  /** Most payments of one transaction. */
  readonly sharedMax: number;
}

function createWalletChoice(options: ChoiceOptions) {
  const { chain, pendingNonces, senders, leases, maxFee } = options;
  const { readiness, balances, able } = createReadinessCheck(options);
  const mayShare = createSharing(options);
  let turns = 0;

  const isHeld = ({ signer }: Sender) => leases.holds(signer.address);
  const loadOf = (sender: Sender) => sender.waiting() + pendingNonces.load(sender.signer.address);

  /**
   * The sender with the least to do; equal ones take turns. Those of this process come first, for others have to be handed
   * the payment. If none has gas, any will do, since it won't send then.
   */
  async function leastBusy(): Promise<Sender | undefined> {
    await readiness();
    const withGas = able().length > 0 ? able() : senders;
    const held = withGas.filter(isHeld);
    const some = held.length > 0 ? held : withGas;
    const first = turns++ % some.length;
    return [...some.slice(first), ...some.slice(0, first)].sort((a, b) => loadOf(a) - loadOf(b))[0];
  }

  /** Wei that a transaction with that gas and signature may cost, at the fees of now. @throws Fault `unavailable` */
  async function costOf({ limit }: Gas, signature: Hex): Promise<bigint> {
    // The other fields of the transaction and its data take less than 640 bytes.
    const bytes = 640 + signature.length / 2;
    const newest = chain.newest(BLOCK_AGE_MS_MAX);
    const [{ baseFee }, tip, below] = await Promise.all([newest, chain.tip(), chain.feeBelow(bytes)]);
    return limit * (quoteFees(baseFee, tip, maxFee)?.maxFee ?? maxFee) + below;
  }

  /**
   * Simulated for the wallet that has the least to do, which is the one that sends it then.
   *
   * @throws Fault `unavailable`
   */
  async function simulate(authorization: Authorization, signature: Hex) {
    const sender = await leastBusy();
    if (sender === undefined) throw cannotSend("no wallet");
    const { address } = sender.signer;
    const simulating = chain.simulate(authorization, signature, address);
    const [simulation, isShareable] = await Promise.all([simulating, mayShare(authorization.from)]);
    if (!simulation.ok) return simulation;
    return { ok: true as const, gas: { limit: simulation.gas, from: address, mayShare: isShareable } };
  }

  /** @param again it has been sent before */
  async function send(payment: ClaimedPayment, { limit, from, mayShare }: Gas, again: boolean): Promise<void> {
    if (!leases.holds(from)) throw new WalletNotHeld(from);
    const found = await readiness();
    if (!found.ready) throw cannotSend(found.reason);
    const sender = able().find(({ signer }) => signer.address === from);
    if (sender === undefined) throw cannotSend("gas wallet low");
    if (loadOf(sender) >= MAX.walletTransactions) throw cannotSend("too many payments under way");
    // What failed among others is sent alone, so that it can't fail because of a neighbour again.
    await sender.send({ payment, gas: limit, again, mayShare: mayShare && !again });
  }

  return {
    simulate,
    costOf,
    send,
    /** Whether this process works for a wallet that had gas at the last look. */
    canSend: (): boolean => able().some(isHeld),
    readiness,
    balances,
  };
}

/**
 * Tells whether payments of a payer may share a transaction with others: Multicall3 passes all of the remaining gas on to
 * each call, so a payer with code is sent alone, as its code could burn the gas of its neighbours.
 */
function createSharing({ chain, sharedMax, log }: ChoiceOptions): (payer: Hex) => Promise<boolean> {
  let isThere = false;
  let isLogged = false;

  async function hasMulticall3(): Promise<boolean> {
    if (isThere) return true;
    isThere = await chain.hasMulticall3().catch(() => false);
    if (!isThere && !isLogged) log.error("multicall3_missing", { address: MULTICALL3_CHECKSUMMED });
    isLogged = !isThere;
    return isThere;
  }

  return async (payer) => {
    if (sharedMax <= 1 || !(await hasMulticall3())) return false;
    return !(await chain.hasCode(payer, await chain.newest(BLOCK_AGE_MS_MAX)));
  };
}

/** Where no node answers, nothing is known yet, and the payments go one by one until it is. @throws StartupProblem */
export async function requireMulticall3(chain: Chain): Promise<void> {
  const isThere = await chain.hasMulticall3().catch((error: unknown) => {
    if (error instanceof Fault && error.kind === "unavailable") return true;
    throw error;
  });
  if (!isThere)
    throw new StartupProblem(
      `TOLLGATE_BATCH must be 0, since the chain of TOLLGATE_RPC_URLS has no Multicall3 at ${MULTICALL3_CHECKSUMMED}`,
    );
}

type Readiness =
  | { readonly ready: true }
  | { readonly ready: false; readonly reason: "rpc unreachable" | "no fresh block" | "gas wallet low" };

/** Whether the facilitator can take payments: a node answers, and a wallet has gas. */
function createReadinessCheck({ chain, senders, gasLowWaterWei, log }: ChoiceOptions) {
  let able: readonly Sender[] = [];
  /** By address, of the last look; null when it failed. */
  let held: readonly (readonly [address: Hex, wei: bigint])[] | null = null;
  let known: { readonly readiness: Readiness; readonly at: number } | null = null;
  let asking: Promise<Readiness> | null = null;

  async function look(): Promise<Readiness> {
    try {
      await chain.newest();
      const balances = await Promise.all(senders.map((sender) => chain.balance(sender.signer.address)));
      able = senders.filter((_, index) => (balances[index] ?? 0n) >= gasLowWaterWei);
      held = senders.map(({ signer }, index) => [signer.address, balances[index] ?? 0n]);
      if (!chain.isFresh()) return { ready: false, reason: "no fresh block" };
      return able.length > 0 ? { ready: true } : { ready: false, reason: "gas wallet low" };
    } catch (error) {
      log.debug("readiness_unknown", { error });
      able = [];
      held = null;
      return { ready: false, reason: "rpc unreachable" };
    }
  }

  async function renew(): Promise<Readiness> {
    const readiness = await look();
    if (readiness.ready !== known?.readiness.ready) {
      if (readiness.ready) log.info("ready");
      else log.error("not_ready", { reason: readiness.reason });
    }
    known = { readiness, at: performance.now() };
    asking = null;
    return readiness;
  }

  async function readiness(): Promise<Readiness> {
    // Asked before every settlement, so the answer is kept. The next block may come at any moment.
    const freshMs = known?.readiness.ready === false && known.readiness.reason === "no fresh block" ? 100 : 1_000;
    if (known !== null && performance.now() - known.at < freshMs) return known.readiness;
    asking ??= renew();
    return asking;
  }

  return {
    readiness,
    /** What the wallets hold, by address. Rejects when no node tells. */
    async balances() {
      await readiness();
      if (held === null) throw new Error("no node tells what the wallets hold");
      return held;
    },
    /** The senders that had enough gas at the last look. */
    able: (): readonly Sender[] => able,
  };
}
