// The keys that sign the receipts and the tokens of the local issuer, and the revocations of tokens. A rotation retires keys:
// their signatures can be verified for ever, and their tokens are accepted until the last of them has expired.
import { and, asc, count, eq, gt, lt, ne, sql } from "drizzle-orm";
import { type CryptoKey, calculateJwkThumbprint, exportJWK, generateKeyPair, importJWK, type JWK } from "jose";
import type { KeyPurpose } from "../../db/schema.ts";
import { StartupProblem } from "../core/startup.ts";
import { type Clock, DAY_MS } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";
import type { Reader, Store, Tx } from "../storage/store.ts";
import { unwrap, wrap } from "./envelope.ts";
import type { MasterKeys } from "./master-keys.ts";
import { changeState, lockState, readState, requireMasterKey } from "./state.ts";

/** All signing keys are Ed25519 (RFC 8037). */
export const SIGNING_ALGORITHM = "EdDSA";
/** The longest life of a token of the local issuer. */
export const TOKEN_DAYS_MAX = 365;
const PURPOSES: readonly KeyPurpose[] = ["issuer", "receipts"];

export interface SigningKey {
  readonly kid: string;
  readonly privateKey: CryptoKey;
}

type SigningKeyRow = Reader["tables"]["signingKeys"]["$inferSelect"];

export const signingKeyIdentity = (purpose: string, kid: string): string => `signing:${purpose}:${kid}`;

/** A key pair that is not wrapped yet. */
export type NewSigningKey = Awaited<ReturnType<typeof newSigningKey>>;

async function newSigningKey(purpose: KeyPurpose) {
  const pair = await generateKeyPair(SIGNING_ALGORITHM, { extractable: true });
  const publicJwk = await exportJWK(pair.publicKey);
  const kid = await calculateJwkThumbprint(publicJwk);
  return {
    purpose,
    kid,
    public_jwk: JSON.stringify({ ...publicJwk, kid, alg: SIGNING_ALGORITHM, use: "sig" }),
    privateJwk: Buffer.from(JSON.stringify(await exportJWK(pair.privateKey))),
  };
}

export const newSigningKeys = (): Promise<NewSigningKey[]> => Promise.all(PURPOSES.map(newSigningKey));

/** Stores new keys, wrapped with this master key. A key whose purpose has a key in use already is ignored. */
export async function storeSigningKeys(
  tx: Tx,
  made: readonly NewSigningKey[],
  masterKeys: MasterKeys,
  master_key_id: string,
  now: number,
): Promise<void> {
  const masterKey = requireMasterKey(masterKeys, master_key_id);
  const rows = made.map(({ privateJwk, ...key }) => ({
    ...key,
    wrapped_private_key: wrap(masterKey, privateJwk, signingKeyIdentity(key.purpose, key.kid)),
    master_key_id,
    created_at: now,
    retired_at: null,
  }));
  await tx.db.insert(tx.tables.signingKeys).values(rows).onConflictDoNothing();
}

const readRows = ({ db, tables: { signingKeys: t } }: Reader): Promise<SigningKeyRow[]> =>
  db.select().from(t).orderBy(t.created_at, t.kid);

/** The key in use for a purpose; the schema allows only one. */
const inUse = (rows: readonly SigningKeyRow[], purpose: KeyPurpose): SigningKeyRow | undefined =>
  rows.find((row) => row.purpose === purpose && row.retired_at === null);

/** Makes the first keys of an empty database. */
export async function makeFirstSigningKeys(store: Store, masterKeys: MasterKeys, clock: Clock): Promise<void> {
  const [{ master_key_id: wrapping }, rows] = [await readState(store.read), await readRows(store.read)];
  if (wrapping !== null && PURPOSES.every((purpose) => inUse(rows, purpose) !== undefined)) return;
  const made = await newSigningKeys();
  await store.write(async (tx) => {
    const state = await lockState(tx);
    const master_key_id = state.master_key_id ?? masterKeys.own;
    if (state.master_key_id === null) await changeState(tx, state, { master_key_id });
    await storeSigningKeys(tx, made, masterKeys, master_key_id, clock.now());
  });
}

/** Replaces the issuer's keys. After about a second no gateway accepts earlier tokens, even those forged with an earlier key. */
export async function replaceIssuerKey(store: Pick<Store, "write" | "clock">, masterKeys: MasterKeys): Promise<void> {
  const made = [await newSigningKey("issuer")];
  await store.write(async (tx) => {
    const state = await lockState(tx);
    if (state.master_key_id === null) throw new Error("a keyring without a master key has no issuer");
    const { signingKeys: t } = tx.tables;
    await tx.db.delete(t).where(eq(t.purpose, "issuer"));
    await storeSigningKeys(tx, made, masterKeys, state.master_key_id, store.clock.now());
    await changeState(tx, state, {});
  });
}

