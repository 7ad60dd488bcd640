// Resolves a credential's ID to its secret, and to the header that carries the secret. The row is read for every call, so a
// rotation or deletion takes effect at once on every replica. Only what a secrets store returned is cached, for a minute at
// most. No error message contains any part of a secret.
import { randomBytes } from "node:crypto";
import { CryptoHasher } from "bun";
import type { AuthType } from "../../../db/schema.ts";
import { Fault } from "../../core/fault.ts";
import { createBatcher } from "../../kernel/batch.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import type { Keyring } from "../../keys/keyring.ts";
import type { Reader } from "../../storage/store.ts";
import { CredentialFailure } from "../upstream/failure.ts";
import type { CredentialHeader } from "../upstream/headers.ts";
import type { FetchJson, VaultSettings } from "./secrets-stores.ts";
import { isPlainSegment, parseVaultRef, readFromDirectory, readFromVault } from "./secrets-stores.ts";
import { findSecret, mayGoTo, type StoredSecret, secretIdentity } from "./service.ts";

export interface ResolverDeps {
  readonly store: { readonly read: Reader };
  readonly keyring: Pick<Keyring, "openSecret">;
  readonly secretsDir: string | null;
  readonly vault: VaultSettings | null;
  readonly fetchJson: FetchJson;
  readonly now?: () => number;
}

export function createSecrets(deps: ResolverDeps) {
  const open = secretOpener(deps);
  return {
    /**
     * The header that carries the secret (null when nothing is sent), and a version that changes with the secret.
     * @param url the request's URL; the secret must be sent to this host only
     * @throws CredentialFailure when the secret can't be resolved; what the store throws when it can't be read
     */
    async resolve(tenant: string, credentialId: string, url: string) {
      const stored = await requireSecret(deps, tenant, credentialId, url);
      const { auth_type, version } = stored;
      if (auth_type === "none") return { header: null, version: String(version) };
      const secret = await open(tenant, credentialId, stored);
      return { header: credentialHeader(auth_type, secret), version: `${version}-${fingerprint(secret)}` };
    },
    /** Returns the secret itself, for uses other than a header. @throws as `resolve` */
    async read(tenant: string, credentialId: string, url: string) {
      const stored = await requireSecret(deps, tenant, credentialId, url);
      const { auth_type } = stored;
      const secret = await open(tenant, credentialId, stored);
      /** Null for the type `none`. @throws CredentialFailure when no header can carry the secret */
      const header = () => (auth_type === "none" ? null : credentialHeader(auth_type, secret));
      return { secret, header };
    },
  };
}

/** Reads the stored secret. Every use of a secret passes here, so the allowed hosts are always checked. */
async function requireSecret(deps: ResolverDeps, tenant: string, id: string, url: string): Promise<StoredSecret> {
  const stored = await findSecret(deps.store.read, tenant, id);
  if (stored === null) throw new CredentialFailure("no such credential");
  if (!mayGoTo(stored, url)) {
    throw new CredentialFailure("the credential's allowed_hosts omit the host", { isOtherHost: true });
  }
  return stored;
}

/** Visible ASCII, with blanks only inside: such a value arrives unchanged and can't end the header. */
const HEADER_SAFE = /^[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?$/;

/** The header that carries the secret. @throws CredentialFailure when no header can */
export function credentialHeader(authType: Exclude<AuthType, "none">, secret: string): CredentialHeader {
  if (!HEADER_SAFE.test(secret)) {
    throw new CredentialFailure("the secret can't be sent as a header: it is empty or not visible ASCII");
  }
  return authType === "bearer"
    ? { name: "authorization", value: `Bearer ${secret}` }
    : { name: "x-api-key", value: secret };
}

function secretOpener(deps: ResolverDeps) {
  const fetched = fetchedSecrets(deps);
  return async (
    tenant: string,
    id: string,
    { sealed, key_number, vault_ref, version }: StoredSecret,
  ): Promise<string> => {
    if (vault_ref !== null) return fetched({ key: `${tenant}/${id}/${version}`, tenant, vaultRef: vault_ref });
    if (sealed === null) throw new CredentialFailure("the credential holds no secret");
    try {
      const secret = { sealed, key_number };
      return (await deps.keyring.openSecret(tenant, secretIdentity(tenant, id, version), secret)).toString();
    } catch (cause) {
      if (cause instanceof Fault) throw cause;
      throw new CredentialFailure("the stored secret can't be decrypted", { cause });
    }
  };
}

/** A key of this process alone, so that a fingerprint reveals nothing about its secret. */
const fingerprintKey = randomBytes(32);

/** Shows when a secrets store has changed a secret without a rotation here: MCP sessions of the old secret must then end. */
const fingerprint = (secret: string): string =>
  new CryptoHasher("sha256", fingerprintKey).update(secret).digest("hex").slice(0, 16);

/** The approximate size of a cache entry without its secret. */
const ENTRY_BYTES = 256;

interface WantedSecret {
  readonly key: string;
  readonly tenant: string;
  readonly vaultRef: string;
}

interface FetchedSecret {
  readonly outcome: string | CredentialFailure;
  readonly until: number;
}

/** Reads secrets from the secrets stores. Concurrent reads of a secret share one request, and its outcome is cached. */
function fetchedSecrets({ secretsDir, vault, fetchJson, now = () => performance.now() }: ResolverDeps) {
  const cache = tenantCache<string, FetchedSecret>(MAX.secretBytes);

  async function read(tenant: string, vaultRef: string): Promise<string> {
    const parsed = parseVaultRef(vaultRef);
    if (!parsed.ok || !isPlainSegment(tenant)) {
      throw new CredentialFailure("the tenant's name or the reference is not a safe path");
    }
    const fromFile = secretsDir === null ? null : await readFromDirectory(secretsDir, tenant, parsed.ref);
    if (fromFile !== null) return fromFile;
    const secret = vault === null ? null : await readFromVault(vault, fetchJson, tenant, parsed.ref);
    if (secret === null) throw new CredentialFailure("no secrets store holds the secret");
    return secret;
  }

  const cached = (key: string): FetchedSecret["outcome"] | undefined => {
    const entry = cache.get(key);
    return entry !== undefined && now() < entry.until ? entry.outcome : undefined;
  };

  async function fetchAndCache({ key, tenant, vaultRef }: WantedSecret): Promise<FetchedSecret["outcome"]> {
    const askedAt = now();
    const outcome = await read(tenant, vaultRef).catch((error: unknown) => {
      if (error instanceof CredentialFailure) return error;
      throw error;
    });
    const isSecret = typeof outcome === "string";
    const weight = ENTRY_BYTES + (isSecret ? Buffer.byteLength(outcome) : 0);
    // A failure is cached for a second, so that a failing secrets store is not asked for every call.
    const until = isSecret ? askedAt + 60_000 : now() + 1_000;
    cache.set(tenant, key, { outcome, until }, weight);
    return outcome;
  }

  const fetches = createBatcher(async (secret: WantedSecret) => {
    const outcome = cached(secret.key) ?? (await fetchAndCache(secret));
    return () => outcome;
  });

  return async (secret: WantedSecret): Promise<string> => {
    const outcome = cached(secret.key) ?? (await fetches.join(secret.key, secret));
    if (typeof outcome === "string") return outcome;
    throw outcome;
  };
}
