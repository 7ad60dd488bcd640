// The rows of credentials: their metadata without the sealed secret, and the columns for resolving a secret.
import { and, desc, eq, getTableColumns, lt } from "drizzle-orm";
import { isAllowedUrl } from "../../core/allowed-hosts.ts";
import { isId } from "../../core/id.ts";
import { bind, prepared, type Reader, type Tx } from "../../storage/store.ts";
import { type CredentialRow, decodeHosts } from "./model.ts";

/** A row holds up to 64 KiB of a secret, which SQLite must read past to reach the later columns. */
const ROWS_AT_ONCE = 64;
/** Above every ID of a credential. */
const LAST_ID = "cred_~";

/** Everything but the sealed secret and what opens it. */
export function metadataOf({ credentials }: Reader["tables"]) {
  const { sealed: _sealed, key_number: _number, ...metadata } = getTableColumns(credentials);
  return metadata;
}

const secretQuery = prepared(({ db, tables: { credentials } }: Reader) =>
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
    .where(
      and(eq(credentials.tenant, bind(credentials.tenant, "tenant")), eq(credentials.id, bind(credentials.id, "id"))),
    ),
);

export type StoredSecret = Awaited<ReturnType<ReturnType<typeof secretQuery>["execute"]>>[number];

/** What resolving a credential starts from; null when the tenant has none of this ID. */
export async function findSecret(reader: Reader, tenant: string, id: string): Promise<StoredSecret | null> {
  if (!isId("cred", id)) return null;
  const [row] = await secretQuery(reader).execute({ tenant, id });
  return row ?? null;
}

/** Whether the secret of a credential with these `allowed_hosts` may go to the host of the URL. */
export function mayGoTo({ allowed_hosts }: Pick<CredentialRow, "allowed_hosts">, url: string): boolean {
  const hosts = decodeHosts(allowed_hosts);
  return hosts === null || isAllowedUrl(url, hosts);
}

/**
 * The tenant's credential, locked until the write ends. Call it before writing a record that names the credential. Null
 * when there is none.
 */
export async function holdCredential(tx: Tx, tenant: string, id: string): Promise<CredentialRow | null> {
  if (!isId("cred", id)) return null;
  await tx.lock(`credential:${tenant}:${id}`);
  return findRow(tx, tenant, id);
}

export async function findRow(reader: Reader, tenant: string, id: string): Promise<CredentialRow | null> {
  if (!isId("cred", id)) return null;
  const { credentials } = reader.tables;
  const [row] = await reader.db
    .select(metadataOf(reader.tables))
    .from(credentials)
    .where(and(eq(credentials.tenant, tenant), eq(credentials.id, id)));
  return row ?? null;
}

/** All of a tenant, newest first, read lazily in groups, since each row may hold a large secret. */
export async function* readCredentials(reader: Reader, tenant: string): AsyncGenerator<CredentialRow> {
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
