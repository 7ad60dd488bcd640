// The keys of the product. The master key wraps a key for each tenant and the private halves of the signing
// keys, all of which live in the database; only this file sees any of them in the clear.
import { createHash, hkdfSync } from "node:crypto";
import { eq, ne } from "drizzle-orm";
import { type CryptoKey, calculateJwkThumbprint, exportJWK, generateKeyPair, importJWK, type JWK } from "jose";
import type { KeyPurpose } from "../../db/schema.ts";
import { boundedCache } from "../concurrency/bounded-cache.ts";
import type { Clock } from "../core/clock.ts";
import { StartupProblem } from "../core/startup.ts";
import type { WrappedKeys } from "../storage/backup.ts";
import { bind, prepared, type Reader, type Store } from "../storage/store.ts";
import { newKey, open, seal, unwrap, wrap } from "./envelope.ts";

/** All signing keys are Ed25519 (RFC 8037). */
export const SIGNING_ALGORITHM = "EdDSA";

const TENANT_KEYS_CACHED_MAX = 10_000;
/** The deployment's own key is kept as that of a tenant whose name no token can have. */
const DEPLOYMENT = "";
const DERIVED_KEY_BYTES = 32;
const PURPOSES: readonly KeyPurpose[] = ["issuer", "receipts"];

export interface SigningKey {
  readonly kid: string;
  readonly privateKey: CryptoKey;
}

export type Keyring = Awaited<ReturnType<typeof openKeyring>>;

/** @throws StartupProblem when the database was made with another master key. */
export async function openKeyring(store: Store, masterKey: Uint8Array, clock: Clock) {
  const masterKeyId = createHash("sha256").update(masterKey).digest("hex").slice(0, 16);
  await requireSameMasterKey(store.read, masterKeyId);
  const signing = await openSigningKeys(store, masterKey, masterKeyId, clock);
  const tenantKeys = boundedCache<string, Buffer>(TENANT_KEYS_CACHED_MAX);

  async function storedTenantKey(tenant: string): Promise<Buffer | null> {
    const [row] = await tenantKeyQuery(store.read).execute({ tenant });
    if (row === undefined) return null;
    const key = unwrap(masterKey, row.wrapped_key, tenantIdentity(tenant));
    tenantKeys.set(tenant, key);
    return key;
  }

  async function createTenantKey(tenant: string): Promise<void> {
    const wrapped_key = wrap(masterKey, newKey(), tenantIdentity(tenant));
    const row = { tenant, wrapped_key, master_key_id: masterKeyId, created_at: clock.now() };
    // Another request may have been first, and then its key counts.
    await store.write((tx) => tx.db.insert(tx.tables.tenantKeys).values(row).onConflictDoNothing());
  }

  async function tenantKey(tenant: string): Promise<Buffer> {
    const known = tenantKeys.get(tenant) ?? (await storedTenantKey(tenant));
    if (known !== null) return known;
    await createTenantKey(tenant);
    const created = await storedTenantKey(tenant);
    if (created === null) throw new Error("a tenant key that was just stored is not there");
    return created;
  }

  return {
    /** `identity` names the record that the secret belongs to, and is needed again to open it. */
    async sealSecret(tenant: string, identity: string, plaintext: Uint8Array): Promise<Buffer> {
      return seal(await tenantKey(tenant), plaintext, identity);
    },
    /** @throws Error when it was sealed for another tenant or identity, or was altered. */
    async openSecret(tenant: string, identity: string, sealed: Uint8Array): Promise<Buffer> {
      const key = tenantKeys.get(tenant) ?? (await storedTenantKey(tenant));
      if (key === null) throw new Error("the tenant has no key");
      return open(key, sealed, identity);
    },
    /**
     * A key for one purpose, derived from the tenant's key (null: from the deployment's). It is the same on all replicas,
     * and stays the same under another master key, which only wraps the keys that it is derived from.
     */
    async deriveKey(tenant: string | null, purpose: string): Promise<Buffer> {
      const key = await tenantKey(tenant ?? DEPLOYMENT);
      return Buffer.from(hkdfSync("sha256", key, "", `tollgate:${purpose}`, DERIVED_KEY_BYTES));
    },
    ...signing,
  };
}

const tenantKeyQuery = prepared((reader: Reader) => {
  const { tenantKeys } = reader.tables;
  return reader.db
    .select({ wrapped_key: tenantKeys.wrapped_key })
    .from(tenantKeys)
    .where(eq(tenantKeys.tenant, bind(tenantKeys.tenant, "tenant")));
});

function tenantIdentity(tenant: string): string {
  return `tenant:${tenant}`;
}

async function requireSameMasterKey(read: Reader, masterKeyId: string): Promise<void> {
  const { signingKeys, tenantKeys } = read.tables;
  for (const table of [signingKeys, tenantKeys]) {
    const foreign = await read.db
      .select({ id: table.master_key_id })
      .from(table)
      .where(ne(table.master_key_id, masterKeyId))
      .limit(1);
    if (foreign.length === 0) continue;
    throw new StartupProblem(
      "TOLLGATE_MASTER_KEY (or master.key in the data directory) must be the key that this database was made with",
    );
  }
}

