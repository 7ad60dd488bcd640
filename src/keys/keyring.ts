// The keys of the product. A master key wraps the keys of each tenant and the private halves of the signing keys, all of
// which live in the database; only this directory sees any of them in the clear.
import { hkdfSync } from "node:crypto";
import { notInArray } from "drizzle-orm";
import type { KeyPurpose } from "../../db/schema.ts";
import { type Clock, systemClock } from "../core/clock.ts";
import { type Log, silentLog } from "../core/log.ts";
import type { WrappedKeys } from "../storage/look.ts";
import type { Reader, Store } from "../storage/store.ts";
import { unwrap } from "./envelope.ts";
import { anotherMasterKey, createHolder } from "./holders.ts";
import type { MasterKeys } from "./master-keys.ts";
import { createRevocations } from "./revocations.ts";
import { loadSigningKeys, makeFirstSigningKeys, type SigningKey, signingKeyIdentity } from "./signing-keys.ts";
import { type KeyringState, readState } from "./state.ts";
import { createTenantKeys, DEPLOYMENT, type SealedSecret, tenantKeyIdentity } from "./tenant-keys.ts";
import { createWatch } from "./watch.ts";

const DERIVED_KEY_BYTES = 32;

export type Keyring = Awaited<ReturnType<typeof openKeyring>>;

/** @throws StartupProblem when keys of the database are wrapped with another master key. */
export async function openKeyring(store: Store, masterKeys: MasterKeys, clock: Clock, log: Log = silentLog) {
  await requireMasterKeys(store.read, masterKeys);
  await makeFirstSigningKeys(store, masterKeys, clock);
  const { version } = await readState(store.read);
  const tenants = createTenantKeys({ store, masterKeys, clock });
  const revocations = createRevocations(store.read.urgent);
  await revocations.catchUp();
  const seen = { version, signing: await loadSigningKeys(store.read, masterKeys, clock, null) };
  const missing = missingMasterKeys(masterKeys, log);
  let holder: ReturnType<typeof createHolder> | null = null;
  let renewing: Promise<void> | null = null;

  async function takeUp(state: KeyringState): Promise<void> {
    // In this order: what is read after it is at least as new as this version.
    seen.signing = await loadSigningKeys(store.read.urgent, masterKeys, clock, seen.signing);
    tenants.forget();
    seen.version = state.version;
    log.info("keys_changed", { version: state.version, master_key_id: state.master_key_id });
  }

  async function look(): Promise<void> {
    const state = await readState(store.read.urgent);
    missing.tell(state);
    if (state.revoked_at > revocations.newest()) await revocations.catchUp();
    // Without the key that wraps them the known ones are used.
    if (state.version !== seen.version && !missing.any()) await takeUp(state);
    // Nobody who waits for a look waits for this write.
    renewing ??= holder?.renew(seen.version).then(renewed, renewed) ?? null;
  }

  function renewed(error: unknown): void {
    renewing = null;
    if (error !== undefined) log.warn("keys_not_held", { error });
  }

  const watch = createWatch(look, (error) => log.warn("keys_not_read", { error }));
  return {
    /** `identity` names the record that the secret belongs to, and is needed again to open it. */
    sealSecret: (tenant: string, identity: string, plaintext: Uint8Array) => tenants.seal(tenant, identity, plaintext),
    /** @throws Error when it was sealed for another tenant or identity, or was altered. */
    openSecret: (tenant: string, identity: string, secret: SealedSecret) => tenants.open(tenant, identity, secret),
    /**
     * A key for one purpose, derived from the tenant's first key (null: from the deployment's). It is the same on all
     * replicas, and stays the same when keys are rotated: sessions that it has sealed go on.
     */
    async deriveKey(tenant: string | null, purpose: string): Promise<Buffer> {
      const key = await tenants.first(tenant ?? DEPLOYMENT);
      return Buffer.from(hkdfSync("sha256", key, "", `tollgate:${purpose}`, DERIVED_KEY_BYTES));
    },
    /** The one that signs now. */
    signingKey: (purpose: KeyPurpose): SigningKey => seen.signing.signingKey(purpose),
    /** The same object as long as the keys are the same. */
    issuerJwks: () => seen.signing.issuerJwks(),
    publicJwks: () => seen.signing.publicJwks(),
    revocations,
    isFresh: watch.isFresh,
    isUsable: watch.isUsable,
    refreshed: watch.refreshed,
    renewed: watch.renewed,
    /**
     * From now on what other processes change is in force here within about a second.
     *
     * @param alone whether no other gateway can run on this database
     * @throws StartupProblem when keys are being rotated to a master key that this process has not got
     */
    async watch(replica: string, alone: boolean): Promise<void> {
      holder = createHolder(store, masterKeys, replica, alone);
      await holder.enter();
      watch.start();
    },
    async stop(): Promise<void> {
      await watch.stop();
      await renewing;
      await holder?.leave().catch((error) => log.warn("keys_not_left", { error }));
    },
  };
}

