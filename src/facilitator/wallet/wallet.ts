// The gas wallets, composed of the leases (which wallets this process works for), a sender per wallet (nonces, signing,
// storing) and the watcher (broadcast, outcomes, replacement). This file also chooses the wallet that sends a payment.
import type { Chain } from "../../chain/chain.ts";
import { quoteFees } from "../../chain/fees.ts";
import { MULTICALL3_CHECKSUMMED } from "../../chain/token.ts";
import { StartupProblem } from "../../core/startup.ts";
import { MAX } from "../../kernel/limits.ts";
import { isUnavailable } from "../../storage/failures.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { Limits } from "../payments/guardrails.ts";
import type { PaymentSpans } from "../payments/payment-spans.ts";
import type { ClaimedPayment, Gas } from "../payments/payments.ts";
import { createOwnWallets, type LeaseListener, WalletNotHeld } from "./leases.ts";
import { createNonceSync, createPendingNonces, type WalletParts } from "./pending.ts";
import { createOutcomeRecorder, createPaymentResolver, type RecorderOptions } from "./resolution.ts";
import { BLOCK_AGE_MS_MAX, cannotSend, createSender, type Sender } from "./sender.ts";
import { type Signer, watchSigners } from "./signer.ts";
import { createWatcher } from "./watcher.ts";

export type Wallet = ReturnType<typeof createWallet>;

export interface WalletLimits extends Pick<Limits, "dailyGasAllWei"> {
  readonly gasLowWaterWei: bigint;
  /** Wei per gas. */
  readonly maxFee: bigint;
  /** Blocks until an inclusion counts as final. */
  readonly confirmations: number;
  /** How long after a node has accepted a transaction it is broadcast again. Tests shorten it. */
  readonly rebroadcastMs?: number;
  /** The most payments in one transaction, through Multicall3; with 0 or 1, each payment has its own. */
  readonly batch: number;
}

export interface WalletOptions
  extends Pick<WalletParts, "chain" | "store" | "clock" | "log" | "leases" | "limits">,
    Pick<RecorderOptions, "meters" | "outcomes"> {
  readonly signers: readonly Signer[];
  readonly spans: PaymentSpans;
}

export function createWallet(options: WalletOptions) {
  const { chain, store, clock, log, leases, outcomes, meters, spans, limits } = options;
  const { signers, isFailing } = watchSigners(options.signers);
  const pendingNonces = createPendingNonces();
  const sync = createNonceSync({ chain, store, pendingNonces, leases });
  const senders = new Map<Hex, Sender>();
  const parts: WalletParts = {
    ...{ chain, store, clock, log, leases, pendingNonces, limits },
    wake: () => watcher.wake(),
    lookAgain: () => watcher.lookAgain(),
    reload: sync.invalidate,
    resynchronise: (wallet) => senders.get(wallet)?.resynchronise(),
  };
  for (const signer of signers) senders.set(signer.address, createSender({ ...parts, signer }));
  const { send, ...chosen } = createWalletChoice({ ...parts, senders: [...senders.values()] });
  const resolver = createPaymentResolver({
    ...parts,
    recorder: createOutcomeRecorder({ ...parts, meters, outcomes }),
    ownWallets: createOwnWallets(store, [...senders.keys()]),
    simulate: chosen.simulate,
    send: (payment, gas) => send(payment, gas, true),
  });
  const { refresh } = sync;
  const watcher = createWatcher({ ...parts, senders, resolver, refresh, spans });
  const handOver = createHandOver(parts, sync.load, async () => {
    const found = await chosen.readiness();
    return !isFailing() && (found.ready || found.reason === "gas wallet low");
  });

  return {
    ...chosen,
    /** The most payments that may be open at once, over all wallets. */
    capacity: MAX.walletTransactions * signers.length,
    /** Takes up open work without waiting for a node. @param onTaken called when wallets are taken over: claims may wait for them */
    async start(onTaken = () => {}): Promise<void> {
      await leases.start(handOver.listener(onTaken));
      await handOver.takeOver([]);
    },
    /** Takes up work that another process has left behind. @throws Fault `unavailable` */
    async takeUp(): Promise<void> {
      await refresh();
      if (pendingNonces.wallets().size > 0 || !pendingNonces.payments().next().done) watcher.wake();
    },
    worksFor: (wallet: Hex | null): boolean => (wallet === null ? !store.isShared : leases.holds(wallet)),
    isAlone: leases.isAlone,
    /**
     * Resolves when a signed transaction for the payment is stored, which is broadcast and watched from then on.
     * @throws Fault `unavailable`, NotClaimed: certainly nothing is stored; WalletNotHeld: the wallet's holder sends it
     */
    send: (payment: ClaimedPayment, gas: Gas): Promise<void> => send(payment, gas, false),
    /** Stops sending and watching. Stored work continues at the next start, or at once in another facilitator. */
    async stop(): Promise<void> {
      await Promise.all([...[...senders.values()].map((sender) => sender.stop()), watcher.stop()]);
      await leases.stop();
    },
  };
}

