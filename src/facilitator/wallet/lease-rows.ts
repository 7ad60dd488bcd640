// The leases in the database: which facilitators live, by its clock, and which of them works for each wallet. Whoever
// changes anything here holds one lock, so that two never decide from the same rows.
import { and, eq, lt, ne, sql } from "drizzle-orm";
import type { Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { changesOf, type LivingFacilitator } from "./lease-shares.ts";

/** How long a facilitator counts as alive after it has renewed its lease. */
export const LEASE_MS = 6_000;
/** Rows of facilitators that have been gone for so long are removed. */
const GONE_MS = 60_000;

export interface Renewed {
  /** The database's time. */
  readonly now: number;
  /** The wallets of this facilitator, with the token of each. */
  readonly held: ReadonlyMap<Hex, number>;
  readonly givenUp: readonly Hex[];
  /** Other facilitators that are there, or were a moment ago. */
  readonly others: number;
}

export interface RenewOptions {
  /** Whether no other facilitator can run on this database. */
  readonly isOnly: boolean;
  /** Whether all live facilitators have had time to renew, by the database's time in the same write. */
  readonly mayJudge: (databaseNow: number) => boolean;
  /** Wallets that there is something to do for, whether they have a row or not. */
  readonly wallets: readonly Hex[];
}

/** Renews the lease of this facilitator, takes wallets that nobody has, and gives up those that another should have. */
export async function renewLease(tx: Tx, me: LivingFacilitator, options: RenewOptions): Promise<Renewed> {
  const { facilitators: t } = tx.tables;
  await lockLeases(tx);
  if (options.isOnly) await tx.db.delete(t).where(ne(t.id, me.id));
  const now = await renewOwn(tx, me);
  const mayJudge = options.mayJudge(now);
  if (mayJudge) await tx.db.delete(t).where(lt(t.lease_until, now - GONE_MS));
  const rows = await tx.db.select().from(t);
  const living = rows
    .filter(({ lease_until: until }) => !mayJudge || (until > now && until <= now + LEASE_MS))
    .map(({ id, wallets, is_able: isAble }) => ({ id, isAble, wallets: wallets.split(" ") as Hex[] }));
  return { now, others: rows.length - 1, ...(await changeHands(tx, me, living, options.wallets)) };
}

/** Gives the database's time. */
async function renewOwn(tx: Tx, { id, wallets, isAble }: LivingFacilitator): Promise<number> {
  const { facilitators: t } = tx.tables;
  const own = { wallets: wallets.join(" "), is_able: isAble, lease_until: sql<number>`${tx.now} + ${LEASE_MS}` };
  const [row] = await tx.db
    .insert(t)
    .values({ id, ...own })
    .onConflictDoUpdate({ target: t.id, set: own })
    .returning({ lease_until: t.lease_until });
  return (row?.lease_until ?? 0) - LEASE_MS;
}

async function changeHands(
  tx: Tx,
  me: LivingFacilitator,
  living: readonly LivingFacilitator[],
  wallets: readonly Hex[],
): Promise<Pick<Renewed, "held" | "givenUp">> {
  const { facilitatorWallets: t } = tx.tables;
  const rows = new Map((await tx.db.select().from(t)).map((row) => [row.wallet, row]));
  const alive = new Set(living.map(({ id }) => id));
  const holders = new Map<Hex, string | null>();
  for (const wallet of [...new Set([...rows.keys(), ...wallets])].sort()) {
    const holder = rows.get(wallet)?.holder ?? "";
    holders.set(wallet, alive.has(holder) ? holder : null);
  }
  const { take, giveUp } = changesOf(me.id, living, holders);
  for (const wallet of take) {
    const taken = { holder: me.id, token: (rows.get(wallet)?.token ?? 0) + 1 };
    await tx.db
      .insert(t)
      .values({ wallet, ...taken })
      .onConflictDoUpdate({ target: t.wallet, set: taken });
    rows.set(wallet, { wallet, ...taken });
  }
  for (const wallet of giveUp) {
    await tx.db.update(t).set({ holder: "" }).where(eq(t.wallet, wallet));
    rows.delete(wallet);
  }
  const own = [...rows.values()].filter(({ holder }) => holder === me.id);
  return { held: new Map(own.map(({ wallet, token }) => [wallet, token])), givenUp: giveUp };
}

/**
 * Whether the wallet is still held under this token. It is then until the end of this work: who takes the wallet over waits
 * for that, and finds what this work has stored.
 */
export async function holdsUntilCommit(tx: Tx, wallet: Hex, holder: string, token: number): Promise<boolean> {
  const { facilitatorWallets: t } = tx.tables;
  const rows = await tx.db
    .update(t)
    .set({ token })
    .where(and(eq(t.wallet, wallet), eq(t.holder, holder), eq(t.token, token)))
    .returning({ wallet: t.wallet });
  return rows.length > 0;
}

/** Leaves the wallets to the others at once. */
export async function dropLease(tx: Tx, id: string): Promise<void> {
  const { facilitators, facilitatorWallets: t } = tx.tables;
  await lockLeases(tx);
  await tx.db.update(t).set({ holder: "" }).where(eq(t.holder, id));
  await tx.db.delete(facilitators).where(eq(facilitators.id, id));
}

function lockLeases(tx: Tx): Promise<void> {
  return tx.lock("facilitators:leases");
}
