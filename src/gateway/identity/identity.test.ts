import { describe, expect, test } from "bun:test";
import { createPublicKey } from "node:crypto";
import { base64url, CompactSign, exportJWK, generateKeyPair } from "jose";
import {
  attempt,
  frozenClock,
  key,
  local,
  localToken,
  oidc,
  remote,
  seconds,
  signed,
  time,
  useIssuers,
} from "../../../test/support/http/identity.ts";
import type { Caller } from "../../core/call.ts";

useIssuers();

describe("a token", () => {
  test("is refused with alg none, in any case and with or without a signature", async () => {
    const identity = remote();
    const good = await signed();
    for (const alg of ["none", "None", "NONE", ""]) {
      const header = base64url.encode(JSON.stringify({ alg, kid: key.kid }));
      const [, payload, signature] = good.split(".");
      expect(await attempt(identity, `${header}.${payload}.`)).toBe("unauthenticated");
      expect(await attempt(identity, `${header}.${payload}.${signature}`)).toBe("unauthenticated");
    }
  });

  test("is refused with a reason for the log that says nothing of what it holds", async () => {
    const why = async (authorization: string | null) => {
      const asked = async () => remote().authenticate(authorization);
      const fault = (await asked().catch((error: unknown) => error)) as Error;
      return (fault.cause as Error).message;
    };
    const of = async (token: Promise<string>) => why(`Bearer ${await token}`);
    expect(await why(null)).toBe("no token");
    expect(await why("Basic x")).toBe("not a bearer token");
    expect(await why("Bearer a.b.c")).toBe("malformed");
    expect(await of(signed({ claims: { exp: 1 } }))).toBe("expired");
    expect(await of(signed({ claims: { aud: "secret-word" } }))).toBe("other audience");
    expect(await of(signed({ claims: { iss: "secret-word" } }))).toBe("other issuer");
    expect(await of(signed({ claims: { tenant_id: undefined } }))).toBe("no tenant claim");
    expect(await of(signed({ claims: { sub: undefined } }))).toBe("no user claim");
    expect(await of(signed({ header: { kid: "secret-word" } }))).toBe("unknown key");
  });

  test("is refused with HS256 and the public key as its secret", async () => {
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

  test("is refused with a key or key URL brought in the header", async () => {
    const { privateKey, publicKey } = await generateKeyPair("ES256", { extractable: true });
    const jwk = await exportJWK(publicKey);
    const mine = { ...(await exportJWK(privateKey)), kid: key.kid! };
    for (const header of [{ jwk }, { jku: "http://127.0.0.1:9/jwks" }]) {
      expect(await attempt(remote(), await signed({ header }, mine))).toBe("unauthenticated");
    }
  });

  test("is refused with a changed payload, header or signature", async () => {
    const identity = remote();
    const [header, payload, signature] = (await signed()).split(".") as [string, string, string];
    const evil = Buffer.from(base64url.decode(payload)).toString().replace("acme", "evil");
    expect(await attempt(identity, `${header}.${base64url.encode(evil)}.${signature}`)).toBe("unauthenticated");
    expect(await attempt(identity, `${header}.${payload}.${"A".repeat(signature.length)}`)).toBe("unauthenticated");
    expect(await attempt(identity, `${header}.${payload}.`)).toBe("unauthenticated");
  });

  test("is refused with wrong or missing registered claims", async () => {
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
    for (const claims of bad) expect(await attempt(identity, await signed({ claims }))).toBe("unauthenticated");
    const several = await signed({ claims: { aud: ["https://other.test", oidc.audience] } });
    expect(await attempt(identity, several)).toMatchObject({ tenant: "acme" });
  });

  test("is refused with a tenant or user that is no name", async () => {
    const identity = remote();
    const values = [undefined, null, "", 7, true, {}, [], ["acme"], "a\u0000b", "a\nb", "\ud800", "x".repeat(257)];
    for (const value of values) {
      for (const claim of ["tenant_id", "sub"]) {
        expect(await attempt(identity, await signed({ claims: { [claim]: value } }))).toBe("unauthenticated");
      }
    }
    expect(await attempt(identity, await signed({ claims: { tenant_id: "Ä b" } }))).toMatchObject({
      tenant: "Ä b",
    });
  });

  test("is refused when it is of another kind, or when it is bound to a key", async () => {
    const issuers = [
      {
        identity: remote(),
        sign: (header: object, claims: object) => signed({ header: { ...header }, claims: { ...claims } }),
      },
      {
        identity: local(),
        sign: (header: object, claims: object) => localToken({ ...claims }, "issuer", { ...header }),
      },
    ];
    for (const { identity, sign } of issuers) {
      for (const typ of ["JWT", "jwt", "at+jwt", "AT+JWT", "application/at+jwt", "Application/JWT"]) {
        expect([typ, await attempt(identity, await sign({ typ }, {}))]).toMatchObject([typ, { tenant: "acme" }]);
      }
      for (const typ of [
        "",
        "JWS",
        "id+jwt",
        "logout+jwt",
        "dpop+jwt",
        "receipt+jwt",
        "secevent+jwt",
        "text/jwt",
        " JWT",
        5,
        null,
      ]) {
        expect([typ, await attempt(identity, await sign({ typ }, {}))]).toEqual([typ, "unauthenticated"]);
      }
      for (const cnf of [{ jkt: "x" }, { "x5t#S256": "x" }, {}, "x", null]) {
        expect([cnf, await attempt(identity, await sign({}, { cnf }))]).toEqual([cnf, "unauthenticated"]);
      }
    }
  });

  test("is refused in a header that carries no bearer token", async () => {
    const identity = local();
    const good = await localToken();
    expect(await identity.authenticate(`bearer  ${good}`)).toMatchObject({ tenant: "acme" });
    const bad = ["", "Bearer", "Bearer ", good, `Basic ${good}`, `Bearer ${good}, Bearer ${good}`, `Bearer ${good} x`];
    bad.push(`Bearer ${good}=`, `Bearer a.b.c.d.e`, `Bearer ${"a".repeat(9000)}.b.c`, `Bearer\t${good}`);
    for (const header of bad) {
      const answer = async () => identity.authenticate(header);
      expect(answer()).rejects.toMatchObject({ kind: "unauthenticated" });
    }
    expect(() => identity.authenticate(null)).toThrow(expect.objectContaining({ kind: "unauthenticated" }));
  });

  test("is refused in words that tell nothing of the token", async () => {
    const token = await signed({ claims: { aud: "https://other.test" } });
    const fault = await Promise.resolve(remote().authenticate(`Bearer ${token}`)).catch((error: unknown) => error);
    expect(Bun.inspect(fault)).not.toContain(token.split(".")[1]!);
  });
});

describe("the time of a token", () => {
  const at = async (claims: Record<string, unknown>, second: number) => {
    const identity = remote({ clock: frozenClock });
    const token = await signed({ claims });
    const before = time.frozen;
    time.frozen = second * 1000;
    try {
      return await attempt(identity, token);
    } finally {
      time.frozen = before;
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
    const before = time.frozen;
    const token = await signed({ claims: { exp: seconds() + 100 } });
    const first = await attempt(identity, token);
    time.frozen = (seconds() + 159) * 1000 + 999;
    expect(identity.authenticate(`Bearer ${token}`)).toBe(first as Caller);
    time.frozen += 1;
    expect(await attempt(identity, token)).toBe("unauthenticated");
    time.frozen = before;
  });
});

describe("the scopes of a token", () => {
  const scopesOf = async (scope: unknown) => {
    const caller = await attempt(remote(), await signed({ claims: { scope } }));
    return typeof caller === "string" ? caller : [...caller.scopes];
  };

  test("are a space-separated string or an array", async () => {
    expect(await scopesOf("a  b invocations:read_body")).toEqual(["a", "b", "invocations:read_body"]);
    expect(await scopesOf(["a", "b c", 3, null])).toEqual(["a", "b c"]);
  });

  test("are nothing when they have another form", async () => {
    for (const scope of [undefined, null, 3, { "invocations:read_body": true }, ""]) {
      expect(await scopesOf(scope)).toEqual([]);
    }
  });
});

describe("the local issuer", () => {
  test("gives tokens that are accepted, with the configured claim names", async () => {
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

  test("is not believed by the key of the receipts", async () => {
    expect(await attempt(local(), await localToken({}, "receipts"))).toBe("unauthenticated");
  });

  test("has no token accepted with an OIDC issuer configured, and the other way round", async () => {
    expect(await attempt(remote(), await localToken())).toBe("unauthenticated");
    expect(await attempt(local(), await signed())).toBe("unauthenticated");
  });

  test("has no token accepted for another audience or of another algorithm", async () => {
    expect(await attempt(local(), await localToken({ aud: "other" }))).toBe("unauthenticated");
    expect(await attempt(local(), await signed({ claims: { iss: "tollgate", aud: "tollgate" } }))).toBe(
      "unauthenticated",
    );
  });
});
