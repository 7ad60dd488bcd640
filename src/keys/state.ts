// The state of the keyring in the database, and which gateways have which master keys. Every write that creates a key reads the
// one row of the state under its lock, so no key is wrapped with a master key that a rotation has replaced. A rotation begins
// only when each running gateway has the new master key. A killed gateway counts as running until its lease expires.
import { and, eq, gt, notInArray } from "drizzle-orm";
import { Fault } from "../core/fault.ts";
import { StartupProblem } from "../core/startup.ts";
import type { Membership, ProcessFacts } from "../storage/leases.ts";
import type { Reader, Store, Tx } from "../storage/store.ts";
import type { MasterKeys } from "./master-keys.ts";

export type KeyringState = Reader["tables"]["keyring"]["$inferSelect"];

export async function readState({ db, tables: { keyring } }: Reader): Promise<KeyringState> {
  const [state] = await db.select().from(keyring).where(eq(keyring.one, 1));
  if (state === undefined) throw new Error("the keyring has no state");
  return state;
}

/** Locks the state: no other write can change it or create a key until this write ends. */
export async function lockState(tx: Tx): Promise<KeyringState> {
  await tx.lock("keyring:");
  return readState(tx);
}

/** Changes the state with a new version, at which every gateway reloads the keys within about a second. */
export async function changeState(
  { db, tables: { keyring } }: Tx,
  state: KeyringState,
  change: Partial<Pick<KeyringState, "master_key_id" | "next_master_key_id" | "is_rotating">>,
): Promise<KeyringState> {
  const changed = { ...change, version: state.version + 1 };
  await db.update(keyring).set(changed).where(eq(keyring.one, 1));
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

/** @throws Fault `unavailable` when this process does not have the key */
export function requireMasterKey(masterKeys: MasterKeys, id: string): Buffer {
  const key = masterKeys.find(id);
  if (key !== null) return key;
  const cause = new Error(`there is no master key ${id} here`);
  throw new Fault("unavailable", "a key can't be opened at the moment", { retryAfterSeconds: 10, cause });
}

/** What the row of a gateway says about its keys. @param seen_version the version of the keyring that it has loaded */
export const keysHeld = (masterKeys: MasterKeys, seen_version: number): ProcessFacts => ({
  master_key_ids: masterKeys.ids().join(" "),
  seen_version,
});

/** Enters this gateway as running, so that no rotation begins to a key that it lacks. @throws StartupProblem when it lacks one now */
export async function enterHolder(store: Store, masterKeys: MasterKeys, membership: Membership): Promise<void> {
  await store.write(async (tx) => {
    const { master_key_id, version } = await lockState(tx);
    if (master_key_id !== null && masterKeys.find(master_key_id) === null) throw anotherMasterKey(masterKeys);
    await membership.enter(tx, keysHeld(masterKeys, version));
  });
}

export function anotherMasterKey({ place }: MasterKeys): StartupProblem {
  return new StartupProblem(
    `the master key (${place}) must be the key that this database was made with, or that its keys were rotated to; while ` +
      "they are rotated both are needed (TOLLGATE_NEW_MASTER_KEY)",
  );
}

/** The running gateways that lack the key or that version. A lease far in the future counts: clocks may have been set back. */
export async function lackingHolders({ db, tables, now }: Tx, id: string, version: number): Promise<string[]> {
  const { processes: t } = tables;
  const running = and(eq(t.kind, "gateway"), gt(t.lease_until, now));
  const holders = await db.select().from(t).where(running);
  return holders
    .filter((held) => (held.seen_version ?? 0) < version || !held.master_key_ids?.split(" ").includes(id))
    .map((held) => held.id);
}
