// Identities with real issuers behind them, the local one and an OIDC server, and tokens good and forged.
import { afterAll, beforeAll, beforeEach } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { CompactSign, importJWK, type JWK, SignJWT } from "jose";
import type { Caller } from "../../../src/core/call.ts";
import { silentLog } from "../../../src/core/log.ts";
import { systemClock } from "../../../src/core/time.ts";
import { createIdentity, type Identity, type IdentityOptions } from "../../../src/gateway/identity/identity.ts";
import { newKey } from "../../../src/keys/envelope.ts";
import { type Keyring, openKeyring } from "../../../src/keys/keyring.ts";
import { openSqlite } from "../../../src/storage/sqlite/store.ts";
import type { Store } from "../../../src/storage/store.ts";
import { onlyMasterKey } from "../keys.ts";
import { type OidcServer, startOidc } from "./oidc.ts";

const CLAIMS = { tenant: "tenant_id", user: "sub", scope: "scope" };

/**
 * What tests move: how much time has passed, by how much the wall clock has been set besides, and a time on a whole
 * second, for the boundaries.
 */
export const time = { offset: 0, step: 0, frozen: Math.floor(systemClock.now() / 1000) * 1000 };
const clock = { now: () => systemClock.now() + time.offset + time.step };
export const frozenClock = { now: () => time.frozen };
export const seconds = () => Math.floor(time.frozen / 1000);

let keyring: Keyring;
export let oidc: OidcServer;
/** The private key that the issuer has at the moment. */
export let key: JWK;

/** Gives the tests of a file an issuer, whose key is another one in each test, and a keyring. */
export function useIssuers(): void {
  let store: Store;
  const dir = mkdtempSync(join(tmpdir(), "identity-"));
  beforeAll(async () => {
    store = await openSqlite({ path: join(dir, "tollgate.db"), log: silentLog, clock: systemClock });
    keyring = await openKeyring(store, onlyMasterKey(newKey()), systemClock);
    oidc = await startOidc();
  });

  afterAll(async () => {
    await store.close();
    await oidc.stop();
    rmSync(dir, { recursive: true });
  });

  beforeEach(async () => {
    time.offset = 0;
    time.step = 0;
    oidc.fail(null);
    key = await oidc.rotate(`key ${crypto.randomUUID()}`);
  });
}

export async function fetchJson(url: string): Promise<unknown> {
  const response = await fetch(url);
  if (response.status !== 200) throw new Error(`answered ${response.status}`);
  return response.json();
}

export function remote(options: Partial<IdentityOptions> = {}): Identity {
  const settings = { issuer: oidc.issuer, audience: oidc.audience, jwksUrl: null };
  return createIdentity({
    claims: CLAIMS,
    oidc: settings,
    keyring,
    fetchJson,
    clock,
    log: silentLog,
    now: () => performance.now() + time.offset,
    ...options,
  });
}

export function local(options: Partial<IdentityOptions> = {}): Identity {
  return remote({ oidc: null, fetchJson: () => Promise.reject(new Error("not asked")), ...options });
}

/** What an attempt comes to: the caller, or the kind of the Fault. */
export async function attempt(identity: Identity, token: string): Promise<Caller | string> {
  try {
    return await identity.authenticate(`Bearer ${token}`);
  } catch (error) {
    return (error as { kind: string }).kind;
  }
}

interface Forgery {
  readonly header?: Record<string, unknown>;
  readonly claims?: Record<string, unknown>;
}

/** A token of the remote issuer, good unless something is changed; `undefined` removes a claim. */
export async function signed({ header, claims }: Forgery = {}, by: JWK = key): Promise<string> {
  const now = seconds();
  const good = {
    iss: oidc.issuer,
    aud: oidc.audience,
    sub: "robot",
    tenant_id: "acme",
    iat: now,
    exp: now + 600,
  };
  const payload = Buffer.from(JSON.stringify({ ...good, ...claims }));
  return new CompactSign(payload)
    .setProtectedHeader({ alg: "ES256", kid: by.kid!, ...header })
    .sign(await importJWK(by, "ES256"));
}

export const SIGNED_BY_SERVER = {
  tenant: "acme",
  user: "robot",
  scopes: new Set(["invocations:read_body", "other"]),
};

/** A token of the local issuer; with the key of the receipts a forged one. */
export async function localToken(
  claims: Record<string, unknown> = {},
  purpose: "issuer" | "receipts" = "issuer",
  header: Record<string, unknown> = {},
) {
  const { kid, privateKey } = keyring.signingKey(purpose);
  return new SignJWT({
    iss: "tollgate",
    aud: "tollgate",
    tenant_id: "acme",
    sub: "alice",
    exp: Math.floor(clock.now() / 1000) + 60,
    ...claims,
  })
    .setProtectedHeader({ alg: "EdDSA", kid, ...header })
    .sign(privateKey);
}
