// The gas wallets, composed of the leases (which wallets this process works for), the senders (nonce, signature, store), the
// watcher (what became of it) and the replacer (fees).

import type { Chain } from "../../chain/chain.ts";
import { gweiToWei } from "../../chain/fees.ts";
import type { Log } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import { MAX } from "../../kernel/limits.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import type { PaymentSpans } from "../payments/payment-spans.ts";
import type { ClaimedPayment, Gas } from "../payments/payments.ts";
import { createBroadcaster, createReplacer } from "./broadcast.ts";
import { createWalletChoice } from "./choose-wallet.ts";
import { createOwnWallets, type LeaseListener, type WalletLeases } from "./leases.ts";
import { createNonceSync, createPendingNonces, type WalletParts } from "./pending.ts";
import { createOutcomeRecorder, createPaymentResolver } from "./resolution.ts";
import { createSender, type Sender } from "./sender.ts";
import { type Signer, watchSigners } from "./signer.ts";
import { createWatcher } from "./watcher.ts";

export type Wallet = ReturnType<typeof createWallet>;

export interface WalletLimits {
  readonly gasLowWaterWei: bigint;
  /** Of all transactions of an account and day; 0, or left out, for no bound. */
  readonly dailyGasAllWei?: bigint;
  /** May have a fraction. */
  readonly maxFeeGwei: number;
  /** Blocks until an inclusion counts as final. */
  readonly confirmations: number;
  /** Until what a node has accepted is broadcast again. Tests shorten it. */
  readonly rebroadcastMs?: number;
  /** Most payments of one transaction, through Multicall3; up to 1: each has its own. */
  readonly batch: number;
}

export interface WalletOptions {
  readonly chain: Chain;
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly meters?: Pick<Meters, "settlement">;
  readonly signers: readonly Signer[];
  readonly leases: WalletLeases;
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
  const sync = createNonceSync({ store, pendingNonces, leases });
  const senders = new Map<Hex, Sender>();
  const parts: WalletParts = {
    ...{ chain, store, clock, log, leases, pendingNonces },
    maxFee: gweiToWei(limits.maxFeeGwei),
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
  const broadcaster = createBroadcaster({ ...parts, againMs, spans });
  const countsAll = (limits.dailyGasAllWei ?? 0n) > 0n;
  const resolver = createPaymentResolver({
    ...parts,
    recorder: createOutcomeRecorder({ ...parts, meters, outcomes, countsAll }),
    ownWallets: createOwnWallets(store, [...senders.keys()]),
    simulate: choice.simulate,
    send: (payment, gas) => send(payment, gas, true),
  });
  const replace = createReplacer(parts);
  const watched = {
    senders,
    resolver,
    replace,
    confirmations,
    broadcast: broadcaster.broadcast,
    refresh: sync.refresh,
  };
  const watcher = createWatcher({ ...parts, ...watched });
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
    /** Takes up what another process has left behind; called now and then. @throws Fault `unavailable` */
    async takeUp(): Promise<void> {
      await sync.refresh();
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
      await Promise.all([...[...senders.values()].map((sender) => sender.stop()), broadcaster.stop(), watcher.stop()]);
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
