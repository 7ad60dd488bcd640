import { afterAll, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { createPublicKey } from "node:crypto";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { base64url, CompactSign, exportJWK, generateKeyPair, importJWK, type JWK, SignJWT } from "jose";
import { type OidcServer, startOidc } from "../../test/support/oidc.ts";
import type { Caller } from "../core/caller.ts";
import { systemClock } from "../core/clock.ts";
import { silentLog } from "../core/log.ts";
import { newKey } from "../keys/envelope.ts";
import { type Keyring, openKeyring } from "../keys/keyring.ts";
import { openSqlite } from "../storage/sqlite.ts";
import type { Store } from "../storage/store.ts";
import { createIdentity, type Identity, type IdentityOptions } from "./identity.ts";

const CLAIMS = { tenant: "tenant_id", user: "sub", scope: "scope" };

let offset = 0;
const clock = { now: () => systemClock.now() + offset };
/** A time on a whole second, for the boundaries. */
let frozen = Math.floor(systemClock.now() / 1000) * 1000;
const frozenClock = { now: () => frozen };
const seconds = () => Math.floor(frozen / 1000);

const dir = mkdtempSync(join(tmpdir(), "identity-"));
let store: Store;
let keyring: Keyring;
let oidc: OidcServer;
let key: JWK;

beforeAll(async () => {
  store = await openSqlite({ path: join(dir, "tollgate.db"), log: silentLog, clock: systemClock });
  keyring = await openKeyring(store, newKey(), systemClock);
  oidc = await startOidc();
});

afterAll(async () => {
  await store.close();
  await oidc.stop();
  rmSync(dir, { recursive: true });
});

beforeEach(async () => {
  offset = 0;
  oidc.fail(null);
  key = await oidc.rotate(`key ${crypto.randomUUID()}`);
});

async function fetchJson(url: string): Promise<unknown> {
  const response = await fetch(url);
  if (response.status !== 200) throw new Error(`answered ${response.status}`);
  return response.json();
}

function remote(options: Partial<IdentityOptions> = {}): Identity {
  const settings = { issuer: oidc.issuer, audience: oidc.audience, jwksUrl: null };
  return createIdentity({
    claims: CLAIMS,
    oidc: settings,
    keyring,
    fetchJson,
    clock,
    log: silentLog,
    ...options,
  });
}

function local(options: Partial<IdentityOptions> = {}): Identity {
  return remote({ oidc: null, fetchJson: () => Promise.reject(new Error("not asked")), ...options });
}

/** What an attempt comes to: the caller, or the kind of the Fault. */
async function attempt(identity: Identity, token: string): Promise<Caller | string> {
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
async function signed({ header, claims }: Forgery = {}, by: JWK = key): Promise<string> {
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

const SIGNED_BY_SERVER = {
  tenant: "acme",
  user: "robot",
  scopes: new Set(["invocations:read_body", "other"]),
};

describe("an OIDC issuer", () => {
  test("a token of a real server names tenant, user and scopes", async () => {
    expect(await attempt(remote(), await oidc.token({ tenant_id: "acme" }))).toEqual(SIGNED_BY_SERVER);
  });

  test("a token that was seen is answered at once and without the issuer", async () => {
    const identity = remote();
    const header = `Bearer ${await oidc.token({ tenant_id: "acme" })}`;
    const first = await identity.authenticate(header);
    oidc.fail(500);
    expect(identity.authenticate(header)).toBe(first);
  });

  test("the keys can be at a URL of their own, without discovery", async () => {
    const asked = oidc.asked.get("/.well-known/openid-configuration");
    const settings = { issuer: oidc.issuer, audience: oidc.audience, jwksUrl: `${oidc.issuer}/jwks` };
    const identity = remote({ oidc: settings });
    expect(await attempt(identity, await oidc.token({ tenant_id: "acme" }))).toEqual(SIGNED_BY_SERVER);
    expect(oidc.asked.get("/.well-known/openid-configuration")).toBe(asked);
  });

  test("a new key is accepted within 30 s, and the removed one no more", async () => {
    const identity = remote();
    const old = await oidc.token({ tenant_id: "acme" });
    expect(await attempt(identity, old)).toEqual(SIGNED_BY_SERVER);
    await oidc.rotate("after rotation");
    const fresh = await oidc.token({ tenant_id: "acme" });
    offset += 29_000;
    expect(await attempt(identity, fresh)).toEqual(SIGNED_BY_SERVER);
    expect(await attempt(identity, old)).toBe("unauthenticated");
  });

  test("a new key under an old name is accepted too", async () => {
    const identity = remote();
    await oidc.rotate("the same name");
    expect(await attempt(identity, await oidc.token({ tenant_id: "acme" }))).toEqual(SIGNED_BY_SERVER);
    await oidc.rotate("the same name");
    offset += 29_000;
    expect(await attempt(identity, await oidc.token({ tenant_id: "acme" }))).toEqual(SIGNED_BY_SERVER);
  });

  test("a removed key takes effect within five minutes without any new token", async () => {
    const identity = remote();
    const old = await oidc.token({ tenant_id: "acme" });
    await attempt(identity, old);
    await oidc.rotate("another");
    offset += 299_000;
    // The background fetch starts with this call, which itself still goes by the old keys.
    await attempt(identity, old);
    offset += 1_000;
    expect(await attempt(identity, old)).toBe("unauthenticated");
  });

  test("keys that stay the same do not make known tokens be checked again", async () => {
    let time = systemClock.now();
    const identity = remote({ clock: { now: () => time } });
    const header = `Bearer ${await oidc.token({ tenant_id: "acme" })}`;
    const first = await identity.authenticate(header);
    time += 250_000;
    expect(identity.authenticate(header)).toBe(first);
    // That has started a fetch, which the token of an unknown key waits for.
    await attempt(identity, await signed({ header: { kid: "unknown" } }));
    time += 100_000;
    expect(identity.authenticate(header)).toBe(first);
  });

  test("unknown keys make the issuer be asked at most once per ten seconds, however many come at once", async () => {
    const identity = remote();
    await attempt(identity, await signed());
    const stranger = { ...(await oidc.rotate("stranger")), kid: "nobody knows it" };
    await oidc.rotate("the real one");
    const asked = oidc.asked.get("/jwks") ?? 0;
    offset += 10_000;
    const forgeries = await Promise.all(Array.from({ length: 50 }, () => signed({}, stranger)));
    const answers = await Promise.all(forgeries.map((token) => attempt(identity, token)));
    expect(new Set(answers)).toEqual(new Set(["unauthenticated"]));
    offset += 9_000;
    await attempt(identity, forgeries[0]!);
    expect((oidc.asked.get("/jwks") ?? 0) - asked).toBe(1);
  });

  test("requests that wait for the same new key all get in", async () => {
    const identity = remote();
    await attempt(identity, await signed());
    await oidc.rotate("the new one");
    offset += 15_000;
    const token = await oidc.token({ tenant_id: "acme" });
    const answers = await Promise.all(Array.from({ length: 20 }, () => attempt(identity, token)));
    for (const answer of answers) expect(answer).toEqual(SIGNED_BY_SERVER);
  });

  test("a request that looked just before the new key came gets in too", async () => {
    let gate = Promise.resolve();
    const gated = async (url: string) => {
      const answer = await fetchJson(url);
      await gate;
      return answer;
    };
    const identity = remote({ fetchJson: gated });
    await attempt(identity, await signed());
    await oidc.rotate("arriving");
    offset += 15_000;
    const token = await oidc.token({ tenant_id: "acme" });
    const { promise, resolve } = Promise.withResolvers<void>();
    gate = promise;
    const attempts = [attempt(identity, token)];
    resolve();
    for (let turn = 0; turn < 100; turn++) {
      attempts.push(attempt(identity, token));
      await new Promise(setImmediate);
    }
    for (const answer of await Promise.all(attempts)) expect(answer).toEqual(SIGNED_BY_SERVER);
  });

  test("an expired token of a key that is gone does not make the issuer be asked", async () => {
    const identity = remote();
    await attempt(identity, await signed());
    const old = await signed({ header: { kid: "gone" }, claims: { exp: seconds() - 120 } });
    const asked = oidc.asked.get("/jwks");
    offset += 15_000;
    expect(await attempt(identity, old)).toBe("unauthenticated");
    expect(oidc.asked.get("/jwks")).toBe(asked);
  });

  test("an issuer that is away at the start: 503 at first, and in when it is back", async () => {
    oidc.fail(500);
    const identity = remote();
    const token = await signed();
    expect(await attempt(identity, token)).toBe("unavailable");
    expect(await attempt(identity, await signed({ claims: { iss: "https://other.test" } }))).toBe(
      "unauthenticated",
    );
    expect(await attempt(identity, "not.a.token")).toBe("unauthenticated");
    oidc.fail(null);
    offset += 10_000;
    expect(await attempt(identity, token)).toMatchObject({ tenant: "acme" });
  });

  test("an issuer that goes away later: known keys go on for a day", async () => {
    const identity = remote();
    const token = await signed({ claims: { exp: seconds() + 100 * 3600 } });
    expect(await attempt(identity, token)).toMatchObject({ tenant: "acme" });
    oidc.fail(500);
    for (const hours of [1, 12, 23.9]) {
      offset = hours * 3_600_000;
      expect(await attempt(identity, token)).toMatchObject({ tenant: "acme" });
    }
    // Only the first look waits for an issuer that is away; known tokens are answered at once after it.
    expect(identity.authenticate(`Bearer ${token}`)).not.toBeInstanceOf(Promise);
    offset = 24 * 3_600_000;
    expect(await attempt(identity, token)).toBe("unavailable");
  });

  test("a discovery document of another issuer is not followed", async () => {
    const settings = { issuer: `${oidc.issuer}/`, audience: oidc.audience, jwksUrl: null };
    const identity = remote({ oidc: settings });
    expect(await attempt(identity, await signed({ claims: { iss: `${oidc.issuer}/` } }))).toBe("unavailable");
  });

  test("an https issuer can't send for its keys over http", async () => {
    const issuer = "https://issuer.test";
    const answers: Record<string, unknown> = {
      [`${issuer}/.well-known/openid-configuration`]: { issuer, jwks_uri: `${oidc.issuer}/jwks` },
    };
    const identity = remote({
      oidc: { issuer, audience: oidc.audience, jwksUrl: null },
      fetchJson: async (url) => answers[url] ?? fetchJson(url),
    });
    expect(await attempt(identity, await signed({ claims: { iss: issuer } }))).toBe("unavailable");
  });

  test("odd answers of the issuer are survived", async () => {
    const odd = [
      null,
      [],
      "x",
      7,
      {},
      { keys: {} },
      { keys: [] },
      { keys: [null, 3, { kty: "oct", k: "c2VjcmV0" }] },
    ];
    for (const answer of odd) {
      const identity = remote({
        oidc: { issuer: oidc.issuer, audience: oidc.audience, jwksUrl: "http://jwks.test" },
        fetchJson: async () => answer,
      });
      expect(await attempt(identity, await signed())).toBe("unavailable");
    }
  });

  test("a token that names no key is tried with every key that fits", async () => {
    const pairs = await Promise.all([1, 2, 3].map(() => generateKeyPair("ES256", { extractable: true })));
    const keys = await Promise.all(pairs.map(({ publicKey }) => exportJWK(publicKey)));
    const identity = remote({
      oidc: { issuer: oidc.issuer, audience: oidc.audience, jwksUrl: "http://jwks.test" },
      fetchJson: async () => ({ keys }),
    });
    const last = await exportJWK(pairs[2]!.privateKey);
    expect(await attempt(identity, await signed({ header: { kid: undefined } }, last))).toMatchObject({
      tenant: "acme",
    });
    expect(await attempt(identity, await signed({ header: { kid: undefined } }))).toBe("unauthenticated");
  });

  for (const algorithm of [
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
    "Ed25519",
  ]) {
    test(`${algorithm} is accepted`, async () => {
      const { privateKey, publicKey } = await generateKeyPair(algorithm, { extractable: true });
      const jwk = { ...(await exportJWK(publicKey)), kid: "k" };
      const identity = remote({
        oidc: { issuer: oidc.issuer, audience: oidc.audience, jwksUrl: "http://jwks.test" },
        fetchJson: async () => ({ keys: [jwk] }),
      });
      const token = await new SignJWT({ tenant_id: "acme", sub: "robot" })
        .setProtectedHeader({ alg: algorithm, kid: "k" })
        .setIssuer(oidc.issuer)
        .setAudience(oidc.audience)
        .setExpirationTime("10m")
        .sign(privateKey);
      expect(await attempt(identity, token)).toMatchObject({ tenant: "acme", user: "robot" });
    });
  }
});

describe("forgeries", () => {
  test("alg none, in any case and with or without a signature", async () => {
    const identity = remote();
    const good = await signed();
    for (const alg of ["none", "None", "NONE", ""]) {
      const header = base64url.encode(JSON.stringify({ alg, kid: key.kid }));
      const [, payload, signature] = good.split(".");
      expect(await attempt(identity, `${header}.${payload}.`)).toBe("unauthenticated");
      expect(await attempt(identity, `${header}.${payload}.${signature}`)).toBe("unauthenticated");
    }
  });

  test("HS256 with the public key as its secret", async () => {
    const identity = remote();
    const { d: _, ...publicJwk } = key;
    const pem = createPublicKey({ key: publicJwk as never, format: "jwk" }).export({
      type: "spki",
      format: "pem",
    });
    for (const secret of [pem.toString(), JSON.stringify(publicJwk)]) {
      const payload = Buffer.from(
        JSON.stringify({
          iss: oidc.issuer,
          aud: oidc.audience,
          sub: "x",
          tenant_id: "acme",
          exp: seconds() + 60,
        }),
      );
      const token = await new CompactSign(payload)
        .setProtectedHeader({ alg: "HS256", kid: key.kid! })
        .sign(Buffer.from(secret));
      expect(await attempt(identity, token)).toBe("unauthenticated");
    }
  });

  test("a key or key URL brought in the header", async () => {
    const { privateKey, publicKey } = await generateKeyPair("ES256", { extractable: true });
    const jwk = await exportJWK(publicKey);
    const mine = { ...(await exportJWK(privateKey)), kid: key.kid! };
    for (const header of [{ jwk }, { jku: "http://127.0.0.1:9/jwks" }]) {
      expect(await attempt(remote(), await signed({ header }, mine))).toBe("unauthenticated");
    }
  });

  test("a changed payload, header or signature", async () => {
    const identity = remote();
    const [header, payload, signature] = (await signed()).split(".") as [string, string, string];
    const evil = Buffer.from(base64url.decode(payload)).toString().replace("acme", "evil");
    expect(await attempt(identity, `${header}.${base64url.encode(evil)}.${signature}`)).toBe(
      "unauthenticated",
    );
    expect(await attempt(identity, `${header}.${payload}.${"A".repeat(signature.length)}`)).toBe(
      "unauthenticated",
    );
    expect(await attempt(identity, `${header}.${payload}.`)).toBe("unauthenticated");
  });

  test("wrong or missing registered claims", async () => {
    const identity = remote();
    const now = seconds();
    const bad: Record<string, unknown>[] = [
      { iss: "https://other.test" },
      { iss: undefined },
      { iss: [oidc.issuer] },
      { aud: "https://other.test" },
      { aud: undefined },
      { aud: [] },
      { aud: ["https://other.test"] },
      { exp: undefined },
      { exp: null },
      { exp: String(now + 600) },
      { nbf: now + 3600 },
      { nbf: "soon" },
    ];
    for (const claims of bad)
      expect(await attempt(identity, await signed({ claims }))).toBe("unauthenticated");
    const several = await signed({ claims: { aud: ["https://other.test", oidc.audience] } });
    expect(await attempt(identity, several)).toMatchObject({ tenant: "acme" });
  });

  test("a tenant or user that is no name", async () => {
    const identity = remote();
    const values = [
      undefined,
      null,
      "",
      7,
      true,
      {},
      [],
      ["acme"],
      "a\u0000b",
      "a\nb",
      "\ud800",
      "x".repeat(257),
    ];
    for (const value of values) {
      for (const claim of ["tenant_id", "sub"]) {
        expect(await attempt(identity, await signed({ claims: { [claim]: value } }))).toBe("unauthenticated");
      }
    }
    expect(await attempt(identity, await signed({ claims: { tenant_id: "Ä b" } }))).toMatchObject({
      tenant: "Ä b",
    });
  });

  test("headers that carry no bearer token", async () => {
    const identity = local();
    const good = await localToken();
    expect(await identity.authenticate(`bearer  ${good}`)).toMatchObject({ tenant: "acme" });
    const bad = [
      "",
      "Bearer",
      "Bearer ",
      good,
      `Basic ${good}`,
      `Bearer ${good}, Bearer ${good}`,
      `Bearer ${good} x`,
    ];
    bad.push(`Bearer ${good}=`, `Bearer a.b.c.d.e`, `Bearer ${"a".repeat(9000)}.b.c`, `Bearer\t${good}`);
    for (const header of bad) {
      const answer = async () => identity.authenticate(header);
      expect(answer()).rejects.toMatchObject({ kind: "unauthenticated" });
    }
    expect(() => identity.authenticate(null)).toThrow(expect.objectContaining({ kind: "unauthenticated" }));
  });

  test("a Fault tells nothing of the token", async () => {
    const token = await signed({ claims: { aud: "https://other.test" } });
    const fault = await Promise.resolve(remote().authenticate(`Bearer ${token}`)).catch(
      (error: unknown) => error,
    );
    expect(Bun.inspect(fault)).not.toContain(token.split(".")[1]!);
  });
});

describe("time", () => {
  const at = async (claims: Record<string, unknown>, second: number) => {
    const identity = remote({ clock: frozenClock });
    const token = await signed({ claims });
    const before = frozen;
    frozen = second * 1000;
    try {
      return await attempt(identity, token);
    } finally {
      frozen = before;
    }
  };

  test("a clock may be 60 s off, and no more", async () => {
    const now = seconds();
    expect(await at({ exp: now }, now + 59)).toMatchObject({ tenant: "acme" });
    expect(await at({ exp: now }, now + 60)).toBe("unauthenticated");
    expect(await at({ nbf: now, exp: now + 600 }, now - 60)).toMatchObject({ tenant: "acme" });
    expect(await at({ nbf: now, exp: now + 600 }, now - 61)).toBe("unauthenticated");
  });

  test("a known token ends with its own end", async () => {
    const identity = remote({ clock: frozenClock });
    const before = frozen;
    const token = await signed({ claims: { exp: seconds() + 100 } });
    const first = await attempt(identity, token);
    frozen = (seconds() + 159) * 1000 + 999;
    expect(identity.authenticate(`Bearer ${token}`)).toBe(first as Caller);
    frozen += 1;
    expect(await attempt(identity, token)).toBe("unauthenticated");
    frozen = before;
  });
});

describe("scopes", () => {
  const scopesOf = async (scope: unknown) => {
    const caller = await attempt(remote(), await signed({ claims: { scope } }));
    return typeof caller === "string" ? caller : [...caller.scopes];
  };

  test("a space-separated string or an array", async () => {
    expect(await scopesOf("a  b invocations:read_body")).toEqual(["a", "b", "invocations:read_body"]);
    expect(await scopesOf(["a", "b c", 3, null])).toEqual(["a", "b c"]);
  });

  test("anything else grants nothing", async () => {
    for (const scope of [undefined, null, 3, { "invocations:read_body": true }, ""]) {
      expect(await scopesOf(scope)).toEqual([]);
    }
  });
});

async function localToken(claims: Record<string, unknown> = {}, purpose: "issuer" | "receipts" = "issuer") {
  const { kid, privateKey } = keyring.signingKey(purpose);
  return new SignJWT({
    iss: "tollgate",
    aud: "tollgate",
    tenant_id: "acme",
    sub: "alice",
    exp: Math.floor(clock.now() / 1000) + 60,
    ...claims,
  })
    .setProtectedHeader({ alg: "EdDSA", kid })
    .sign(privateKey);
}

describe("the local issuer", () => {
  test("its tokens are accepted, with the configured claim names", async () => {
    expect(await attempt(local(), await localToken({ scope: "a b" }))).toEqual({
      tenant: "acme",
      user: "alice",
      scopes: new Set(["a", "b"]),
    });
    const claims = { tenant: "org", user: "email", scope: "roles" };
    const named = await localToken({ org: "o", email: "e", roles: ["r"] });
    expect(await attempt(local({ claims }), named)).toEqual({
      tenant: "o",
      user: "e",
      scopes: new Set(["r"]),
    });
  });

  test("a token signed with the key of the receipts is refused", async () => {
    expect(await attempt(local(), await localToken({}, "receipts"))).toBe("unauthenticated");
  });

  test("with an OIDC issuer configured, local tokens are refused, and the other way round", async () => {
    expect(await attempt(remote(), await localToken())).toBe("unauthenticated");
    expect(await attempt(local(), await signed())).toBe("unauthenticated");
  });

  test("tokens for another audience or of another algorithm are refused", async () => {
    expect(await attempt(local(), await localToken({ aud: "other" }))).toBe("unauthenticated");
    expect(await attempt(local(), await signed({ claims: { iss: "tollgate", aud: "tollgate" } }))).toBe(
      "unauthenticated",
    );
  });
});
