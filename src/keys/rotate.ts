// A rotation of all keys, beside gateways that run. Whoever is killed anywhere is followed by the next one, which goes on:
// every step is safe to do again, and their order is such that at every moment what is durable opens every row.
//
//   announce   the database names the next master key, which is durable by then; nothing is wrapped with it
//   activate   once every gateway that runs has it: from now on it alone wraps what is made, new signing keys first of all
//   rewrap     what other master keys wrap, in small writes; with its newest key each tenant gets another one
//   reseal     the data keys of secrets, under the newest keys of their tenants
//   finish     when nothing is wrapped with another master key: only now the earlier one goes
import type { Store } from "../storage/store.ts";
import { HOLDER_LEASE_MS, type Lacking, lackingHolders } from "./holders.ts";
import {
  activate,
  announce,
  announceTenantKeys,
  finish,
  isAnyLeft,
  type RotationOptions,
  reseal,
  rewrap,
} from "./rotation.ts";
import { readState } from "./state.ts";

/** A gateway that was killed counts until its lease has run out. */
const GATEWAYS_MS_MAX = HOLDER_LEASE_MS + 5_000;
const LOOK_MS = 100;

interface NextMasterKey {
  /** Makes the next master key durable where the gateways find it. @returns its ID */
  stage(): string;
  /** Puts it in the place of the one before; false where the operator has to. */
  promote(id: string): boolean;
}

type Rotation =
  | {
      readonly outcome: "done";
      readonly isInPlace: boolean;
      /** What this run has done; those before it may have done some. */
      readonly tenantKeys: number;
      readonly secrets: number;
    }
  | { readonly outcome: "already"; readonly isInPlace: boolean }
  /** Another one rotates to another master key. */
  | { readonly outcome: "superseded" }
  | { readonly outcome: "lacking"; readonly lacks: readonly Lacking[] };

/** @param gatewaysMs how long gateways have to be as they must be */
export async function rotate(
  options: RotationOptions,
  next: NextMasterKey,
  gatewaysMs = GATEWAYS_MS_MAX,
): Promise<Rotation> {
  const { store } = options;
  const { is_rotating, master_key_id } = await readState(store.read);
  if (is_rotating && master_key_id !== null) return goOn(options, master_key_id, next, gatewaysMs);
  const id = next.stage();
  // The one before may still be where an earlier run could not replace it.
  if (id === master_key_id) return { outcome: "already", isInPlace: next.promote(id) };
  await announce(store, id);
  const lacks = await gatewaysWithout(store, id, 0, gatewaysMs);
  const activation = lacks.length > 0 ? lacks : await activate(options, id);
  if (activation === "active") return goOn(options, id, next, gatewaysMs);
  return activation === "superseded" ? { outcome: activation } : { outcome: "lacking", lacks: activation };
}

/** The gateways that run and are not as they should be after the time in which they can be. */
async function gatewaysWithout(store: Store, id: string, version: number, ms: number): Promise<readonly Lacking[]> {
  const until = performance.now() + ms;
  for (;;) {
    const lacks = await store.write((tx) => lackingHolders(tx, id, version));
    if (lacks.length === 0 || performance.now() > until) return lacks;
    await Bun.sleep(LOOK_MS);
  }
}

/** From the moment that the new master key is in force to the end. */
async function goOn(options: RotationOptions, id: string, next: NextMasterKey, gatewaysMs: number): Promise<Rotation> {
  const { store } = options;
  let [tenantKeys, secrets] = [0, 0];
  do {
    tenantKeys += await rewrap(options, id);
  } while (await isAnyLeft(options, id));
  // One that does not listen any more seals with an older key of a tenant, which opens as well and is wrapped anew.
  await gatewaysWithout(store, id, await announceTenantKeys(store), gatewaysMs);
  for (let changed = -1; changed !== 0; secrets += changed) changed = await reseal(options);
  const isInPlace = next.promote(id);
  await finish(store, id);
  return { outcome: "done", isInPlace, tenantKeys, secrets };
}
