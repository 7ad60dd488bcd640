// Creates, reads, rotates and deletes the credentials of a tenant. A managed secret is sealed (encrypted) before it reaches the
// store, for one version of one credential; only `findSecret` reads the sealed bytes.
import { and, desc, eq, getTableColumns, lt } from "drizzle-orm";
import type { CredentialSource } from "../../../db/schema.ts";
import type { Caller } from "../../core/call.ts";
import { Fault, invalidField, noSuch, overQuota } from "../../core/fault.ts";
import { isAllowedUrl, parseAllowedHosts } from "../../core/host.ts";
import { isId, newId } from "../../core/id.ts";
import { checkText } from "../../core/text.ts";
import type { Clock } from "../../core/time.ts";
import { MAX } from "../../kernel/limits.ts";
import { inStoreTurns } from "../../kernel/turns.ts";
import type { Keyring } from "../../keys/keyring.ts";
import { GIVEN_KEY, hasKey, preparedRow, type Reader, type Store, type Tx, withFreeName } from "../../storage/store.ts";
import { addToTotals, totalOf } from "../../storage/totals.ts";
import { type CredentialCreate, type CredentialRotate, type CredentialRow, decodeHosts } from "./model.ts";
import { parseVaultRef } from "./secrets-stores.ts";

export interface CredentialDeps {
  readonly store: Store;
  readonly clock: Clock;
  readonly keyring: Pick<Keyring, "sealSecret">;
  /** What may use a credential. One in use can't be deleted, and its `allowed_hosts` must hold the hosts of its uses. */
  readonly uses: readonly CredentialUses[];
  readonly credentialsMax: number;
}

interface CredentialUse {
  readonly id: string;
  /** Where the secret goes; null for nowhere yet. */
  readonly url: string | null;
  /** What the use is called in an error message to the tenant. */
  readonly name: string;
}

/** At most `limit` uses of the tenant's credential, with IDs above `after`, in ascending order. */
export type CredentialUses = (
  reader: Reader,
  of: { readonly tenant: string; readonly credentialId: string },
  after: string,
  limit: number,
) => Promise<readonly CredentialUse[]>;

/** About 4 ms of SQLite when all rows have the maximum size. */
const USES_AT_ONCE = 32;

/** A use of the credential at another host; null when there is none. Uses are read in steps, since there may be thousands. */
async function useElsewhere(
  reader: Reader,
  uses: CredentialUses,
  of: Parameters<CredentialUses>[1],
  hosts: readonly string[],
): Promise<CredentialUse | null> {
  const pageAfter = (after: string) => uses(reader, of, after, USES_AT_ONCE);
  for (let after = ""; ; ) {
    const page = await inStoreTurns(of.tenant, () => pageAfter(after));
    const elsewhere = page.find(({ url }) => url !== null && !isAllowedUrl(url, hosts));
    if (elsewhere !== undefined) return elsewhere;
    const last = page.at(-1);
    if (last === undefined || page.length < USES_AT_ONCE) return null;
    after = last.id;
  }
}

const TOTAL = "credentials";

/** The identity that a secret is sealed for: one version of one credential of one tenant. */
export const secretIdentity = (tenant: string, id: string, version: number) => `credential:${id}:${version}:${tenant}`;

/** The message for a field that would send a credential to a host which is not allowed. */
export const NOT_ALLOWED = "the credential's allowed_hosts do not include the host of this agent or facilitator";

async function requireRow(reader: Reader, tenant: string, id: string): Promise<CredentialRow> {
  const row = await findRow(reader, tenant, id);
  if (row === null) throw noSuch("cred", id);
  return row;
}

/** `…` and the last four characters; for a secret of at most eight characters, only asterisks. */
export function maskedHint(plaintext: string): string {
  const characters = [...plaintext];
  if (characters.length <= 8) return "*".repeat(characters.length);
  // Postgres stores no U+0000.
  return `…${characters.slice(-4).join("").replaceAll("\0", "*")}`;
}

type Secret =
  | { readonly source: "managed"; readonly plaintext: string }
  | { readonly source: "vault"; readonly vault_ref: string };

/** The secret that the source requires. @throws Fault `invalid_request` */
function checkedSecret(source: CredentialSource, { plaintext, vault_ref }: CredentialRotate): Secret {
  if (source === "vault") return vaultSecret(vault_ref, plaintext);
  if (vault_ref !== undefined) throw invalidField("vault_ref", "not possible when source is managed");
  if (plaintext === undefined) throw invalidField("plaintext", "required when source is managed");
  if (!plaintext.isWellFormed()) throw invalidField("plaintext", "must not contain lone surrogates");
  const bytes = Buffer.byteLength(plaintext);
  if (bytes < 1 || bytes > MAX.plaintextBytes) {
    throw invalidField("plaintext", `must be 1 to ${MAX.plaintextBytes} bytes`);
  }
  return { source: "managed", plaintext };
}

