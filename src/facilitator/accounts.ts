// The accounts that may settle: a name, the fingerprint of a client certificate, and limits of its own. They are
// read from the database for every request, so that what another process changes there is in force at once.
import { X509Certificate } from "node:crypto";
import { and, asc, eq } from "drizzle-orm";
import type { Tables } from "../../db/schema.ts";
import type { Clock } from "../core/clock.ts";
import { Fault, invalidField } from "../core/fault.ts";
import { NAME_CHARACTERS_MAX } from "../core/limits.ts";
import { checkText } from "../core/text.ts";
import { bind, prepared, type Reader, type Store, type Tx, UniqueViolation } from "../storage/store.ts";
import type { AccountLimits } from "./guardrails.ts";

export interface Account extends AccountLimits {
  readonly name: string;
}

export type AccountRow = Tables["facilitatorAccounts"]["$inferSelect"];

export interface NewAccount {
  readonly name: string;
  /** PEM text; of several certificates the first is the client's, the others lead from it to a root. */
  readonly certificate: string;
  /** Smallest units in decimal digits; null for the deployment's default. */
  readonly maxPerTransaction: string | null;
  readonly dailyCeiling: string | null;
}

const CERTIFICATE = /-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/;
/** Everybody else would see the difference between two names that look the same nowhere. */
const INVISIBLE = /[\p{Cf}\p{Zl}\p{Zp}]/u;
const UINT256_MAX = 2n ** 256n - 1n;
/** Of the largest of 256 bits. */
const DIGITS_MAX = 78;

/**
 * SHA-256 of the first certificate in a PEM text, lower-case hex.
 *
 * @throws Fault `invalid_request`
 */
export function fingerprintOf(pem: string): string {
  const found = CERTIFICATE.exec(pem);
  if (found === null) throw invalidField("certificate", "must hold a certificate in PEM");
  try {
    return new X509Certificate(found[0]).fingerprint256.replaceAll(":", "").toLowerCase();
  } catch {
    // The parser's own words may show what it could not read.
    throw invalidField("certificate", "must hold a certificate in PEM that can be read");
  }
}

function accountName(given: string): string {
  const name = given.trim();
  checkText("name", name, { min: 1, max: NAME_CHARACTERS_MAX });
  if (INVISIBLE.test(name)) throw invalidField("name", "must not contain invisible characters");
  return name;
}

function amount(field: string, given: string | null): string | null {
  if (given === null) return null;
  const digits = /^0*([0-9]+)$/.exec(given)?.[1];
  if (digits === undefined || digits.length > DIGITS_MAX || BigInt(digits) > UINT256_MAX) {
    throw invalidField(field, "must be a whole number of at most 256 bits, in decimal digits");
  }
  return digits;
}

/** @throws Fault `invalid_request`; `conflict` when the name or the certificate is another account's */
export async function addAccount(store: Store, clock: Clock, account: NewAccount): Promise<AccountRow> {
  const now = clock.now();
  const row: AccountRow = {
    name: accountName(account.name),
    fingerprint: fingerprintOf(account.certificate),
    enabled: true,
    max_per_transaction: amount("max-per-transaction", account.maxPerTransaction),
    daily_ceiling: amount("daily-ceiling", account.dailyCeiling),
    created_at: now,
    updated_at: now,
  };
  try {
    return await store.write(async (tx) => {
      await refuseDouble(tx, row);
      await tx.db.insert(tx.tables.facilitatorAccounts).values(row);
      return row;
    });
  } catch (error) {
    // Only another process that adds at this very moment gets past the look before.
    if (error instanceof UniqueViolation) throw new Fault("conflict", "the account exists already");
    throw error;
  }
}

async function refuseDouble({ db, tables: { facilitatorAccounts: t } }: Tx, row: AccountRow): Promise<void> {
  const [named] = await db.select({ name: t.name }).from(t).where(eq(t.name, row.name));
  if (named !== undefined) throw new Fault("conflict", `an account has the name ${row.name} already`);
  const [same] = await db.select({ name: t.name }).from(t).where(eq(t.fingerprint, row.fingerprint));
  if (same !== undefined)
    throw new Fault("conflict", `the certificate belongs to the account ${same.name} already`);
}

/** By name. */
export function listAccounts({ db, tables: { facilitatorAccounts: t } }: Reader): Promise<AccountRow[]> {
  return db.select().from(t).orderBy(asc(t.name)).execute();
}

/** In force with the next request. @throws Fault `not_found` */
export async function setEnabled(store: Store, clock: Clock, name: string, enabled: boolean): Promise<void> {
  const changed = await store.write(({ db, tables: { facilitatorAccounts: t } }) =>
    db
      .update(t)
      .set({ enabled, updated_at: clock.now() })
      .where(eq(t.name, name.trim()))
      .returning({ name: t.name }),
  );
  if (changed.length === 0) throw noSuchAccount();
}

/** Its payments stay, and what of its ceiling is taken too, should the name come back. @throws Fault `not_found` */
export async function removeAccount(store: Store, name: string): Promise<void> {
  const removed = await store.write(({ db, tables: { facilitatorAccounts: t } }) =>
    db.delete(t).where(eq(t.name, name.trim())).returning({ name: t.name }),
  );
  if (removed.length === 0) throw noSuchAccount();
}

const noSuchAccount = () => new Fault("not_found", "no such account");

const byFingerprint = prepared(({ db, tables: { facilitatorAccounts: t } }: Reader) =>
  db
    .select({ name: t.name, max_per_transaction: t.max_per_transaction, daily_ceiling: t.daily_ceiling })
    .from(t)
    .where(and(eq(t.fingerprint, bind(t.fingerprint, "fingerprint")), eq(t.enabled, true))),
);

/** The account of a certificate; null when there is none that may settle. */
export async function accountOf(reader: Reader, fingerprint: string): Promise<Account | null> {
  const [row] = await byFingerprint(reader).execute({ fingerprint });
  if (row === undefined) return null;
  return {
    name: row.name,
    maxPerTransaction: row.max_per_transaction === null ? null : BigInt(row.max_per_transaction),
    dailyCeiling: row.daily_ceiling === null ? null : BigInt(row.daily_ceiling),
  };
}