/** What this process does when it takes or loses wallets. @param isAble whether this process can send at all now */
function createHandOver(parts: WalletParts, load: () => Promise<void>, isAble: () => Promise<boolean>) {
  const { log, leases, pendingNonces, resynchronise, reload, wake } = parts;

  /** Takes up the open work of wallets that this process holds from now on. */
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
        // Some of the released entries may also concern a wallet that is kept, so they are read again.
        reload();
      },
      isAble,
    }),
  };
}

// Which wallet sends a payment, and whether any can. The wallet is chosen once, at the simulation, since a payer's code may
// accept only the sender of the simulation. Whether the payment may share a transaction is decided then too.

interface ChoiceOptions extends WalletParts {
  readonly senders: readonly Sender[];
}

function createWalletChoice(options: ChoiceOptions) {
  const { chain, pendingNonces, senders, leases, limits } = options;
  const { readiness, balances, funded } = createReadinessCheck(options);
  const mayShare = createSharing(options);
  let rotation = 0;

  const isHeld = ({ signer }: Sender) => leases.holds(signer.address);
  const loadOf = (sender: Sender) => sender.waiting() + pendingNonces.load(sender.signer.address);

  /**
   * The sender with the fewest waiting payments; equal ones alternate. Wallets that this process holds come first, since a
   * payment for another wallet must be handed to its holder. If no wallet has gas, any will do, since nothing is sent then.
   */
  async function leastBusy(): Promise<Sender | undefined> {
    await readiness();
    const withGas = funded().length > 0 ? funded() : senders;
    const held = withGas.filter(isHeld);
    const candidates = held.length > 0 ? held : withGas;
    const first = rotation++ % candidates.length;
    return [...candidates.slice(first), ...candidates.slice(0, first)].sort((a, b) => loadOf(a) - loadOf(b))[0];
  }

  /** Wei that a transaction with this gas and signature may cost at current fees. @throws Fault `unavailable` */
  async function costOf({ limit }: Gas, signature: Hex): Promise<bigint> {
    // The other fields of the transaction and its data take less than 640 bytes.
    const bytes = 640 + signature.length / 2;
    const newest = chain.newest(BLOCK_AGE_MS_MAX);
    const [{ baseFee }, tip, below] = await Promise.all([newest, chain.tip(), chain.feeBelow(bytes)]);
    return limit * (quoteFees(baseFee, tip, limits.maxFee) ?? limits).maxFee + below;
  }

  /** Simulates the transfer from the least busy wallet, which then also sends the payment. @throws Fault `unavailable` */
  async function simulate(authorization: Authorization, signature: Hex) {
    const sender = await leastBusy();
    if (sender === undefined) throw cannotSend("no wallet");
    const { address } = sender.signer;
    const simulating = chain.simulate(authorization, signature, address);
    const [simulation, isShareable] = await Promise.all([simulating, mayShare(authorization.from)]);
    if (!simulation.ok) return simulation;
    return { ok: true as const, gas: { limit: simulation.gas, from: address, mayShare: isShareable } };
  }

  /** @param again whether the payment has been sent before */
  async function send(payment: ClaimedPayment, { limit, from, mayShare }: Gas, again: boolean): Promise<void> {
    if (!leases.holds(from)) throw new WalletNotHeld(from);
    const found = await readiness();
    if (!found.ready) throw cannotSend(found.reason);
    const sender = funded().find(({ signer }) => signer.address === from);
    if (sender === undefined) throw cannotSend("gas wallet low");
    if (loadOf(sender) >= MAX.walletTransactions) throw cannotSend("too many payments under way");
    // A payment that failed in a shared transaction is sent alone, so that no other payment can make it fail again.
    await sender.send({ payment, gas: limit, again, mayShare: mayShare && !again });
  }

  return {
    simulate,
    costOf,
    send,
    /** Whether this process holds a wallet that had enough gas at the last check. */
    canSend: (): boolean => funded().some(isHeld),
    readiness,
    balances,
  };
}

