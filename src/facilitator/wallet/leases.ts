// The wallets that this process works for. Each is leased to one facilitator at a time, by the database's clock. A process
// that was paused for longer finds out before it acts: by the age of its own last renewal, and in each write that stores a
// signed transaction, by the wallet's token. Beneath that, the unique nonces keep two that believe to hold one wallet from harm.
//
// A wallet changes hands by a write that is guarded by its token. There is no lock of all, so a process that stops in the
// middle of a write holds up the renewals of nobody. Each facilitator decides for itself alone, from the same rows: it takes
// wallets that nobody works for, and gives up what another one should have.

import { and, eq, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { newId } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { every } from "../../kernel/loop.ts";
import { createMembership, livingAmong, type ProcessRow, type Renewal } from "../../storage/leases.ts";
import type { Store, Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { openWallets } from "./transactions.ts";

/** This process does not work for the wallet (any more). Nothing of it is stored, or the wallet's new holder knows of it. */
export class WalletNotHeld extends Error {
  override readonly name = "WalletNotHeld";

  constructor(wallet: Hex) {
    super(`another facilitator works for the wallet ${wallet}`);
  }
}

/** What changes with the leases. */
export interface LeaseListener {
  /** Wallets that this process has to work for from now on. Must not reject. */
  taken(wallets: readonly Hex[]): Promise<void>;
  /** Wallets that are another's by now, or nobody's. */
  lost(): void;
  /** Whether nodes and signer answer. Must not reject. */
  isAble(): Promise<boolean>;
}

export type WalletLeases = ReturnType<typeof createWalletLeases>;

interface WalletLeasesOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** It can sign for these. */
  readonly wallets: readonly Hex[];
}

export function createWalletLeases(options: WalletLeasesOptions) {
  const { store, clock, log, wallets } = options;
  const id = newId("fac", clock.now());
  /** On SQLite this process is the only one. */
  const isOnly = !store.isShared;
  const membership = createMembership({ store, log, id, kind: "facilitator", read: readWallets });
  const holders = createHolders(id, options);
  let others = 0;
  let isSharing = false;
  let stopAsking = () => {};

  const facts = (is_able: boolean) => ({ wallets: wallets.join(" "), is_able });

  function learn({ askedAt, processes, read, isRegained }: WalletRenewal, listener: LeaseListener): void {
    const before = holders.held();
    holders.learn(read, askedAt.monotonic);
    others = processes.length - 1;
    const lost = before.filter((wallet) => holders.tokenOf(wallet) === null);
    for (const wallet of lost) log.warn("wallet_lost", { wallet });
    if (lost.length > 0) listener.lost();
    // What was not done for a wallet while its lease had run out is taken up as if it had been another's; so is what a
    // failover has given back to this process.
    const taken = holders.held().filter((wallet) => isRegained || !before.includes(wallet));
    if (taken.length > 0) void listener.taken(taken);
  }

  async function shareOut(renewal: WalletRenewal, listener: LeaseListener): Promise<void> {
    if (isSharing) return;
    isSharing = true;
    try {
      const { taken, givenUp } = await holders.shareOut(livingAmong(renewal, membership.mayJudge(renewal.now)));
      if (givenUp.length > 0) listener.lost();
      if (taken.length > 0) void listener.taken(taken);
    } finally {
      isSharing = false;
    }
  }

  return {
    /** Takes what is free. @throws Fault `unavailable` */
    async start(listener: LeaseListener): Promise<void> {
      await store.write((tx) => membership.enter(tx, facts(true)));
      const entered = await membership.renew();
      learn(entered, listener);
      await shareOut(entered, listener);
      if (isOnly) return;
      membership.start((renewal) => {
        learn(renewal, listener);
        void shareOut(renewal, listener).catch((error) => log.warn("wallets_not_shared_out", { error }));
      });
      // Beside the renewals, since nodes may be slow to answer. A facilitator alone asks no node for this.
      stopAsking = every(2_000, async () => membership.tell(facts(others === 0 || (await listener.isAble()))));
    },
    /** Leaves the wallets to the others. Never rejects. */
    async stop(): Promise<void> {
      stopAsking();
      await membership.stop();
      holders.clear();
      if (!isOnly) await membership.leave((tx) => freeWallets(tx, id));
    },
    /** As far as it knows without asking. */
    holds: (wallet: Hex): boolean => holders.tokenOf(wallet) !== null && membership.isFresh(),
    /**
     * To be called in a work that stores what is to be broadcast: it is stored only if the wallet is still held then.
     *
     * @throws WalletNotHeld
     */
    async fence(tx: Tx, wallet: Hex): Promise<void> {
      const token = holders.tokenOf(wallet);
      if (token === null || !(await holdsUntilCommit(tx, wallet, id, token))) throw new WalletNotHeld(wallet);
    },
    /** Whether no other facilitator runs, or did a moment ago. */
    isAlone: (): boolean => isOnly || others === 0,
  };
}

/**
 * Who works for which wallet, as far as this process knows. A wallet changes hands by a write of its own, beside the
 * renewals, since it may have to wait for a process that was stopped in the middle of a write.
 */
function createHolders(id: string, { store, log, wallets }: WalletLeasesOptions) {
  const known = new Map<Hex, WalletRow>();
  /** When this process has last changed a holder (performance.now). */
  const changedAt = new Map<Hex, number>();

  /**
   * What was read is true, also where its token is lower than the one known here: a failover may have lost commits. Only what
   * this process has changed since is newer.
   *
   * @param rows all of the database, asked for at `askedAt` (performance.now)
   */
  function learn(rows: readonly WalletRow[], askedAt: number): void {
    const read = new Map(rows.map((row) => [row.wallet, row]));
    for (const wallet of new Set([...known.keys(), ...read.keys()])) {
      if ((changedAt.get(wallet) ?? Number.NEGATIVE_INFINITY) >= askedAt) continue;
      const row = read.get(wallet);
      if (row === undefined) known.delete(wallet);
      else known.set(wallet, row);
    }
  }

  async function change(wallet: Hex, holder: string): Promise<boolean> {
    const token = await store.write((tx) => changeHolder(tx, wallet, holder, known.get(wallet)?.token ?? 0));
    if (token === null) return false;
    changedAt.set(wallet, performance.now());
    known.set(wallet, { wallet, holder, token });
    return true;
  }

  /** Those that have not changed hands elsewhere meanwhile. */
  async function changeAll(those: readonly Hex[], holder: string): Promise<Hex[]> {
    const changed: Hex[] = [];
    for (const wallet of those) if (await change(wallet, holder)) changed.push(wallet);
    return changed;
  }

  /** By wallet; null when no living facilitator has it. */
  async function holdersAmong(alive: ReadonlySet<string>): Promise<Map<Hex, string | null>> {
    const all = new Set([...known.keys(), ...wallets, ...(await openWallets(store.read))]);
    return new Map(
      [...all].sort().map((wallet) => {
        const holder = known.get(wallet)?.holder ?? "";
        return [wallet, alive.has(holder) ? holder : null];
      }),
    );
  }

  return {
    learn,
    /** The token under which this process holds the wallet; null when it does not. */
    tokenOf(wallet: Hex): number | null {
      const row = known.get(wallet);
      return row?.holder === id ? row.token : null;
    },
    held: (): Hex[] => [...known.values()].filter(({ holder }) => holder === id).map(({ wallet }) => wallet),
    clear: (): void => known.clear(),
    /** Takes and gives up what the shares say. @returns what changed */
    async shareOut(living: readonly LivingFacilitator[]): Promise<{ taken: Hex[]; givenUp: Hex[] }> {
      const { take, giveUp } = changesOf(id, living, await holdersAmong(new Set(living.map((each) => each.id))));
      const givenUp = await changeAll(giveUp, "");
      for (const wallet of givenUp) log.info("wallet_handed_over", { wallet, facilitator: id });
      const taken = await changeAll(take, id);
      for (const wallet of taken) log.info("wallet_taken", { wallet, facilitator: id });
      return { taken, givenUp };
    },
  };
}

export type WalletRow = Tables["facilitatorWallets"]["$inferSelect"];

type WalletRenewal = Renewal<WalletRow[]>;

const readWallets = async ({ db, tables }: Tx): Promise<WalletRow[]> => db.select().from(tables.facilitatorWallets);

/**
 * Puts the wallet into the hands of this holder, or of nobody (""). It waits for works that hold the wallet until they end,
 * so what they store is there after it.
 *
 * @param token as it was seen; 0 when there was no row
 * @returns the new token; null when the wallet has changed hands since
 */
export async function changeHolder(tx: Tx, wallet: Hex, holder: string, token: number): Promise<number | null> {
  const { facilitatorWallets: t } = tx.tables;
  const set = { holder, token: token + 1 };
  const rows = await tx.db
    .insert(t)
    .values({ wallet, ...set })
    .onConflictDoUpdate({ target: t.wallet, set, setWhere: eq(t.token, token) })
    .returning({ token: t.token });
  return rows[0]?.token ?? null;
}

/**
 * Whether the wallet is still held under this token. It is then until the end of this work: who takes the wallet over waits
 * for that, and finds what this work has stored.
 */
export async function holdsUntilCommit(tx: Tx, wallet: Hex, holder: string, token: number): Promise<boolean> {
  const { facilitatorWallets: t } = tx.tables;
  const isHeld = and(eq(t.wallet, wallet), eq(t.holder, holder), eq(t.token, token));
  return (await tx.db.update(t).set({ token }).where(isHeld).returning({ wallet: t.wallet })).length > 0;
}

/** Leaves the wallets to the others at once. */
export async function freeWallets({ db, tables: { facilitatorWallets: t } }: Tx, holder: string): Promise<void> {
  const free = { holder: "", token: sql`${t.token} + 1` };
  await db.update(t).set(free).where(eq(t.holder, holder));
}

/**
 * The wallets of all facilitators of this database, now or before: a transaction of any of them is our own.
 *
 * @param wallets of this process
 */
export function createOwnWallets({ read }: Pick<Store, "read">, wallets: readonly Hex[]) {
  const { facilitatorWallets: t } = read.tables;
  return async (): Promise<ReadonlySet<Hex>> => {
    const rows = await read.db.select({ wallet: t.wallet }).from(t);
    return new Set([...wallets, ...rows.map(({ wallet }) => wallet)]);
  };
}

export type LivingFacilitator = Pick<ProcessRow, "id" | "wallets" | "is_able">;

/**
 * Wallets go to those that can sign for them and are able to, evenly. A wallet for which nobody can sign any more is watched
 * by any of them. When none is able, nothing would be gained by a change.
 *
 * @param holders of every wallet; null when no living facilitator has it
 */
export function changesOf(me: string, living: readonly LivingFacilitator[], holders: ReadonlyMap<Hex, string | null>) {
  const counts = new Map(living.map(({ id }) => [id, 0]));
  for (const holder of holders.values()) if (holder !== null) counts.set(holder, (counts.get(holder) ?? 0) + 1);
  const countOf = (id: string) => counts.get(id) ?? 0;
  const walletsOf = (one: string | null) => [...holders].filter(([, each]) => each === one).map(([wallet]) => wallet);
  function candidatesOf(wallet: Hex): string[] {
    const signing = living.filter(({ wallets }) => wallets?.split(" ").includes(wallet));
    const known = signing.length > 0 ? signing : living;
    const able = known.filter(({ is_able }) => is_able);
    return (able.length > 0 ? able : known).map(({ id }) => id);
  }

  const free = walletsOf(null);
  const take: Hex[] = [];
  for (const wallet of free) {
    const candidates = candidatesOf(wallet);
    if (!candidates.includes(me) || candidates.some((id) => countOf(id) < countOf(me))) continue;
    take.push(wallet);
    counts.set(me, countOf(me) + 1);
  }

  const own = walletsOf(me);
  const giveUp = own.filter((wallet) => !candidatesOf(wallet).includes(me));
  // One at a time, and only when every wallet has a holder: else too many would go.
  if (giveUp.length === 0 && free.length === 0) {
    const isUneven = (wallet: Hex) => candidatesOf(wallet).some((id) => countOf(id) <= countOf(me) - 2);
    const spare = own.find(isUneven);
    if (spare !== undefined) giveUp.push(spare);
  }
  return { take, giveUp };
}
