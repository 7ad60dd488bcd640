// The keys of tenants. A tenant's newest key seals new secrets, each older one opens the secrets that it has sealed, and other
// keys are derived from the first one.
import { asc, eq } from "drizzle-orm";
import type { Clock } from "../core/time.ts";
import { boundedCache } from "../kernel/cache.ts";
import { MAX } from "../kernel/limits.ts";
import { bind, prepared, type Reader, type Store } from "../storage/store.ts";
import { newKey, open, seal, unwrap, wrap } from "./envelope.ts";
import type { MasterKeys } from "./master-keys.ts";
import { lockState, requireMasterKey } from "./state.ts";

const FIRST = 1;
/** The deployment's own key is stored under this tenant, whose name no token can have. It seals no secrets. */
export const DEPLOYMENT = "";

export interface SealedSecret {
  readonly sealed: Uint8Array;
  readonly key_number: number;
}

interface TenantKeys {
  readonly newest: number;
  readonly byNumber: ReadonlyMap<number, Buffer>;
}

interface TenantKeyOptions {
  readonly store: Pick<Store, "read" | "write">;
  readonly masterKeys: MasterKeys;
  readonly clock: Clock;
}

/** The identity that the wrapped key is bound to. First keys have no number in it, since they are older than the numbers. */
export const tenantKeyIdentity = (tenant: string, number: number): string =>
  number === FIRST ? `tenant:${tenant}` : `tenant-key:${number}:${tenant}`;

const tenantKeyQuery = prepared((reader: Reader) => {
  const { tenantKeys: t } = reader.tables;
  return reader.db
    .select({ number: t.number, wrapped_key: t.wrapped_key, master_key_id: t.master_key_id })
    .from(t)
    .where(eq(t.tenant, bind(t.tenant, "tenant")))
    .orderBy(asc(t.number));
});

export function createTenantKeys({ store, masterKeys, clock }: TenantKeyOptions) {
  let known = boundedCache<string, TenantKeys>(MAX.tenantKeys);

  async function stored(tenant: string): Promise<TenantKeys | null> {
    // If `forget` is called during the read, the keys go into the cache that it has dropped.
    const cache = known;
    const rows = await tenantKeyQuery(store.read).execute({ tenant });
    const newest = rows.at(-1)?.number;
    if (newest === undefined) return null;
    const opened = rows.map(({ number, wrapped_key, master_key_id }) => {
      const masterKey = requireMasterKey(masterKeys, master_key_id);
      return [number, unwrap(masterKey, wrapped_key, tenantKeyIdentity(tenant, number))] as const;
    });
    const keys = { newest, byNumber: new Map(opened) };
    cache.set(tenant, keys);
    return keys;
  }

  async function createFirst(tenant: string): Promise<void> {
    await store.write(async (tx) => {
      const { master_key_id } = await lockState(tx);
      if (master_key_id === null) throw new Error("a keyring without a master key was opened");
      const masterKey = requireMasterKey(masterKeys, master_key_id);
      const wrapped_key = wrap(masterKey, newKey(), tenantKeyIdentity(tenant, FIRST));
      const row = { tenant, number: FIRST, wrapped_key, master_key_id, created_at: clock.now() };
      // If another request has stored a key first, that one counts.
      await tx.db.insert(tx.tables.tenantKeys).values(row).onConflictDoNothing();
    });
  }

  async function keysOf(tenant: string): Promise<TenantKeys> {
    const found = known.get(tenant) ?? (await stored(tenant));
    if (found !== null) return found;
    await createFirst(tenant);
    const created = await stored(tenant);
    if (created === null) throw new Error("a tenant key that was just stored is not there");
    return created;
  }

  async function numbered(tenant: string, number: number): Promise<Buffer> {
    const key = known.get(tenant)?.byNumber.get(number) ?? (await stored(tenant))?.byNumber.get(number);
    if (key === undefined) throw new Error(`the tenant has no key ${number}`);
    return key;
  }

  const newest = async (tenant: string) => (await keysOf(tenant)).newest;

  return {
    async seal(tenant: string, identity: string, plaintext: Uint8Array) {
      const key_number = await newest(tenant);
      return { sealed: seal(await numbered(tenant, key_number), plaintext, identity), key_number };
    },
    async open(tenant: string, identity: string, { sealed, key_number }: SealedSecret): Promise<Buffer> {
      return open(await numbered(tenant, key_number), sealed, identity);
    },
    first: async (tenant: string) => {
      await keysOf(tenant);
      return numbered(tenant, FIRST);
    },
    newest,
    numbered,
    /** Clears the cache, so that the next use of a tenant's keys reads them from the database. */
    forget() {
      known = boundedCache(MAX.tenantKeys);
    },
  };
}
