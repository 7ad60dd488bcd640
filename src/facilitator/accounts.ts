// The accounts that may settle. Each has a name, the fingerprints of its client certificates, and limits of its own. An
// account is read from the database for every request, so a change made by another process takes effect at once.
import type { X509Certificate } from "node:crypto";
import { and, asc, count, eq } from "drizzle-orm";
import type { Tables } from "../../db/schema.ts";
import { parseCertificates } from "../core/certificates.ts";
import { Fault, invalidField } from "../core/fault.ts";
import { checkText } from "../core/text.ts";
import type { Clock } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";
import { bind, prepared, type Reader, type Store, type Tx, UniqueViolation } from "../storage/store.ts";
import { parseUint256 } from "../x402/types.ts";
import type { FacilitatorAccount } from "./payments/guardrails.ts";

type AccountRow = Tables["facilitatorAccounts"]["$inferSelect"];

export interface ListedAccount extends AccountRow {
  /** Oldest first. */
  readonly fingerprints: readonly string[];
}

export interface NewAccount {
  readonly name: string;
  /** PEM text. The first certificate is the client's; any others are the chain from it to a root. */
  readonly certificate: string;
  /** The token's smallest units, in decimal digits; null for the deployment's default. */
  readonly maxPerTransaction: string | null;
  readonly dailyCeiling: string | null;
}

/** Two names that differ only in invisible characters would look identical everywhere. */
const INVISIBLE = /[\p{Cf}\p{Zl}\p{Zp}]/u;

/** The SHA-256 of the first certificate in a PEM text, in lower-case hex. @throws Fault `invalid_request` */
export function fingerprintOf(pem: string): string {
  let first: X509Certificate | undefined;
  try {
    [first] = parseCertificates(pem);
  } catch {
    // The parser's own message may quote the text that it could not read, so the message is not passed on.
    throw invalidField("certificate", "must hold a certificate in PEM that can be read");
  }
  if (first === undefined) throw invalidField("certificate", "must hold a certificate in PEM");
  return first.fingerprint256.replaceAll(":", "").toLowerCase();
}

function amount(field: string, given: string | null): string | null {
  if (given === null) return null;
  const value = parseUint256(given);
  if (value === null) throw invalidField(field, "must be a whole number of at most 256 bits, in decimal digits");
  return String(value);
}

/**
 * Changes an account under the account's lock, so that no certificate is added to an account that is being removed.
 * @throws what `work` throws; Fault `conflict` when another process adds the same name or certificate at this moment
 */
async function changeAccount<T>(store: Store, name: string, work: (tx: Tx, exists: boolean) => Promise<T>) {
  try {
    return await store.write(async (tx) => {
      await tx.lock(`account:${name}`);
      const { facilitatorAccounts: t } = tx.tables;
      const [account] = await tx.db.select({ name: t.name }).from(t).where(eq(t.name, name));
      return work(tx, account !== undefined);
    });
  } catch (error) {
    if (error instanceof UniqueViolation) throw new Fault("conflict", "the account or the certificate exists already");
    throw error;
  }
}

/**
 * Adds an account with its first certificate. Returns the account's name and the certificate's fingerprint.
 * @throws Fault `invalid_request`; `conflict` when another account has the name or the certificate
 */
export async function addAccount(store: Store, clock: Clock, account: NewAccount) {
  const now = clock.now();
  const fingerprint = fingerprintOf(account.certificate);
  const name = account.name.trim();
  checkText("name", name, { min: 1, max: MAX.nameCharacters });
  if (INVISIBLE.test(name)) throw invalidField("name", "must not contain invisible characters");
  const row: AccountRow = {
    name,
    enabled: true,
    max_per_transaction: amount("max-per-transaction", account.maxPerTransaction),
    daily_ceiling: amount("daily-ceiling", account.dailyCeiling),
    created_at: now,
    updated_at: now,
  };
  return changeAccount(store, name, async (tx, exists) => {
    if (exists) throw new Fault("conflict", `an account named ${name} exists already`);
    await tx.db.insert(tx.tables.facilitatorAccounts).values(row);
    await insertCertificate(tx, name, fingerprint, now);
    return { name, fingerprint };
  });
}

/**
 * Adds a certificate to the account, valid from the next request on. Returns the certificate's fingerprint.
 * @throws Fault `invalid_request`; `not_found`; `conflict` when an account has the certificate already, or this one has too many
 */
