// Which wallets this process works for. Each is leased to one facilitator at a time, by the database's clock. A process that
// was paused beyond its lease finds out before it acts: by the age of its last renewal, and, in each write that stores a signed
// transaction, by the wallet's fencing token. Beneath that, the unique nonces keep two holders of one wallet from harm.
//
// A wallet changes hands by a write that is guarded by its token. There is no lock over all wallets, so a process that stops in
// the middle of a write delays no other's renewals. Each facilitator decides alone, from rows that all of them read: it takes
// wallets that nobody holds, and gives up wallets that another facilitator should have.
import { and, eq, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { newId } from "../../core/id.ts";
import { every } from "../../kernel/loop.ts";
import { createMembership, livingAmong, type ProcessRow, type Renewal } from "../../storage/leases.ts";
import type { Store, StoreTools, Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { openWallets } from "./transactions.ts";

/** This process does not hold the wallet (any more). Nothing was stored, or the wallet's new holder will find what was. */
export class WalletNotHeld extends Error {
  override readonly name = "WalletNotHeld";

  constructor(wallet: Hex) {
    super(`another facilitator works for the wallet ${wallet}`);
  }
}

/** Is told of changes of the leases. */
export interface LeaseListener {
  /** This process holds these wallets from now on, and must take up their open work. Must not reject. */
  taken(wallets: readonly Hex[]): Promise<void>;
  /** This process has lost or given up wallets. */
  lost(): void;
  /** Whether this process could send now: nodes and signer respond. Must not reject. */
  isAble(): Promise<boolean>;
}

export type WalletLeases = ReturnType<typeof createWalletLeases>;

interface WalletLeasesOptions extends StoreTools {
  /** The wallets that this process can sign for. */
  readonly wallets: readonly Hex[];
}

export function createWalletLeases(options: WalletLeasesOptions) {
  const { store, clock, log, wallets } = options;
  const id = newId("fac", clock.now());
  /** On SQLite this process is the only one. */
  const isOnly = !store.isShared;
  const read = async ({ db, tables }: Tx) => db.select().from(tables.facilitatorWallets);
  const membership = createMembership({ store, log, id, kind: "facilitator", read });
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
    // A wallet whose lease had run out is treated as newly taken, so that the work missed meanwhile is taken up. So is a
    // wallet that a database failover has given back to this process.
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
    /** Takes this process's share of the free wallets, and keeps renewing. @throws Fault `unavailable` */
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
      // On a timer apart from the renewals, since nodes may respond slowly. A lone facilitator need not ask any node.
      stopAsking = every(2_000, async () => membership.tell(facts(others === 0 || (await listener.isAble()))));
    },
    /** Frees this process's wallets for the others. Never rejects. */
    async stop(): Promise<void> {
      stopAsking();
      await membership.stop();
      holders.clear();
      if (!isOnly) await membership.leave((tx) => freeWallets(tx, id));
    },
    /** Whether this process holds the wallet, judged without a query. */
    holds: (wallet: Hex): boolean => holders.tokenOf(wallet) !== null && membership.isFresh(),
    /** Each transaction that stores something to broadcast must call this, to commit only if the wallet is held. @throws WalletNotHeld */
    async fence(tx: Tx, wallet: Hex): Promise<void> {
      const token = holders.tokenOf(wallet);
      if (token === null || !(await holdsUntilCommit(tx, wallet, id, token))) throw new WalletNotHeld(wallet);
    },
    /** Whether no other facilitator was running at the last renewal. */
    isAlone: (): boolean => isOnly || others === 0,
  };
}

/**
 * Which facilitator holds which wallet, as far as this process knows. A wallet changes hands in a write of its own, apart from
 * the renewals, since that write may have to wait for a process that stopped in the middle of a write.
 */
function createHolders(id: string, { store, log, wallets }: WalletLeasesOptions) {
  const known = new Map<Hex, WalletRow>();
  /** When this process last changed the wallet's holder (performance.now). */
  const changedAt = new Map<Hex, number>();

  /**
   * Adopts the rows as read, even where a token is lower than the known one: a database failover may have lost commits. Only
   * what this process has changed since `askedAt` is newer.
   * @param rows all rows of the table, from a query that began at `askedAt` (performance.now)
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

  /** Changes the holder of each wallet that has not changed hands meanwhile, and returns those wallets. */
  async function changeAll(toChange: readonly Hex[], holder: string): Promise<Hex[]> {
    const changed: Hex[] = [];
    for (const wallet of toChange) if (await change(wallet, holder)) changed.push(wallet);
    return changed;
  }

  /** The holder of each wallet; null when no living facilitator holds it. */
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
    /** The token under which this process holds the wallet; null when this process does not hold it. */
    tokenOf(wallet: Hex): number | null {
      const row = known.get(wallet);
      return row?.holder === id ? row.token : null;
    },
    held: (): Hex[] => [...known.values()].filter(({ holder }) => holder === id).map(({ wallet }) => wallet),
    clear: (): void => known.clear(),
    /** Takes and gives up wallets according to the shares. @returns the wallets that changed hands */
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

/**
 * Gives the wallet to this holder, or to nobody (""). Waits for transactions that fence it: the new holder finds what they store.
 * @param token the token last read; 0 when there was no row
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
 * Whether the wallet is still held under this token. If so, the row stays locked until this transaction ends: a new holder
 * waits for that, and finds what the transaction has stored.
 */
export async function holdsUntilCommit(tx: Tx, wallet: Hex, holder: string, token: number): Promise<boolean> {
  const { facilitatorWallets: t } = tx.tables;
  const isHeld = and(eq(t.wallet, wallet), eq(t.holder, holder), eq(t.token, token));
  return (await tx.db.update(t).set({ token }).where(isHeld).returning({ wallet: t.wallet })).length > 0;
}

/** Frees all wallets of the holder, so that others can take them at once. */
export async function freeWallets({ db, tables: { facilitatorWallets: t } }: Tx, holder: string): Promise<void> {
  const free = { holder: "", token: sql`${t.token} + 1` };
  await db.update(t).set(free).where(eq(t.holder, holder));
}

/** The wallets of all facilitators that this database has had, whose transactions are our own. @param wallets this process's */
export function createOwnWallets({ read }: Pick<Store, "read">, wallets: readonly Hex[]) {
  const { facilitatorWallets: t } = read.tables;
  return async (): Promise<ReadonlySet<Hex>> => {
    const rows = await read.db.select({ wallet: t.wallet }).from(t);
    return new Set([...wallets, ...rows.map(({ wallet }) => wallet)]);
  };
}

export type LivingFacilitator = Pick<ProcessRow, "id" | "wallets" | "is_able">;

/**
 * Which wallets this facilitator should take and give up. Wallets are spread evenly over the facilitators that have the key and
 * can send; if none of those can, over all that have it. A wallet whose key nobody has any more is watched by any facilitator.
 * @param holders the holder of every wallet; null when no living facilitator holds it
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
  // One wallet is given up at a time, and only when every wallet has a holder; otherwise too many would move.
  if (giveUp.length === 0 && free.length === 0) {
    const isUneven = (wallet: Hex) => candidatesOf(wallet).some((id) => countOf(id) <= countOf(me) - 2);
    const spare = own.find(isUneven);
    if (spare !== undefined) giveUp.push(spare);
  }
  return { take, giveUp };
}
