// The tables of the keys, all of them wrapped, and of what gateways must know of them: see src/keys.
import type { Columns } from "./columns.ts";

export type KeyPurpose = "issuer" | "receipts";

export function keyTables(c: Columns) {
  return {
    /** The keys of each tenant under which its secrets' data keys are wrapped; themselves wrapped by a master key. */
    tenantKeys: c.table("tenant_keys", {
      tenant: c.text().notNull(),
      /** From 1: what else is derived comes from the first for good. The newest seals. */
      number: c.whole().notNull(),
      wrapped_key: c.bytes().notNull(),
      /** Which master key wrapped it: the first 16 hex digits of that key's SHA-256. */
      master_key_id: c.text().notNull(),
      created_at: c.whole().notNull(),
    }),

    /** Ed25519 keys of the local issuer and of the trust receipts, the private half wrapped by the master key. */
    signingKeys: c.table("signing_keys", {
      kid: c.text().notNull(),
      purpose: c.text().$type<KeyPurpose>().notNull(),
      public_jwk: c.text().notNull(),
      wrapped_private_key: c.bytes().notNull(),
      master_key_id: c.text().notNull(),
      created_at: c.whole().notNull(),
      retired_at: c.whole(),
    }),

    /** One row, about all keys. */
    keyring: c.table("keyring", {
      one: c.whole().notNull(),
      /** Rises with each change of the keys, so that gateways know when to read them again. */
      version: c.whole().notNull(),
      /** What new keys are wrapped with; null before the first key. */
      master_key_id: c.text(),
      /** What it is going to be, once every gateway has that key. */
      next_master_key_id: c.text(),
      /** From its change until no earlier master key wraps anything. */
      is_rotating: c.flag().notNull(),
      /** The newest of `tokenRevocations`, which a token carries that is made now. */
      revoked_at: c.whole().notNull(),
    }),

    /** The gateways that run, as far as they are to open the keys. */
    keyHolders: c.table("key_holders", {
      replica: c.text().notNull(),
      /** With spaces between them. */
      master_key_ids: c.text().notNull(),
      /** The version of the keyring that it goes by. */
      seen_version: c.whole().notNull(),
      /** By the database's own clock. */
      lease_until: c.whole().notNull(),
    }),

    /** Tokens of the local issuer that were made before a revocation are refused. */
    tokenRevocations: c.table("token_revocations", {
      tenant: c.text().notNull(),
      /** Empty for all users of the tenant. */
      user_name: c.text().notNull(),
      /** Later than that of each earlier revocation, also when the database's clock has gone back. */
      revoked_at: c.whole().notNull(),
    }),
  };
}
