// The wallets that this process works for. Each wallet is leased to one facilitator at a time, which takes the payments
// that are claimed for it, signs, stores, broadcasts, watches and replaces. Leases run by the database's clock, and end
// when they are not renewed. A process that was paused for longer finds out before it acts: by the age of its own last
// renewal, and in each write that stores a signed transaction, by the wallet's token. Beneath that, the unique nonces keep
// two that believe to hold one wallet from harm.

import { newId } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { every } from "../../kernel/loop.ts";
import { createLeaseTrust } from "../../storage/leases.ts";
import type { Store, Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { WalletNotHeld } from "../settle/ports.ts";
import { createHolders } from "./holders.ts";
import { dropLease, holdsUntilCommit, LEASE_MS, type Leases, renewLease } from "./lease-rows.ts";

const RENEW_MS = 2_000;
/** A lease that is not renewed counts as over a little before others may see it so. */
const BELIEVED_MS = LEASE_MS - 1_000;

/** What changes with the leases. */
export interface LeaseListener {
  /** Wallets that this process has to work for from now on. Must not reject. */
  taken(wallets: readonly Hex[]): Promise<void>;
  /** Wallets that are another's by now, or nobody's. */
  lost(): void;
  /** Whether nodes and signer answer. Must not reject. */
  isAble(): Promise<boolean>;
}

export interface WalletLeases {
  /** Takes what is free. @throws Fault `unavailable` */
  start(listener: LeaseListener): Promise<void>;
  /** Leaves the wallets to the others. Never rejects. */
  stop(): Promise<void>;
  /** Whether this process works for the wallet now, as far as it knows without asking. */
  holds(wallet: Hex): boolean;
  /**
   * To be called in a work that stores what is to be broadcast: it is stored only if the wallet is still held then.
   *
   * @throws WalletNotHeld
   */
  fence(tx: Tx, wallet: Hex): Promise<void>;
  /** Whether no other facilitator runs, or did a moment ago. */
  isAlone(): boolean;
}

interface WalletLeasesOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** It can sign for these. */
  readonly wallets: readonly Hex[];
}

export function createWalletLeases({ store, clock, log, wallets }: WalletLeasesOptions): WalletLeases {
  const id = newId("fac", clock.now());
  /** On SQLite this process is the only one. */
  const isOnly = !store.isShared;
  const trust = createLeaseTrust(LEASE_MS);
  const holders = createHolders({ id, store, log, wallets, isOnly });
  /** When the lease that holds was asked for (performance.now). A step of the wall clock ends nothing. */
  let renewedAt = Number.NEGATIVE_INFINITY;
  let others = 0;
  let isAble = true;
  let isAsking = false;
  let isSharing = false;
  let stopRenewing = () => {};
  let renewing: Promise<void> = Promise.resolve();

  const isBelieved = () => isOnly || performance.now() - renewedAt < BELIEVED_MS;
  const warn = (error: unknown) => log.warn("wallet_lease_not_renewed", { error });

  async function renew(listener: LeaseListener): Promise<Leases> {
    const askedAt = performance.now();
    const leases = await store.write((tx) => renewLease(tx, { id, wallets, isAble }), { urgent: true });
    trust.renewed(leases.now);
    const before = holders.held();
    const isRegained = !isBelieved();
    holders.learn(leases.wallets, askedAt);
    renewedAt = askedAt;
    others = leases.facilitators.length - 1;
    const lost = before.filter((wallet) => holders.tokenOf(wallet) === null);
    for (const wallet of lost) log.warn("wallet_lost", { wallet });
    if (lost.length > 0) listener.lost();
    // What was not done for a wallet while its lease had run out is taken up as if it had been another's; so is what a
    // failover has given back to this process.
    const taken = holders.held().filter((wallet) => isRegained || !before.includes(wallet));
    if (taken.length > 0) void listener.taken(taken);
    return leases;
  }

  async function shareOut(leases: Leases, listener: LeaseListener): Promise<void> {
    if (isSharing) return;
    isSharing = true;
    try {
      const { taken, givenUp } = await holders.shareOut(leases, isOnly || trust.holds(leases.now));
      if (givenUp.length > 0) listener.lost();
      if (taken.length > 0) void listener.taken(taken);
    } finally {
      isSharing = false;
    }
  }

  /** Beside the renewals, since nodes may be slow to answer. A facilitator alone asks no node for this. */
  async function look(listener: LeaseListener): Promise<void> {
    if (isAsking) return;
    isAsking = true;
    isAble = others === 0 || (await listener.isAble());
    isAsking = false;
  }

  async function round(listener: LeaseListener): Promise<void> {
    void look(listener);
    try {
      void shareOut(await renew(listener), listener).catch(warn);
    } catch (error) {
      warn(error);
    }
  }

  return {
    async start(listener) {
      await shareOut(await renew(listener), listener);
      if (isOnly) return;
      stopRenewing = every(RENEW_MS, () => {
        renewing = round(listener);
        return renewing;
      });
    },
    async stop() {
      stopRenewing();
      await renewing;
      holders.clear();
      if (isOnly) return;
      // A lease that can't be dropped runs out.
      await store.write((tx) => dropLease(tx, id)).catch((error) => log.warn("wallet_lease_not_dropped", { error }));
    },
    holds: (wallet) => holders.tokenOf(wallet) !== null && isBelieved(),
    async fence(tx, wallet) {
      const token = holders.tokenOf(wallet);
      if (token === null || !(await holdsUntilCommit(tx, wallet, id, token))) throw new WalletNotHeld(wallet);
    },
    isAlone: () => isOnly || others === 0,
  };
}
