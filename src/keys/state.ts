// The one row about all keys. Whoever makes a key reads it under its lock, in the same write: so no key is wrapped with a
// master key that a rotation has left behind, however long its maker was paused.
import { eq } from "drizzle-orm";
import { Fault } from "../core/fault.ts";
import type { Reader, Tx } from "../storage/store.ts";
import type { MasterKeys } from "./master-keys.ts";

export type KeyringState = Reader["tables"]["keyring"]["$inferSelect"];

const ONE = 1;
const LOCK = "keyring:";
const RETRY_AFTER_SECONDS = 10;

export async function readState({ db, tables: { keyring } }: Reader): Promise<KeyringState> {
  const [state] = await db.select().from(keyring).where(eq(keyring.one, ONE));
  if (state === undefined) throw new Error("the keyring has no state");
  return state;
}

/** Nobody else changes the state or makes a key until this write has ended. */
export async function lockState(tx: Tx): Promise<KeyringState> {
  await tx.lock(LOCK);
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

/** @throws Fault `unavailable` when this process has not got that key */
export function requireMasterKey(masterKeys: MasterKeys, id: string): Buffer {
  const key = masterKeys.find(id);
  if (key !== null) return key;
  throw new Fault("unavailable", "a key can't be opened at the moment", {
    retryAfterSeconds: RETRY_AFTER_SECONDS,
    cause: new Error(`there is no master key ${id} here`),
  });
}
