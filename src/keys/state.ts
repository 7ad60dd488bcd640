// The state of all keys in the database, and which gateways have them. Every write that makes a key reads the one row of the
// state under its lock, so no key is wrapped with a master key that a rotation has left behind. A rotation begins only when
// each gateway that runs has the new master key. A gateway that was killed counts until its lease has run out.
import { eq, gt, lte, notInArray, sql } from "drizzle-orm";
import { Fault } from "../core/fault.ts";
import { StartupProblem } from "../core/startup.ts";
import type { Reader, Store, Tx } from "../storage/store.ts";
import type { MasterKeys } from "./master-keys.ts";

export type KeyringState = Reader["tables"]["keyring"]["$inferSelect"];

const ONE = 1;

export async function readState({ db, tables: { keyring } }: Reader): Promise<KeyringState> {
  const [state] = await db.select().from(keyring).where(eq(keyring.one, ONE));
  if (state === undefined) throw new Error("the keyring has no state");
  return state;
}

/** Nobody else changes the state or makes a key until this write has ended. */
export async function lockState(tx: Tx): Promise<KeyringState> {
  await tx.lock("keyring:");
  return readState(tx);
}

/** Every gateway reads the keys again within about a second. */
export async function changeState(
  { db, tables: { keyring } }: Tx,
  state: KeyringState,
  change: Partial<Pick<KeyringState, "master_key_id" | "next_master_key_id" | "is_rotating">>,
): Promise<KeyringState> {
  const changed = { ...change, version: state.version + 1 };
  await db.update(keyring).set(changed).where(eq(keyring.one, ONE));
  return { ...state, ...changed };
}

/** Whether any key is wrapped with another master key than these. */
export async function isWrappedByOthers({ db, tables }: Reader, ids: readonly string[]): Promise<boolean> {
  for (const table of [tables.signingKeys, tables.tenantKeys]) {
    const isOther = notInArray(table.master_key_id, [...ids]);
    const [row] = await db.select({ id: table.master_key_id }).from(table).where(isOther).limit(1);
    if (row !== undefined) return true;
  }
  return false;
}

/** @throws Fault `unavailable` when this process does not have that key */
export function requireMasterKey(masterKeys: MasterKeys, id: string): Buffer {
  const key = masterKeys.find(id);
  if (key !== null) return key;
  throw new Fault("unavailable", "a key can't be opened at the moment", {
    retryAfterSeconds: 10,
    cause: new Error(`there is no master key ${id} here`),
  });
}

export const HOLDER_LEASE_MS = 15_000;

/** Enters this gateway as one that runs. @param alone whether no other gateway can run on this database */
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
    /** After this no rotation begins to a key that this gateway lacks. @throws StartupProblem when one has begun */
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
      if (held === written && startedAt - writtenAt < 5_000) return;
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

/**
 * The IDs of gateways that run without the master key, or have not read the keys since that version. A lease far in the
 * future counts too: the database's clock may have gone back.
 */
export async function lackingHolders({ db, tables, now }: Tx, id: string, version: number): Promise<string[]> {
  const { keyHolders: t } = tables;
  const holders = await db.select().from(t).where(gt(t.lease_until, now));
  return holders
    .filter((held) => held.seen_version < version || !held.master_key_ids.split(" ").includes(id))
    .map(({ replica }) => replica);
}