/** @param known the keys of the last load, which are not opened again */
export async function loadSigningKeys(
  read: Reader,
  masterKeys: MasterKeys,
  clock: Clock,
  known: { signingKey(purpose: KeyPurpose): SigningKey } | null,
) {
  const rows = await readRows(read);
  async function currentKey(purpose: KeyPurpose): Promise<SigningKey> {
    const row = inUse(rows, purpose);
    if (row === undefined) throw new Error(`there is no signing key for ${purpose}`);
    const before = known?.signingKey(purpose);
    return before?.kid === row.kid ? before : openSigningKey(row, masterKeys);
  }
  const current = { issuer: await currentKey("issuer"), receipts: await currentKey("receipts") };
  const now = clock.now();
  // One day longer than tokens live, since clocks differ.
  const verifies = ({ retired_at }: SigningKeyRow) =>
    retired_at === null || now < retired_at + (TOKEN_DAYS_MAX + 1) * DAY_MS;
  const issuer = jwks(rows.filter((row) => row.purpose === "issuer" && verifies(row)));
  const all = jwks(rows);
  return {
    signingKey: (purpose: KeyPurpose): SigningKey => current[purpose],
    issuerJwks: () => issuer,
    /** All public keys, even of retired keys, whose signatures can be verified for ever. */
    publicJwks: () => all,
  };
}

function jwks(rows: readonly SigningKeyRow[]): { readonly keys: JWK[] } {
  return { keys: rows.map((row) => JSON.parse(row.public_jwk)) };
}

async function openSigningKey(row: SigningKeyRow, masterKeys: MasterKeys): Promise<SigningKey> {
  const masterKey = requireMasterKey(masterKeys, row.master_key_id);
  const jwk = unwrap(masterKey, row.wrapped_private_key, signingKeyIdentity(row.purpose, row.kid));
  const privateKey = await importJWK(JSON.parse(jwk.toString()), SIGNING_ALGORITHM);
  if (privateKey instanceof Uint8Array) throw new Error("a signing key is not an Ed25519 key");
  return { kid: row.kid, privateKey };
}

// Revocations of tokens. They don't depend on clocks: a token carries the number of the newest revocation when it was made, and
// is refused if there is a later one for its tenant or its user.

export const REVOCATION_CLAIM = "tollgate:revocation";
/** The newest revocation when the token was made; 0 for a token that carries none. */
export function madeAfter(claims: Readonly<Record<string, unknown>>): number {
  const value = claims[REVOCATION_CLAIM];
  return typeof value === "number" ? value : 0;
}

/** Stands for all users of a tenant, since no user has an empty name. */
const EVERYBODY = "";
/** Rows of one read, which takes a millisecond or two. */
const ROWS_AT_ONCE = 1_000;

export function createRevocations(read: Reader) {
  const tenants = new Map<string, { everybody: number; readonly users: Map<string, number> }>();
  let newest = 0;

  function add(tenant: string, user: string, revokedAt: number): void {
    const of = tenants.getOrInsertComputed(tenant, () => ({ everybody: 0, users: new Map<string, number>() }));
    if (user !== EVERYBODY) return void of.users.set(user, revokedAt);
    of.everybody = revokedAt;
    of.users.clear();
  }

  /** Reads the new revocations, each of which has a higher number than those before it. */
  async function catchUp(): Promise<void> {
    const { tokenRevocations: t } = read.tables;
    for (;;) {
      const rows = await read.db
        .select()
        .from(t)
        .where(gt(t.revoked_at, newest))
        .orderBy(asc(t.revoked_at))
        .limit(ROWS_AT_ONCE);
      for (const { tenant, user_name, revoked_at } of rows) add(tenant, user_name, revoked_at);
      newest = rows.at(-1)?.revoked_at ?? newest;
      if (rows.length < ROWS_AT_ONCE) return;
    }
  }

  return {
    catchUp,
    newest: () => newest,
    isRevoked(tenant: string, user: string, madeAfter: number): boolean {
      const of = tenants.get(tenant);
      if (of === undefined) return false;
      return madeAfter < of.everybody || madeAfter < (of.users.get(user) ?? 0);
    },
  };
}

/** Every gateway refuses the tokens made before within about a second. @param user null for all @throws StartupProblem for too many */
export async function revokeTokens(store: Store, tenant: string, user: string | null): Promise<void> {
  await store.write(async (tx) => {
    const { keyring, tokenRevocations: t } = tx.tables;
    // The number is a time, so that it is higher than all others even after a restore of an older database.
    const next = sql<number>`case when ${keyring.revoked_at} < ${tx.now} then ${tx.now} else ${keyring.revoked_at} + 1 end`;
    const [changed] = await tx.db.update(keyring).set({ revoked_at: next }).returning({ at: keyring.revoked_at });
    const revoked_at = changed?.at ?? 0;
    // Removes revocations whose last token has expired, with a day more since clocks differ.
    await tx.db.delete(t).where(lt(t.revoked_at, revoked_at - (TOKEN_DAYS_MAX + 1) * DAY_MS));
    // A revocation for the whole tenant covers those of its users.
    if (user === null) await tx.db.delete(t).where(and(eq(t.tenant, tenant), ne(t.user_name, EVERYBODY)));
    await tx.db
      .insert(t)
      .values({ tenant, user_name: user ?? EVERYBODY, revoked_at })
      .onConflictDoUpdate({ target: [t.tenant, t.user_name], set: { revoked_at } });
    const [row] = await tx.db.select({ kept: count() }).from(t);
    if (Number(row?.kept) <= MAX.revokedUsers) return;
    throw new StartupProblem(
      `no more than ${MAX.revokedUsers} users can have their tokens revoked: revoke those of whole tenants (without --user)`,
    );
  });
}