/**
 * Tells whether a payer's payments may share a transaction with others. Multicall3 forwards all of the remaining gas to each
 * call, so a payment of a payer with code is sent alone, as that code could burn the gas of the others.
 */
function createSharing({ chain, limits, log }: ChoiceOptions): (payer: Hex) => Promise<boolean> {
  let isDeployed = false;
  let isLogged = false;

  async function hasMulticall3(): Promise<boolean> {
    if (isDeployed) return true;
    isDeployed = await chain.hasMulticall3().catch(() => false);
    if (!isDeployed && !isLogged) log.error("multicall3_missing", { address: MULTICALL3_CHECKSUMMED });
    isLogged = !isDeployed;
    return isDeployed;
  }

  return async (payer) => {
    if (limits.batch <= 1 || !(await hasMulticall3())) return false;
    return !(await chain.hasCode(payer, await chain.newest(BLOCK_AGE_MS_MAX)));
  };
}

/** Passes while no node responds: payments are then sent one by one until Multicall3 is found. @throws StartupProblem */
export async function requireMulticall3(chain: Chain): Promise<void> {
  const isDeployed = await chain.hasMulticall3().catch((error: unknown) => {
    if (isUnavailable(error)) return true;
    throw error;
  });
  const without = `the chain of TOLLGATE_RPC_URLS has no Multicall3 at ${MULTICALL3_CHECKSUMMED}`;
  if (!isDeployed) throw new StartupProblem(`TOLLGATE_BATCH must be 0, since ${without}`);
}

type Readiness =
  | { readonly ready: true }
  | { readonly ready: false; readonly reason: "rpc unreachable" | "no fresh block" | "gas wallet low" };

/** Whether the facilitator can take payments: a node responds with a fresh block, and a wallet has gas. */
function createReadinessCheck({ chain, senders, limits, log }: ChoiceOptions) {
  let funded: readonly Sender[] = [];
  /** The wallets' balances at the last check; null when it failed. */
  let walletBalances: readonly (readonly [address: Hex, wei: bigint])[] | null = null;
  let known: { readonly readiness: Readiness; readonly at: number } | null = null;
  let asking: Promise<Readiness> | null = null;

  async function check(): Promise<Readiness> {
    try {
      await chain.newest();
      const balances = await Promise.all(senders.map((sender) => chain.balance(sender.signer.address)));
      funded = senders.filter((_, index) => (balances[index] ?? 0n) >= limits.gasLowWaterWei);
      walletBalances = senders.map(({ signer }, index) => [signer.address, balances[index] ?? 0n]);
      if (!chain.isFresh()) return { ready: false, reason: "no fresh block" };
      return funded.length > 0 ? { ready: true } : { ready: false, reason: "gas wallet low" };
    } catch (error) {
      log.debug("readiness_unknown", { error });
      funded = [];
      walletBalances = null;
      return { ready: false, reason: "rpc unreachable" };
    }
  }

  async function renew(): Promise<Readiness> {
    const readiness = await check();
    if (readiness.ready !== known?.readiness.ready) {
      if (readiness.ready) log.info("ready");
      else log.error("not_ready", { reason: readiness.reason });
    }
    known = { readiness, at: performance.now() };
    asking = null;
    return readiness;
  }

  async function readiness(): Promise<Readiness> {
    // Every settlement asks, so the result is cached; only briefly without a fresh block, as one may come at any moment.
    const freshMs = known?.readiness.ready === false && known.readiness.reason === "no fresh block" ? 100 : 1_000;
    if (known !== null && performance.now() - known.at < freshMs) return known.readiness;
    asking ??= renew();
    return asking;
  }

  return {
    readiness,
    /** The wallets' balances, by address. Rejects when no node responds. */
    async balances() {
      await readiness();
      if (walletBalances === null) throw new Error("no node reports the wallets' balances");
      return walletBalances;
    },
    /** The senders that had enough gas at the last check. */
    funded: (): readonly Sender[] => funded,
  };
}
