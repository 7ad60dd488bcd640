// The wallets that this process works for. Each wallet is leased to one facilitator at a time, which takes the payments
// that are claimed for it, signs, stores, broadcasts, watches and replaces. Leases run by the database's clock, and end
// when they are not renewed. A process that was paused for longer finds out before it acts: by the age of its own last
// renewal, and in each write that stores a signed transaction, by the wallet's token. Beneath that, the unique nonces keep
// two that believe to hold one wallet from harm.
import { every } from "../../concurrency/every.ts";
import type { Clock } from "../../core/clock.ts";
import { newId } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import { createLeaseTrust } from "../../storage/lease-trust.ts";
import type { Store, Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { WalletNotHeld } from "../settle/ports.ts";
import { dropLease, holdsUntilCommit, LEASE_MS, renewLease } from "./lease-rows.ts";
import { openWallets } from "./transactions.ts";

const RENEW_MS = 2_000;
/** A lease that is not renewed counts as over a little before others may see it so. */
const BELIEVED_MS = LEASE_MS - 1_000;

/** What changes with the leases. */
export interface LeaseListener {
  /** Wallets that this process has to work for from now on. Must not reject. */
  taken(wallets: readonly Hex[]): Promise<void>;
  /** Wallets that are another's by now, or nobody's. */
  lost(wallets: readonly Hex[]): void;
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
  const isOnly = store.dialect === "sqlite";
  const trust = createLeaseTrust(LEASE_MS);
  let held: ReadonlyMap<Hex, number> = new Map();
  /** When the lease that holds was asked for (performance.now). A step of the wall clock ends nothing. */
  let renewedAt = Number.NEGATIVE_INFINITY;
  let others = 0;
  let isAble = true;
  let isAsking = false;
  let stopRenewing = () => {};

  const isBelieved = () => isOnly || performance.now() - renewedAt < BELIEVED_MS;

  async function renew(): Promise<{ taken: Hex[]; lost: Hex[] }> {
    const askedAt = performance.now();
    const mayJudge = isOnly ? () => true : trust.holds;
    const known = [...wallets, ...(await openWallets(store.read))];
    const renewed = await store.write((tx) =>
      renewLease(tx, { id, wallets, isAble }, { isOnly, mayJudge, wallets: known }),
    );
    trust.renewed(renewed.now);
    // What was not done for a wallet while its lease had run out is taken up as if it were another's.
    const before: ReadonlyMap<Hex, number> = isBelieved() ? held : new Map();
    const lost = [...held.keys()].filter((wallet) => !renewed.held.has(wallet));
    ({ held, others } = renewed);
    renewedAt = askedAt;
    const taken = [...held].filter(([wallet, token]) => before.get(wallet) !== token).map(([wallet]) => wallet);
    for (const wallet of taken) log.info("wallet_taken", { wallet });
    for (const wallet of lost) {
      if (renewed.givenUp.includes(wallet)) log.info("wallet_handed_over", { wallet, able: isAble });
      else log.warn("wallet_lost", { wallet });
    }
    return { taken, lost };
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
      const { taken, lost } = await renew();
      if (lost.length > 0) listener.lost(lost);
      if (taken.length > 0) void listener.taken(taken);
    } catch (error) {
      log.warn("wallet_lease_not_renewed", { error });
    }
  }

  return {
    async start(listener) {
      await renew();
      if (!isOnly) stopRenewing = every(RENEW_MS, () => round(listener));
    },
    async stop() {
      stopRenewing();
      held = new Map();
      if (isOnly) return;
      // A lease that can't be dropped runs out.
      await store.write((tx) => dropLease(tx, id)).catch((error) => log.warn("wallet_lease_not_dropped", { error }));
    },
    holds: (wallet) => held.has(wallet) && isBelieved(),
    async fence(tx, wallet) {
      const token = held.get(wallet);
      if (token === undefined || !(await holdsUntilCommit(tx, wallet, id, token))) throw new WalletNotHeld(wallet);
    },
    isAlone: () => others === 0,
  };
}
