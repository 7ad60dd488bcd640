// The verification keys of the local issuer, as a source of keys like a remote issuer's. They change when keys are rotated,
// by a command in another process. A token of a key that is not known yet has the database asked once more. While nobody can
// say for long which tokens are revoked, none is taken.
import { createLocalJWKSet } from "jose";
import type { Keyring } from "../../keys/keyring.ts";
import type { IssuerKeySource, Keys } from "./issuer-keys.ts";

export type LocalKeyring = Pick<
  Keyring,
  "issuerJwks" | "isFresh" | "isUsable" | "refreshed" | "renewed" | "revocations"
>;

export function localKeys(keyring: LocalKeyring): IssuerKeySource {
  let jwks = keyring.issuerJwks();
  let keys: Keys = createLocalJWKSet(jwks);
  function current(): Keys {
    if (jwks === keyring.issuerJwks()) return keys;
    jwks = keyring.issuerJwks();
    keys = createLocalJWKSet(jwks);
    return keys;
  }
  return {
    fresh: () => (keyring.isFresh() ? current() : null),
    async settled() {
      await keyring.refreshed();
      return keyring.isUsable() ? current() : null;
    },
    async renewed(used) {
      await keyring.renewed();
      const next = current();
      return next === used ? null : next;
    },
  };
}