async function requireMasterKeys(read: Reader, masterKeys: MasterKeys): Promise<void> {
  const { signingKeys, tenantKeys } = read.tables;
  // A key may be in a file that was not there a moment ago.
  masterKeys.find("");
  for (const table of [signingKeys, tenantKeys]) {
    const foreign = await read.db
      .select({ id: table.master_key_id })
      .from(table)
      .where(notInArray(table.master_key_id, [...masterKeys.ids()]))
      .limit(1);
    if (foreign.length > 0) throw anotherMasterKey();
  }
}

/** Tells of each master key once that keys are wrapped with, or are going to be, and that this process has not got. */
function missingMasterKeys(masterKeys: MasterKeys, log: Log) {
  const told = new Set<string>();
  let isAny = false;
  return {
    tell({ master_key_id, next_master_key_id }: KeyringState): void {
      const lacks = (id: string | null) => id !== null && masterKeys.find(id) === null;
      isAny = lacks(master_key_id);
      for (const id of [master_key_id, next_master_key_id]) {
        if (id === null || !lacks(id) || told.has(id)) continue;
        told.add(id);
        log.error("master_key_missing", { master_key_id: id });
      }
    },
    any: () => isAny,
  };
}

/** Opens what is sealed, and makes no key: for a look at a deployment that changes nothing. */
export function openSealed(read: Reader, masterKeys: MasterKeys): Pick<Keyring, "openSecret"> {
  const write = () => Promise.reject(new Error("a look changes nothing"));
  const { open } = createTenantKeys({
    store: { read: { ...read, urgent: read }, write },
    masterKeys,
    clock: systemClock,
  });
  return {
    // That a key is wrapped by another master key is told of the keys.
    openSecret: (...secret) =>
      open(...secret).catch((cause) => {
        throw new Error("the secret does not open", { cause });
      }),
  };
}

/** The names of those that none of these master keys wraps, or that were altered. */
export function keysThatDoNotOpen(
  masterKeys: readonly Uint8Array[],
  { tenantKeys, signingKeys }: WrappedKeys,
): string[] {
  const wrapped = [
    ...tenantKeys.map(({ tenant, number, wrapped_key }) => ({
      identity: tenantKeyIdentity(tenant, number),
      key: wrapped_key,
    })),
    ...signingKeys.map(({ purpose, kid, wrapped_private_key }) => ({
      identity: signingKeyIdentity(purpose, kid),
      key: wrapped_private_key,
    })),
  ];
  const opens = (masterKey: Uint8Array, { identity, key }: (typeof wrapped)[number]) => {
    try {
      unwrap(masterKey, key, identity);
      return true;
    } catch {
      return false;
    }
  };
  return wrapped
    .filter((one) => !masterKeys.some((masterKey) => opens(masterKey, one)))
    .map(({ identity }) => identity);
}