function vaultSecret(vault_ref: string | undefined, other: string | undefined): Secret {
  if (other !== undefined) throw invalidField("plaintext", "not possible when source is vault");
  if (vault_ref === undefined) throw invalidField("vault_ref", "required when source is vault");
  const parsed = parseVaultRef(vault_ref);
  if (!parsed.ok) throw invalidField("vault_ref", parsed.reason);
  return { source: "vault", vault_ref };
}

/** Checks and encodes a list of allowed hosts. @throws Fault `invalid_request` */
function storedHosts(hosts: readonly string[] | null): string | null {
  if (hosts === null) return null;
  const parsed = parseAllowedHosts(hosts);
  if (parsed.ok) return JSON.stringify(parsed.hosts);
  const field = parsed.index === null ? "allowed_hosts" : `allowed_hosts.${parsed.index}`;
  throw invalidField(field, parsed.reason);
}

async function secretColumns({ keyring }: CredentialDeps, tenant: string, id: string, version: number, secret: Secret) {
  if (secret.source === "vault") {
    return { version, vault_ref: secret.vault_ref, masked_hint: null, sealed: null, key_number: 1 };
  }
  const identity = secretIdentity(tenant, id, version);
  return {
    version,
    vault_ref: null,
    masked_hint: maskedHint(secret.plaintext),
    ...(await keyring.sealSecret(tenant, identity, Buffer.from(secret.plaintext))),
  };
}

/**
 * Refuses `allowed_hosts` that leave out the host of a present use. Runs before the write, since there may be many uses. An
 * agent that is changed at the same moment may be missed; its calls then fail, since the hosts are checked for each call too.
 * @throws Fault `conflict`, naming the use
 */
async function refuseOmission({ store, uses }: CredentialDeps, tenant: string, id: string, hosts: readonly string[]) {
  for (const each of uses) {
    const use = await useElsewhere(store.read, each, { tenant, credentialId: id }, hosts);
    if (use !== null) throw new Fault("conflict", `allowed_hosts: must include the host of ${use.name}`);
  }
}

/** Tries to replace the secret; null when another rotation came first. */
async function rotateOnce(deps: CredentialDeps, tenant: string, id: string, body: CredentialRotate) {
  const { store, clock } = deps;
  const row = await requireRow(store.read, tenant, id);
  const secret = checkedSecret(row.source, body);
  // Without `allowed_hosts` the list stays: a rotation must not allow the secret to go to other hosts.
  const allowed_hosts = body.allowed_hosts === undefined ? row.allowed_hosts : storedHosts(body.allowed_hosts);
  if (body.allowed_hosts != null) await refuseOmission(deps, tenant, id, decodeHosts(allowed_hosts) ?? []);
  const columns = await secretColumns(deps, tenant, id, row.version + 1, secret);
  return store.write(async (tx) => {
    const { credentials } = tx.tables;
    const [changed] = await tx.db
      .update(credentials)
      .set({ ...columns, allowed_hosts, updated_at: clock.now() })
      // The secret was sealed for the version after `row.version`.
      .where(and(hasKey(credentials, { tenant, id }), eq(credentials.version, row.version)))
      .returning(metadataOf(tx.tables));
    return changed ?? null;
  });
}

