// Revoked tokens of the local issuer. No clock decides which: a token carries the newest revocation of its time, and is
// refused when there is a later one for its tenant or its user. So a token made a moment after a revocation is good, and a
// token made a moment before is not, whatever the clocks of the two machines say.
import { and, asc, count, eq, gt, lt, ne, sql } from "drizzle-orm";
import { StartupProblem } from "../core/startup.ts";
import { DAY_MS } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";
import type { Reader, Store } from "../storage/store.ts";
import { TOKEN_DAYS_MAX } from "./signing-keys.ts";

/** The claim of a token that names the newest revocation of its time. */
export const REVOCATION_CLAIM = "tollgate:revocation";
/** The newest revocation of the time of a token; 0 for a token of a version that did not say it. */
export function madeAfter(claims: Readonly<Record<string, unknown>>): number {
  const value = claims[REVOCATION_CLAIM];
  return typeof value === "number" ? value : 0;
}

/** The name of no user: all of the tenant. */
const EVERYBODY = "";
/** A millisecond or two of reading. */
const ROWS_AT_ONCE = 1_000;

interface TenantRevocations {
  everybody: number;
  readonly users: Map<string, number>;
}

/** The revocations that this process knows of. */
export function createRevocations(read: Reader) {
  const tenants = new Map<string, TenantRevocations>();
  let newest = 0;

  function add(tenant: string, user: string, revokedAt: number): void {
    const of = tenants.get(tenant) ?? { everybody: 0, users: new Map<string, number>() };
    tenants.set(tenant, of);
    if (user !== EVERYBODY) {
      of.users.set(user, revokedAt);
      return;
    }
    of.everybody = revokedAt;
    of.users.clear();
  }

  /** Reads the new revocations: each has a later time than those before it. */
  async function catchUp(): Promise<void> {
    const { tokenRevocations: t } = read.tables;
    for (;;) {
      const rows = await read.db
        .select()
        .from(t)
        .where(gt(t.revoked_at, newest))
        .orderBy(asc(t.revoked_at))
        .limit(ROWS_AT_ONCE);
      for (const { tenant, user_name, revoked_at } of rows) add(tenant, user_name, revoked_at);
      newest = rows.at(-1)?.revoked_at ?? newest;
      if (rows.length < ROWS_AT_ONCE) return;
    }
  }

  return {
    catchUp,
    /** Changes with each revocation. */
    newest: () => newest,
    /** @param madeAfter what the token carries; 0 for one that carries nothing */
    isRevoked(tenant: string, user: string, madeAfter: number): boolean {
      const of = tenants.get(tenant);
      if (of === undefined) return false;
      return madeAfter < of.everybody || madeAfter < (of.users.get(user) ?? 0);
    },
  };
}

/**
 * About a second later every gateway refuses tokens that were made before.
 *
 * @param user null for all users of the tenant
 * @throws StartupProblem when there are too many
 */
export async function revokeTokens(store: Store, tenant: string, user: string | null): Promise<void> {
  await store.write(async (tx) => {
    const { keyring, tokenRevocations: t } = tx.tables;
    // A time, so that it is later than all others also after a restore of the database to an older state.
    const next = sql<number>`case when ${keyring.revoked_at} < ${tx.now} then ${tx.now} else ${keyring.revoked_at} + 1 end`;
    const [changed] = await tx.db.update(keyring).set({ revoked_at: next }).returning({ at: keyring.revoked_at });
    const revoked_at = changed?.at ?? 0;
    // By then the last token that a revocation refuses has expired, a day for clocks that differ included.
    await tx.db.delete(t).where(lt(t.revoked_at, revoked_at - (TOKEN_DAYS_MAX + 1) * DAY_MS));
    // Revocations of single users mean nothing beside one of the tenant.
    if (user === null) await tx.db.delete(t).where(and(eq(t.tenant, tenant), ne(t.user_name, EVERYBODY)));
    await tx.db
      .insert(t)
      .values({ tenant, user_name: user ?? EVERYBODY, revoked_at })
      .onConflictDoUpdate({ target: [t.tenant, t.user_name], set: { revoked_at } });
    const [row] = await tx.db.select({ kept: count() }).from(t);
    if (Number(row?.kept) <= MAX.revokedUsers) return;
    throw new StartupProblem(
      `no more than ${MAX.revokedUsers} users can have their tokens revoked: revoke those of whole tenants (without --user)`,
    );
  });
}
