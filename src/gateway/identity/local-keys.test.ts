import { afterAll, beforeAll, expect, test } from "bun:test";
import { generateKeyPair, SignJWT } from "jose";
import { onlyMasterKey } from "../../../test/support/keys.ts";
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import type { Caller } from "../../core/call.ts";
import { silentLog } from "../../core/log.ts";
import { systemClock } from "../../core/time.ts";
import { newKey } from "../../keys/envelope.ts";
import { type Keyring, openKeyring } from "../../keys/keyring.ts";
import { rotate } from "../../keys/rotation.ts";
import { REVOCATION_CLAIM, revokeTokens, type SigningKey } from "../../keys/signing-keys.ts";
import type { Store } from "../../storage/store.ts";
import { createIdentity, type Identity, type LocalKeyring } from "./identity.ts";

const place = sqlitePlace();
const masterKeys = onlyMasterKey(newKey());
let store: Store;
/** Of a gateway that has not looked since its start. */
let keyring: Keyring;
let identity: Identity;

beforeAll(async () => {
  store = await place.open();
  keyring = await openKeyring(store, masterKeys, systemClock);
  identity = identityOf(keyring);
});
afterAll(async () => {
  await store.close();
  place.remove();
});

function identityOf(known: LocalKeyring): Identity {
  return createIdentity({
    claims: { tenant: "tenant_id", user: "sub", scope: "scope" },
    oidc: null,
    keyring: known,
    fetchJson: () => Promise.reject(new Error("not asked")),
    clock: systemClock,
    log: silentLog,
  });
}

const tokenBy = ({ kid, privateKey }: SigningKey, claims: Record<string, unknown> = {}) =>
  new SignJWT({ tenant_id: "acme", sub: "alice", ...claims })
    .setProtectedHeader({ alg: "EdDSA", kid })
    .setIssuer("tollgate")
    .setAudience("tollgate")
    .setExpirationTime("1h")
    .sign(privateKey);

/** Another process, as `tollgate token` is one. */
const latest = () => openKeyring(store, masterKeys, systemClock);

async function outcome(token: string, judge = identity): Promise<Caller | string> {
  try {
    return await judge.authenticate(`Bearer ${token}`);
  } catch (error) {
    return (error as { kind: string }).kind;
  }
}

const ALICE = { tenant: "acme", user: "alice", scopes: new Set<string>() };

test("a token of a new key is taken at once, and those of the earlier key go on", async () => {
  const before = await tokenBy(keyring.signingKey("issuer"));
  expect(await outcome(before)).toEqual(ALICE);
  const next = { stage: () => masterKeys.add(newKey()), promote: () => true };
  const secretIdentity = () => "";
  expect(await rotate({ store, masterKeys, clock: systemClock, secretIdentity }, next)).toMatchObject({
    outcome: "done",
  });
  const kid = keyring.signingKey("issuer").kid;
  const after = await tokenBy((await latest()).signingKey("issuer"));
  expect(await outcome(after)).toEqual(ALICE);
  expect(keyring.signingKey("issuer").kid).not.toBe(kid);
  expect(await outcome(before)).toEqual(ALICE);
});

test("a token of a key that is nowhere is refused", async () => {
  const { privateKey } = await generateKeyPair("EdDSA");
  for (const kid of ["nobody", keyring.signingKey("issuer").kid]) {
    expect(await outcome(await tokenBy({ kid, privateKey }))).toBe("unauthenticated");
  }
});

test("a revoked token is refused also where it is remembered, and one without a number is older than all", async () => {
  const key = keyring.signingKey("issuer");
  const remembered = await tokenBy(key, { [REVOCATION_CLAIM]: keyring.revocations.newest() });
  expect(await outcome(remembered)).toEqual(ALICE);
  await revokeTokens(store, "acme", "alice");
  await keyring.renewed();
  expect(await outcome(remembered)).toBe("unauthenticated");
  expect(await outcome(await tokenBy(key))).toBe("unauthenticated");
  expect(await outcome(await tokenBy(key, { [REVOCATION_CLAIM]: "4102444800000" }))).toBe("unauthenticated");
  const madeAfterwards = (await latest()).revocations.newest();
  expect(await outcome(await tokenBy(key, { [REVOCATION_CLAIM]: madeAfterwards }))).toEqual(ALICE);
  expect(await outcome(await tokenBy(key, { sub: "bob" }))).toEqual({ ...ALICE, user: "bob" });
});

test("while the revocations can't be read for long no token is taken, known or not, and then as before", async () => {
  let seen: "just now" | "a while ago" | "long ago" = "just now";
  const judge = identityOf({
    ...keyring,
    isFresh: () => seen === "just now",
    isUsable: () => seen !== "long ago",
    refreshed: async () => {},
  });
  const [known = "", unknown = ""] = await Promise.all(
    [{}, { jti: "another" }].map((more) => tokenBy(keyring.signingKey("issuer"), { sub: "bob", ...more })),
  );
  expect(await outcome(known, judge)).toEqual({ ...ALICE, user: "bob" });
  seen = "a while ago";
  expect(await outcome(known, judge)).toEqual({ ...ALICE, user: "bob" });
  seen = "long ago";
  expect([await outcome(known, judge), await outcome(unknown, judge)]).toEqual(["unavailable", "unavailable"]);
  seen = "just now";
  expect([await outcome(known, judge), await outcome(unknown, judge)]).toEqual([
    { ...ALICE, user: "bob" },
    { ...ALICE, user: "bob" },
  ]);
});
