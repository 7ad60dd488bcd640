// Why a token is refused: the caller learns nothing, and the log of the default level has the reason in the line of the request,
// with nothing of the token.
import { expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { exportJWK, generateKeyPair, SignJWT } from "jose";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { temporaryRoot } from "./support/gateway/process.ts";
import { startUpstream } from "./support/http/upstream.ts";
import { until } from "./support/until.ts";

const ALICE = { tenant: "acme", user: "alice" };
const ISSUER = "https://issuer.refused.test";
const AUDIENCE = "refused-audience";
/** In every claim that a test can choose, and in no line of the log. */
const SECRET = "word-of-the-token";

interface LogLine {
  readonly event: string;
  readonly level: string;
  readonly request_id?: string;
  readonly status?: number;
  readonly why?: string;
}

/** The `why` of a request that is answered 401. */
async function whyOf(gateway: Gateway, authorization: string | null): Promise<string | undefined> {
  const id = `request-${crypto.randomUUID()}`;
  const headers = { "x-request-id": id, ...(authorization !== null && { authorization }) };
  // Twenty requests of strangers have a line of their own in each second: the others are counted.
  const answer = await fetch(`${gateway.url}/v1/agents`, { headers });
  expect([answer.status, await answer.text()]).toEqual([401, ""]);
  expect(answer.headers.get("www-authenticate")).toBe("Bearer");
  const find = () =>
    gateway
      .log()
      .split("\n")
      .find((line) => line.includes(id));
  await until(() => find() !== undefined);
  const line = JSON.parse(find() ?? "") as LogLine;
  expect(line).toMatchObject({ event: "request", level: "info", status: 401 });
  return line.why;
}

function expectNothingOf(gateway: Gateway, token: string): void {
  for (const part of token.split(".").filter((text) => text.length > 12)) expect(gateway.log()).not.toContain(part);
  expect(gateway.log()).not.toContain(SECRET);
}

test("the log says why a token of the local issuer is refused", async () => {
  await using gateway = await startGateway();
  const good = await gateway.token(ALICE);
  const [header = "", payload = "", signature = ""] = good.split(".");
  expect(await whyOf(gateway, null)).toBe("no token");
  expect(await whyOf(gateway, good)).toBe("not a bearer token");
  expect(await whyOf(gateway, `Basic ${SECRET}`)).toBe("not a bearer token");
  expect(await whyOf(gateway, `Bearer "${good}"`)).toBe("not a bearer token");
  expect(await whyOf(gateway, `Bearer ${header}.${payload}`)).toBe("not a bearer token");
  expect(await whyOf(gateway, `Bearer ${good}${"x".repeat(9_000)}`)).toBe("too long");
  expect(await whyOf(gateway, `Bearer ${SECRET}.${payload}.${signature}`)).toBe("malformed");
  const flipped = `${signature.startsWith("A") ? "B" : "A"}${signature.slice(1)}`;
  expect(await whyOf(gateway, `Bearer ${header}.${payload}.${flipped}`)).toBe("wrong signature");

  // As a new user does it: the command in a folder of its own, with a database that nobody serves.
  const elsewhere = mkdtempSync(join(temporaryRoot(), "elsewhere-"));
  try {
    const args = ["token", "--tenant", "acme", "--user", "alice", "--data-dir", elsewhere];
    const made = await gateway.run(...args);
    expect(await whyOf(gateway, `Bearer ${made.stdout.trim()}`)).toBe("unknown key");
    expectNothingOf(gateway, made.stdout.trim());
  } finally {
    rmSync(elsewhere, { recursive: true, force: true });
  }

  expect((await gateway.run("token", "revoke", "--tenant", "acme", "--user", "alice")).code).toBe(0);
  const isRefused = async () => {
    const headers = { authorization: `Bearer ${good}` };
    return (await fetch(`${gateway.url}/v1/agents`, { headers })).status === 401;
  };
  await until(isRefused);
  expect(await whyOf(gateway, `Bearer ${good}`)).toBe("revoked");
  expectNothingOf(gateway, good);
});

test("the log says why a token of an OIDC issuer is refused", async () => {
  const own = await generateKeyPair("EdDSA");
  const jwk = { ...(await exportJWK(own.publicKey)), kid: "refused", alg: "EdDSA", use: "sig" };
  const issuer = startUpstream(() => Response.json({ keys: [jwk] }));
  try {
    await using gateway = await startGateway({
      env: { TOLLGATE_OIDC_ISSUER: ISSUER, TOLLGATE_OIDC_AUDIENCE: AUDIENCE, TOLLGATE_JWKS_URL: issuer.url },
    });
    const now = Math.floor(Date.now() / 1000);
    const sign = (claims: Record<string, unknown>, header: object = {}) =>
      new SignJWT({
        ...{ iss: ISSUER, aud: AUDIENCE, sub: "alice", tenant_id: "acme", exp: now + 600, note: SECRET },
        ...claims,
      })
        .setProtectedHeader({ alg: "EdDSA", kid: "refused", ...header })
        .sign(own.privateKey, { crit: { note: true } });
    const rsa = await generateKeyPair("RS256");
    const foreign = await new SignJWT({ iss: "tollgate", note: SECRET })
      .setProtectedHeader({ alg: "RS256", kid: SECRET })
      .sign(rsa.privateKey);
    const byOthers = await new SignJWT({ iss: ISSUER, aud: AUDIENCE, exp: now + 600, note: SECRET })
      .setProtectedHeader({ alg: "HS256" })
      .sign(new TextEncoder().encode(SECRET.repeat(4)));
    const refused: [token: string, why: string][] = [
      [foreign, "other issuer"],
      [await sign({ iss: SECRET }), "other issuer"],
      [byOthers, "other algorithm"],
      [await sign({}, { typ: "receipt+jwt" }), "other type"],
      [await sign({ cnf: { jkt: SECRET } }), "bound to a key"],
      [await sign({ exp: undefined }), "no expiry"],
      [await sign({ exp: now - 600 }), "expired"],
      [await sign({ nbf: now + 600 }), "not yet valid"],
      [await sign({ aud: SECRET }), "other audience"],
      [await sign({}, { kid: SECRET }), "unknown key"],
      [await sign({}, { crit: ["note"], note: SECRET }), "not valid"],
      [await sign({ tenant_id: undefined }), "no tenant claim"],
      [await sign({ tenant_id: { name: SECRET } }), "no tenant claim"],
      [await sign({ sub: undefined }), "no user claim"],
    ];
    for (const [token, why] of refused) {
      expect([why, await whyOf(gateway, `Bearer ${token}`)]).toEqual([why, why]);
      expectNothingOf(gateway, token);
    }
    const headers = { authorization: `Bearer ${await sign({})}` };
    expect((await fetch(`${gateway.url}/v1/agents`, { headers })).status).toBe(200);
  } finally {
    await issuer.stop();
  }
});