export function createCredentialService(deps: CredentialDeps) {
  const { store, clock, uses, credentialsMax } = deps;

  return {
    async create({ tenant }: Caller, body: CredentialCreate): Promise<CredentialRow> {
      const name = body.name.trim();
      checkText("name", name, { min: 1, max: MAX.nameCharacters });
      const secret = checkedSecret(body.source, body);
      const allowed_hosts = storedHosts(body.allowed_hosts ?? null);
      const refused = overQuota(credentialsMax, "credentials");
      // Only the check inside the write is exact, but a write that fails slows down the others of its group commit.
      if ((await totalOf(store.read, tenant, TOTAL)) >= credentialsMax) throw refused;
      const now = clock.now();
      const id = newId("cred", now);
      const { auth_type, source } = body;
      const { sealed, key_number, ...columns } = await secretColumns(deps, tenant, id, 1, secret);
      const times = { created_at: now, updated_at: now };
      const row = { tenant, id, name, auth_type, source, ...columns, allowed_hosts, ...times };
      await withFreeName("credential", () =>
        store.write(async (tx) => {
          await tx.db.insert(tx.tables.credentials).values({ ...row, sealed, key_number });
          const totals = await addToTotals(tx, tenant, new Map([[TOTAL, 1]]));
          if ((totals.get(TOTAL) ?? 0) > credentialsMax) throw refused;
        }),
      );
      return row;
    },

    get({ tenant }: Caller, id: string): Promise<CredentialRow> {
      return requireRow(store.read, tenant, id);
    },

    list: ({ tenant }: Caller): AsyncIterable<CredentialRow> => readCredentials(store.read, tenant),

    async rotate({ tenant }: Caller, id: string, body: CredentialRotate): Promise<CredentialRow> {
      // Each concurrent rotation may make one attempt fail.
      for (let attempt = 0; attempt < 32; attempt++) {
        const row = await rotateOnce(deps, tenant, id, body);
        if (row !== null) return row;
      }
      throw new Fault("conflict", "the credential is being rotated by other requests; retry");
    },

    async remove({ tenant }: Caller, id: string): Promise<void> {
      if (!isId("cred", id)) throw noSuch("cred", id);
      await store.write(async (tx) => {
        await tx.lock(`credential:${tenant}:${id}`);
        await requireRow(tx, tenant, id);
        for (const each of uses) {
          const [use] = await each(tx, { tenant, credentialId: id }, "", 1);
          if (use !== undefined) throw new Fault("conflict", `the credential is in use by ${use.name}`);
        }
        const { credentials } = tx.tables;
        await tx.db.delete(credentials).where(hasKey(credentials, { tenant, id }));
        await addToTotals(tx, tenant, new Map([[TOTAL, -1]]));
      });
    },
  };
}

/** Few, because a row holds up to 64 KiB of a secret, which SQLite has to skip in order to reach the later columns. */
const ROWS_AT_ONCE = 64;
const LAST_ID = "cred_~";

function metadataOf({ credentials }: Reader["tables"]) {
  const { sealed: _sealed, key_number: _number, ...metadata } = getTableColumns(credentials);
  return metadata;
}

const secretByKey = preparedRow(({ db, tables: { credentials } }) =>
  db
    .select({
      auth_type: credentials.auth_type,
      vault_ref: credentials.vault_ref,
      version: credentials.version,
      sealed: credentials.sealed,
      key_number: credentials.key_number,
      allowed_hosts: credentials.allowed_hosts,
    })
    .from(credentials)
    .where(hasKey(credentials, GIVEN_KEY)),
);

export type StoredSecret = NonNullable<Awaited<ReturnType<typeof secretByKey>>>;

/** The columns needed to resolve a secret; null when the tenant has no credential with this ID. */
export const findSecret = async (reader: Reader, tenant: string, id: string): Promise<StoredSecret | null> =>
  isId("cred", id) ? secretByKey(reader, { tenant, id }) : null;

/** Whether a secret with these `allowed_hosts` may be sent to the URL's host. */
export function mayGoTo({ allowed_hosts }: Pick<CredentialRow, "allowed_hosts">, url: string): boolean {
  const hosts = decodeHosts(allowed_hosts);
  return hosts === null || isAllowedUrl(url, hosts);
}

/** Locks a credential until the write ends, for a record that will name it; null when the tenant has no such credential. */
export async function holdCredential(tx: Tx, tenant: string, id: string): Promise<CredentialRow | null> {
  if (!isId("cred", id)) return null;
  await tx.lock(`credential:${tenant}:${id}`);
  return findRow(tx, tenant, id);
}

async function findRow(reader: Reader, tenant: string, id: string): Promise<CredentialRow | null> {
  if (!isId("cred", id)) return null;
  const { credentials } = reader.tables;
  const [row] = await reader.db
    .select(metadataOf(reader.tables))
    .from(credentials)
    .where(hasKey(credentials, { tenant, id }));
  return row ?? null;
}

/** Reads all credentials of a tenant, newest first, lazily in groups. */
async function* readCredentials(reader: Reader, tenant: string): AsyncGenerator<CredentialRow> {
  const { credentials: t } = reader.tables;
  for (let below = LAST_ID; ; ) {
    const rows = await reader.db
      .select(metadataOf(reader.tables))
      .from(t)
      .where(and(eq(t.tenant, tenant), lt(t.id, below)))
      .orderBy(desc(t.id))
      .limit(ROWS_AT_ONCE);
    yield* rows;
    const last = rows.at(-1);
    if (last === undefined || rows.length < ROWS_AT_ONCE) return;
    below = last.id;
  }
}