export async function addCertificate(store: Store, clock: Clock, given: string, certificate: string): Promise<string> {
  const name = given.trim();
  const fingerprint = fingerprintOf(certificate);
  return changeAccount(store, name, async (tx, exists) => {
    if (!exists) throw noSuchAccount();
    if ((await certificatesOf(tx, name)) >= MAX.certificates) {
      throw new Fault("conflict", `an account has at most ${MAX.certificates} certificates: remove one of ${name}`);
    }
    await insertCertificate(tx, name, fingerprint, clock.now());
    return fingerprint;
  });
}

/**
 * Removes a certificate from the account, from the next request on, on open connections too. The last certificate may be
 * removed as well, since a leaked key must go even if there is no new one; nobody can settle for the account then.
 * @returns the certificate's fingerprint, and how many certificates the account has left
 * @throws Fault `invalid_request`; `not_found` for the account; `conflict` when the account has no such certificate
 */
export async function removeCertificate(store: Store, given: string, certificate: string) {
  const name = given.trim();
  const fingerprint = fingerprintOf(certificate);
  return changeAccount(store, name, async (tx, exists) => {
    if (!exists) throw noSuchAccount();
    const { facilitatorCertificates: t } = tx.tables;
    const isThis = and(eq(t.fingerprint, fingerprint), eq(t.account, name));
    const removed = await tx.db.delete(t).where(isThis).returning({ fingerprint: t.fingerprint });
    if (removed.length === 0) {
      throw new Fault("conflict", `${name} has no such certificate: its fingerprint is ${fingerprint}`);
    }
    return { fingerprint, left: await certificatesOf(tx, name) };
  });
}

async function certificatesOf({ db, tables: { facilitatorCertificates: t } }: Tx, name: string) {
  const [row] = await db.select({ count: count() }).from(t).where(eq(t.account, name));
  return row?.count ?? 0;
}

/** A certificate belongs to one account at most, since it identifies the account that a request is from. */
async function insertCertificate({ db, tables }: Tx, account: string, fingerprint: string, now: number) {
  const { facilitatorCertificates: t } = tables;
  const [other] = await db.select({ account: t.account }).from(t).where(eq(t.fingerprint, fingerprint));
  if (other !== undefined)
    throw new Fault("conflict", `the certificate belongs to the account ${other.account} already`);
  await db.insert(t).values({ fingerprint, account, created_at: now });
}

export async function listAccounts({ db, tables }: Reader): Promise<ListedAccount[]> {
  const { facilitatorAccounts: t, facilitatorCertificates: c } = tables;
  const accounts = await db.select().from(t).orderBy(asc(t.name));
  const certificates = await db.select().from(c).orderBy(asc(c.created_at), asc(c.fingerprint));
  return accounts.map((account) => ({
    ...account,
    fingerprints: certificates.filter((each) => each.account === account.name).map(({ fingerprint }) => fingerprint),
  }));
}

/** Enables or disables the account, from the next request on. @throws Fault `not_found` */
export async function setEnabled(store: Store, clock: Clock, name: string, enabled: boolean): Promise<void> {
  const changed = await store.write(({ db, tables: { facilitatorAccounts: t } }) =>
    db.update(t).set({ enabled, updated_at: clock.now() }).where(eq(t.name, name.trim())).returning({ name: t.name }),
  );
  if (changed.length === 0) throw noSuchAccount();
}

/** Removes the account and its certificates, but not its payments and used limits: its name may return. @throws Fault `not_found` */
export async function removeAccount(store: Store, given: string): Promise<void> {
  const name = given.trim();
  await changeAccount(store, name, async (tx, exists) => {
    if (!exists) throw noSuchAccount();
    const { facilitatorAccounts: t, facilitatorCertificates: c } = tx.tables;
    await tx.db.delete(c).where(eq(c.account, name));
    await tx.db.delete(t).where(eq(t.name, name));
  });
}

const noSuchAccount = () => new Fault("not_found", "no such account");

const byFingerprint = prepared(({ db, tables }: Reader) => {
  const { facilitatorAccounts: t, facilitatorCertificates: c } = tables;
  return db
    .select({ name: t.name, max_per_transaction: t.max_per_transaction, daily_ceiling: t.daily_ceiling })
    .from(c)
    .innerJoin(t, eq(t.name, c.account))
    .where(and(eq(c.fingerprint, bind(c.fingerprint, "fingerprint")), eq(t.enabled, true)));
});

/** The account that a certificate belongs to; null when there is none, or when the account is disabled. */
export async function accountOf(reader: Reader, fingerprint: string): Promise<FacilitatorAccount | null> {
  const [row] = await byFingerprint(reader).execute({ fingerprint });
  if (row === undefined) return null;
  return {
    name: row.name,
    maxPerTransaction: row.max_per_transaction === null ? null : BigInt(row.max_per_transaction),
    dailyCeiling: row.daily_ceiling === null ? null : BigInt(row.daily_ceiling),
  };
}
