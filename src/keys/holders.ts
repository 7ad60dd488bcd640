// Which gateways run, and with which master keys: a rotation begins only when each of them has the new one. A gateway that
// was killed counts until its lease has run out by the database's clock.
import { and, eq, gt, lte, notInArray, sql } from "drizzle-orm";
import { StartupProblem } from "../core/startup.ts";
import type { Store, Tx } from "../storage/store.ts";
import type { MasterKeys } from "./master-keys.ts";
import { lockState } from "./state.ts";

export const HOLDER_LEASE_MS = 15_000;
const RENEW_MS = 5_000;

/** @param alone whether no other gateway can run on this database */
export function createHolder(store: Store, masterKeys: MasterKeys, replica: string, alone: boolean) {
  let written = "";
  let writtenAt = Number.NEGATIVE_INFINITY;

  function write(tx: Tx, master_key_ids: string, seen_version: number) {
    const { keyHolders: t } = tx.tables;
    const lease_until = sql<number>`${tx.now} + ${HOLDER_LEASE_MS}`;
    const held = { master_key_ids, seen_version, lease_until };
    return tx.db
      .insert(t)
      .values({ replica, ...held })
      .onConflictDoUpdate({ target: t.replica, set: held });
  }

  return {
    /**
     * After this no rotation begins to a key that this gateway has not got.
     *
     * @throws StartupProblem when one has begun
     */
    enter: () =>
      store.write(async (tx) => {
        const { master_key_id, version } = await lockState(tx);
        if (master_key_id !== null && masterKeys.find(master_key_id) === null) throw anotherMasterKey();
        const { keyHolders: t } = tx.tables;
        const gone = alone ? undefined : lte(t.lease_until, tx.now);
        await tx.db.delete(t).where(gone);
        await write(tx, masterKeys.ids().join(" "), version);
      }),
    /** Writes what has changed, and the lease every few seconds. */
    async renew(seenVersion: number): Promise<void> {
      const ids = masterKeys.ids().join(" ");
      const held = `${ids} ${seenVersion}`;
      const startedAt = performance.now();
      if (held === written && startedAt - writtenAt < RENEW_MS) return;
      await store.write((tx) => write(tx, ids, seenVersion), { urgent: true });
      [written, writtenAt] = [held, startedAt];
    },
    leave: () =>
      store.write(async ({ db, tables: { keyHolders: t } }) => {
        await db.delete(t).where(eq(t.replica, replica));
      }),
  };
}

export function anotherMasterKey(): StartupProblem {
  return new StartupProblem(
    "TOLLGATE_MASTER_KEY (or master.key in the data directory) must be the key that this database was made with, or that " +
      "its keys were rotated to; while they are rotated both are needed (TOLLGATE_NEW_MASTER_KEY)",
  );
}

export interface Lacking {
  readonly replica: string;
  /** Whether it runs a version of the program that knows of no rotation. */
  readonly isOlder: boolean;
}

/**
 * Gateways that run and have not got the master key, or have not read the keys since that version. A lease far ahead counts
 * too: the database's clock may have gone back.
 */
export async function lackingHolders({ db, tables, now }: Tx, id: string, version: number): Promise<Lacking[]> {
  const { keyHolders: t, replicas } = tables;
  const holders = await db.select().from(t).where(gt(t.lease_until, now));
  const older = await db
    .select({ replica: replicas.id })
    .from(replicas)
    .where(and(gt(replicas.lease_until, now), notInArray(replicas.id, db.select({ replica: t.replica }).from(t))));
  const lacks = (held: (typeof holders)[number]) =>
    held.seen_version < version || !held.master_key_ids.split(" ").includes(id);
  return [
    ...holders.filter(lacks).map(({ replica }) => ({ replica, isOlder: false })),
    ...older.map(({ replica }) => ({ replica, isOlder: true })),
  ];
}