type SigningKeyRow = Reader["tables"]["signingKeys"]["$inferSelect"];

async function openSigningKeys(store: Store, masterKey: Uint8Array, masterKeyId: string, clock: Clock) {
  let rows = await signingKeyRows(store.read);
  const missing = PURPOSES.filter((purpose) => inUse(rows, purpose) === undefined);
  if (missing.length > 0) {
    const generated = await Promise.all(
      missing.map((purpose) => generateSigningKey(purpose, masterKey, masterKeyId, clock)),
    );
    await store.write((tx) => tx.db.insert(tx.tables.signingKeys).values(generated).onConflictDoNothing());
    rows = await signingKeyRows(store.read);
  }
  const current = new Map<KeyPurpose, SigningKey>();
  for (const purpose of PURPOSES) {
    const row = inUse(rows, purpose);
    if (row === undefined) throw new Error("a signing key that was just stored is not there");
    current.set(purpose, await openSigningKey(row, masterKey));
  }
  return {
    signingKey(purpose: KeyPurpose): SigningKey {
      const key = current.get(purpose);
      if (key === undefined) throw new Error(`no signing key for ${purpose}`);
      return key;
    },
    /** The keys that verify what `purpose` signs today. */
    verificationKeys: (purpose: KeyPurpose) =>
      jwks(rows.filter((row) => row.purpose === purpose && row.retired_at === null)),
    /** Every public key, those of retired signing keys too: what they signed can be checked for ever. */
    publicJwks: () => jwks(rows),
  };
}

function signingKeyRows(read: Reader): Promise<SigningKeyRow[]> {
  const { signingKeys } = read.tables;
  return read.db.select().from(signingKeys).orderBy(signingKeys.created_at, signingKeys.kid);
}

/** The schema lets one key of each purpose be in use. */
function inUse(rows: readonly SigningKeyRow[], purpose: KeyPurpose): SigningKeyRow | undefined {
  return rows.find((row) => row.purpose === purpose && row.retired_at === null);
}

function jwks(rows: readonly SigningKeyRow[]): { readonly keys: JWK[] } {
  return { keys: rows.map((row) => JSON.parse(row.public_jwk)) };
}

async function generateSigningKey(
  purpose: KeyPurpose,
  masterKey: Uint8Array,
  masterKeyId: string,
  clock: Clock,
): Promise<SigningKeyRow> {
  const pair = await generateKeyPair(SIGNING_ALGORITHM, { extractable: true });
  const publicJwk = await exportJWK(pair.publicKey);
  const kid = await calculateJwkThumbprint(publicJwk);
  const privateJwk = Buffer.from(JSON.stringify(await exportJWK(pair.privateKey)));
  return {
    kid,
    purpose,
    public_jwk: JSON.stringify({ ...publicJwk, kid, alg: SIGNING_ALGORITHM, use: "sig" }),
    wrapped_private_key: wrap(masterKey, privateJwk, signingIdentity(purpose, kid)),
    master_key_id: masterKeyId,
    created_at: clock.now(),
    retired_at: null,
  };
}

async function openSigningKey(row: SigningKeyRow, masterKey: Uint8Array): Promise<SigningKey> {
  const jwk = unwrap(masterKey, row.wrapped_private_key, signingIdentity(row.purpose, row.kid));
  const privateKey = await importJWK(JSON.parse(jwk.toString()), SIGNING_ALGORITHM);
  if (privateKey instanceof Uint8Array) throw new Error("a signing key is not an Ed25519 key");
  return { kid: row.kid, privateKey };
}

/** Opens what is sealed, and makes no key: for a look at a deployment that changes nothing. */
export function openSealed(read: Reader, masterKey: Uint8Array): Pick<Keyring, "openSecret"> {
  return {
    async openSecret(tenant, identity, sealed) {
      const [row] = await tenantKeyQuery(read).execute({ tenant });
      if (row === undefined) throw new Error("the tenant has no key");
      return open(unwrap(masterKey, row.wrapped_key, tenantIdentity(tenant)), sealed, identity);
    },
  };
}

/** The names of those that another master key wraps, or that were altered. */
export function keysThatDoNotOpen(masterKey: Uint8Array, { tenantKeys, signingKeys }: WrappedKeys): string[] {
  const wrapped = [
    ...tenantKeys.map(({ tenant, wrapped_key }) => ({ identity: tenantIdentity(tenant), key: wrapped_key })),
    ...signingKeys.map(({ purpose, kid, wrapped_private_key }) => ({
      identity: signingIdentity(purpose, kid),
      key: wrapped_private_key,
    })),
  ];
  const opens = ({ identity, key }: { readonly identity: string; readonly key: Uint8Array }) => {
    try {
      unwrap(masterKey, key, identity);
      return true;
    } catch {
      return false;
    }
  };
  return wrapped.filter((one) => !opens(one)).map(({ identity }) => identity);
}

function signingIdentity(purpose: string, kid: string): string {
  return `signing:${purpose}:${kid}`;
}
