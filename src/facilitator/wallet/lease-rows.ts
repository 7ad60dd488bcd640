// The leases in the database: which facilitators live, by its clock, and which of them works for each wallet. A wallet
// changes hands by a write that is guarded by its token. There is no lock of all: a process that stops in the middle of a
// write holds up the renewals of nobody.
import { and, eq, lt, ne, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { leaseHolds } from "../../storage/leases.ts";
import type { Store, Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import type { LivingFacilitator } from "./lease-shares.ts";

/** How long a facilitator counts as alive after it has renewed its lease. */
export const LEASE_MS = 6_000;
/** Rows of facilitators that have been gone for so long are removed. */
const GONE_MS = 60_000;

export type WalletRow = Tables["facilitatorWallets"]["$inferSelect"];

export interface Leases {
  /** The database's time. */
  readonly now: number;
  readonly facilitators: readonly Tables["facilitators"]["$inferSelect"][];
  readonly wallets: readonly WalletRow[];
}

/** Renews the lease of this facilitator, and reads those of all. */
export async function renewLease(tx: Tx, { id, wallets, isAble }: LivingFacilitator): Promise<Leases> {
  const { facilitators: t, facilitatorWallets } = tx.tables;
  const own = { wallets: wallets.join(" "), is_able: isAble, lease_until: sql<number>`${tx.now} + ${LEASE_MS}` };
  const [row] = await tx.db
    .insert(t)
    .values({ id, ...own })
    .onConflictDoUpdate({ target: t.id, set: own })
    .returning({ lease_until: t.lease_until });
  return {
    now: (row?.lease_until ?? 0) - LEASE_MS,
    facilitators: await tx.db.select().from(t),
    wallets: await tx.db.select().from(facilitatorWallets),
  };
}

/** @param mayJudge whether all live facilitators have had time to renew */
export function livingOf({ now, facilitators }: Leases, mayJudge: boolean): LivingFacilitator[] {
  return facilitators
    .filter(({ lease_until: until }) => !mayJudge || leaseHolds(until, now, LEASE_MS))
    .map(({ id, wallets, is_able: isAble }) => ({ id, isAble, wallets: wallets.split(" ") as Hex[] }));
}

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
  await tx.db
    .update(t)
    .set({ holder: "", token: sql`${t.token} + 1` })
    .where(eq(t.holder, id));
  await tx.db.delete(facilitators).where(eq(facilitators.id, id));
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

/** Of facilitators that have been gone for long; or of all others, where this is known to be the only one. */
export async function removeGone(tx: Tx, id: string, before: number | "all"): Promise<void> {
  const { facilitators: t } = tx.tables;
  await tx.db.delete(t).where(and(ne(t.id, id), before === "all" ? undefined : lt(t.lease_until, before - GONE_MS)));
}
