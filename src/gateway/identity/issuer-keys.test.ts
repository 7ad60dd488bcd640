import { describe, expect, test } from "bun:test";
import { exportJWK, generateKeyPair, SignJWT } from "jose";
import {
  attempt,
  fetchJson,
  oidc,
  remote,
  SIGNED_BY_SERVER,
  seconds,
  signed,
  time,
  useIssuers,
} from "../../../test/support/http/identity.ts";
import type { Caller } from "../../core/call.ts";

useIssuers();

describe("with an OIDC issuer", () => {
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
    time.offset += 29_000;
    expect(await attempt(identity, fresh)).toEqual(SIGNED_BY_SERVER);
    expect(await attempt(identity, old)).toBe("unauthenticated");
  });

  test("a new key under an old name is accepted too", async () => {
    const identity = remote();
    await oidc.rotate("the same name");
    expect(await attempt(identity, await oidc.token({ tenant_id: "acme" }))).toEqual(SIGNED_BY_SERVER);
    await oidc.rotate("the same name");
    time.offset += 29_000;
    expect(await attempt(identity, await oidc.token({ tenant_id: "acme" }))).toEqual(SIGNED_BY_SERVER);
  });

  test("a removed key takes effect within five minutes without any new token", async () => {
    const identity = remote();
    const old = await oidc.token({ tenant_id: "acme" });
    await attempt(identity, old);
    await oidc.rotate("another");
    time.offset += 299_000;
    // The background fetch starts with this call, which itself still goes by the old keys.
    await attempt(identity, old);
    time.offset += 1_000;
    expect(await attempt(identity, old)).toBe("unauthenticated");
  });

  test("keys that stay the same do not make known tokens be checked again", async () => {
    const identity = remote();
    const header = `Bearer ${await oidc.token({ tenant_id: "acme" })}`;
    const first = await identity.authenticate(header);
    time.offset += 250_000;
    expect(identity.authenticate(header)).toBe(first);
    // That has started a fetch, which the token of an unknown key waits for.
    await attempt(identity, await signed({ header: { kid: "unknown" } }));
    time.offset += 100_000;
    expect(identity.authenticate(header)).toBe(first);
  });

  test("unknown keys make the issuer be asked at most once per ten seconds, however many come at once", async () => {
    const identity = remote();
    await attempt(identity, await signed());
    const stranger = { ...(await oidc.rotate("stranger")), kid: "nobody knows it" };
    await oidc.rotate("the real one");
    const asked = oidc.asked.get("/jwks") ?? 0;
    time.offset += 10_000;
    const forgeries = await Promise.all(Array.from({ length: 50 }, () => signed({}, stranger)));
    const answers = await Promise.all(forgeries.map((token) => attempt(identity, token)));
    expect(new Set(answers)).toEqual(new Set(["unauthenticated"]));
    time.offset += 9_000;
    await attempt(identity, forgeries[0]!);
    expect((oidc.asked.get("/jwks") ?? 0) - asked).toBe(1);
  });

  test("requests that wait for the same new key all get in", async () => {
    const identity = remote();
    await attempt(identity, await signed());
    await oidc.rotate("the new one");
    time.offset += 15_000;
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
    time.offset += 15_000;
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
    time.offset += 15_000;
    expect(await attempt(identity, old)).toBe("unauthenticated");
    expect(oidc.asked.get("/jwks")).toBe(asked);
  });

  test("an issuer that is away at the start gets tokens a 503 at first, and they are accepted when it is back", async () => {
    oidc.fail(500);
    const identity = remote();
    const token = await signed();
    expect(await attempt(identity, token)).toBe("unavailable");
    expect(await attempt(identity, await signed({ claims: { iss: "https://other.test" } }))).toBe("unauthenticated");
    expect(await attempt(identity, "not.a.token")).toBe("unauthenticated");
    oidc.fail(null);
    time.offset += 10_000;
    expect(await attempt(identity, token)).toMatchObject({ tenant: "acme" });
  });

  test("an issuer that goes away later has its known keys go on for a day", async () => {
    const identity = remote();
    const token = await signed({ claims: { exp: seconds() + 100 * 3600 } });
    expect(await attempt(identity, token)).toMatchObject({ tenant: "acme" });
    oidc.fail(500);
    for (const hours of [1, 12, 23.9]) {
      time.offset = hours * 3_600_000;
      expect(await attempt(identity, token)).toMatchObject({ tenant: "acme" });
    }
    // Only the first look waits for an issuer that is away; known tokens are answered at once after it.
    expect(identity.authenticate(`Bearer ${token}`)).not.toBeInstanceOf(Promise);
    time.offset = 24 * 3_600_000;
    expect(await attempt(identity, token)).toBe("unavailable");
  });

  test("a clock that is set back keeps no removed key in", async () => {
    const identity = remote();
    const old = await signed({ claims: { exp: seconds() + 100 * 3600 } });
    expect(await attempt(identity, old)).toMatchObject({ tenant: "acme" });
    time.step = -3_600_000;
    await oidc.rotate("after the step");
    time.offset += 299_000;
    await attempt(identity, old);
    time.offset += 1_000;
    expect(await attempt(identity, old)).toBe("unauthenticated");
  });

  test("a clock that is set forward by more than a day makes no key too old while the issuer is away", async () => {
    const identity = remote();
    const token = await signed({ claims: { exp: seconds() + 100 * 3600 } });
    const first = await attempt(identity, token);
    oidc.fail(500);
    time.step = 25 * 3_600_000;
    expect(identity.authenticate(`Bearer ${token}`)).toBe(first as Caller);
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
    const odd = [null, [], "x", 7, {}, { keys: {} }, { keys: [] }, { keys: [null, 3, { kty: "oct", k: "c2VjcmV0" }] }];
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
    test(`a token signed by ${algorithm} is accepted`, async () => {
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
