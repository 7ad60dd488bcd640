// From a credential's ID to its secret, and to the header that carries it. The record is read for every call, so a rotation
// or deletion is in force at once on every replica. Only what a secrets store answered is cached, for a minute at most. No
// message here repeats any part of a secret.
import { randomBytes } from "node:crypto";
import { CryptoHasher } from "bun";
import type { AuthType } from "../../../db/schema.ts";
import { Fault } from "../../core/fault.ts";
import { createBatcher } from "../../kernel/batch.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import type { Keyring } from "../../keys/keyring.ts";
import type { Reader } from "../../storage/store.ts";
import type { CredentialHeader } from "../upstream/headers.ts";
import {
  CredentialFailure,
  type FetchJson,
  isPlainSegment,
  parseVaultRef,
  readFromDirectory,
  readFromVault,
  type VaultSettings,
} from "./secrets-stores.ts";
import { findSecret, mayGoTo, type StoredSecret, secretIdentity } from "./service.ts";

export interface ResolverDeps {
  readonly store: { readonly read: Reader };
  readonly keyring: Pick<Keyring, "openSecret">;
  readonly secretsDir: string | null;
  readonly vault: VaultSettings | null;
  readonly fetchJson: FetchJson;
  readonly now?: () => number;
}

export function createCredentialResolver(deps: ResolverDeps) {
  const open = secretOpener(deps);
  /**
   * The header of a credential, null when nothing is sent, and a version that changes when the secret changes.
   * @param url of the request that will carry the secret: it must go to this host only
   * @throws CredentialFailure when the secret can't be resolved, and what the store throws when it can't be read
   */
  return async (tenant: string, credentialId: string, url: string) => {
    const stored = await requireSecret(deps, tenant, credentialId, url);
    const { auth_type } = stored;
    if (auth_type === "none") return { header: null, version: String(stored.version) };
    const secret = await open(tenant, credentialId, stored);
    return { header: credentialHeader(auth_type, secret), version: `${stored.version}-${fingerprint(secret)}` };
  };
}

export function createSecretReader(deps: ResolverDeps) {
  const open = secretOpener(deps);
  /** The secret itself, for other uses than a header. @throws what the function of `createCredentialResolver` throws */
  return async (tenant: string, credentialId: string, url: string) => {
    const stored = await requireSecret(deps, tenant, credentialId, url);
    const { auth_type } = stored;
    const secret = await open(tenant, credentialId, stored);
    return {
      secret,
      /** The header of its `auth_type`; null for `none`. @throws CredentialFailure when no header can carry it */
      header: () => (auth_type === "none" ? null : credentialHeader(auth_type, secret)),
    };
  };
}

/** The only way to a stored secret. It needs the URL that the secret will be sent to. */
async function requireSecret(deps: ResolverDeps, tenant: string, id: string, url: string): Promise<StoredSecret> {
  const stored = await findSecret(deps.store.read, tenant, id);
  if (stored === null) throw new CredentialFailure("no such credential");
  if (!mayGoTo(stored, url)) throw new CredentialFailure("the credential is not for this host");
  return stored;
}

/** Visible ASCII, with blanks only inside: it arrives unchanged and cannot end the header. */
const HEADER_SAFE = /^[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?$/;

/** The header that carries the secret. @throws CredentialFailure when no header can */
export function credentialHeader(authType: Exclude<AuthType, "none">, secret: string): CredentialHeader {
  if (!HEADER_SAFE.test(secret)) {
    throw new CredentialFailure("the secret can't be a header: it is empty or not plain visible ASCII");
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
      throw new CredentialFailure("the sealed secret does not open", { cause });
    }
  };
}

/** Known to this process alone, so that a fingerprint reveals nothing about its secret. */
const fingerprintKey = randomBytes(32);

/** A secrets store may change a secret without a rotation here. Sessions of the old secret must not be used then. */
function fingerprint(secret: string): string {
  return new CryptoHasher("sha256", fingerprintKey).update(secret).digest("hex").slice(0, 16);
}

const ENTRY_BYTES = 256;

interface SecretOf {
  readonly key: string;
  readonly tenant: string;
  readonly vaultRef: string;
}

interface Fetched {
  readonly outcome: string | CredentialFailure;
  readonly until: number;
}

/** Reads from the secrets store: one shared request per secret, and the answer is cached. */
function fetchedSecrets({ secretsDir, vault, fetchJson, now = () => performance.now() }: ResolverDeps) {
  const cache = tenantCache<string, Fetched>(MAX.secretBytes);

  async function read(tenant: string, vaultRef: string): Promise<string> {
    const parsed = parseVaultRef(vaultRef);
    if (!parsed.ok || !isPlainSegment(tenant)) {
      throw new CredentialFailure("the tenant's name or the reference is no safe path");
    }
    const fromFile = secretsDir === null ? null : await readFromDirectory(secretsDir, tenant, parsed.ref);
    if (fromFile !== null) return fromFile;
    const secret = vault === null ? null : await readFromVault(vault, fetchJson, tenant, parsed.ref);
    if (secret === null) throw new CredentialFailure("no secrets store holds the secret");
    return secret;
  }

  const kept = (key: string): Fetched["outcome"] | undefined => {
    const entry = cache.get(key);
    return entry !== undefined && now() < entry.until ? entry.outcome : undefined;
  };

  async function fetchAndKeep({ key, tenant, vaultRef }: SecretOf): Promise<Fetched["outcome"]> {
    const asked = now();
    const outcome = await read(tenant, vaultRef).catch((error: unknown) => {
      if (error instanceof CredentialFailure) return error;
      throw error;
    });
    const isSecret = typeof outcome === "string";
    const weight = ENTRY_BYTES + (isSecret ? Buffer.byteLength(outcome) : 0);
    // A failure is cached only for a moment, so that a store in trouble is not asked for every call.
    const until = isSecret ? asked + 60_000 : now() + 1_000;
    cache.set(tenant, key, { outcome, until }, weight);
    return outcome;
  }

  const questions = createBatcher(async (secret: SecretOf) => {
    const outcome = kept(secret.key) ?? (await fetchAndKeep(secret));
    return () => outcome;
  });

  return async (secret: SecretOf): Promise<string> => {
    const outcome = kept(secret.key) ?? (await questions.join(secret.key, secret));
    if (typeof outcome === "string") return outcome;
    throw outcome;
  };
}
