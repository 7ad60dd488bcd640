// The servers that a gateway needs beside its database: the issuer of the callers' tokens, and HashiCorp Vault or OpenBao.

import { importJWK, type JWK } from "jose";
import type { Config } from "../../config.ts";
import { currentToken } from "../../gateway/credentials/secrets-stores.ts";
import { fetchKeySet } from "../../gateway/identity/issuer-keys.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import { fetchDocument, fetchJson, type Outbound } from "../../http/client/outbound.ts";
import { type Finding, failure, findings, observed, type Problem, problemOf, warning } from "./findings.ts";

type Oidc = NonNullable<Config["identity"]["oidc"]>;

export async function issuerFindings(oidc: Oidc | null, trusted: Outbound): Promise<Finding[]> {
  if (oidc === null) return findings("issuer", [], "the local one, by the keys of this deployment");
  const server = observed(trusted);
  const { problem, usable } = await keysOf(oidc, server.outbound);
  return findings(
    "issuer",
    [problem, server.certificateProblem(), server.clockProblem()],
    `${oidc.issuer} has ${usable} keys that verify tokens`,
  );
}

const ADVICE =
  "TOLLGATE_OIDC_ISSUER (and TOLLGATE_JWKS_URL) must be right, and this machine must reach it: without keys no call is taken";

async function keysOf(oidc: Oidc, outbound: Outbound): Promise<{ problem: Problem | null; usable: number }> {
  const from = oidc.jwksUrl ?? oidc.issuer;
  try {
    const { keys } = await fetchKeySet({ ...oidc, fetchJson: (url) => fetchDocument(outbound, url) });
    const usable = (await Promise.all(keys.map(isUsable))).filter(Boolean).length;
    const problem = usable > 0 ? null : failure(`none of the ${keys.length} keys of ${from} can be used`, ADVICE);
    return { problem, usable };
  } catch (error) {
    if (error instanceof OutboundError) return { problem: problemOf(error, ADVICE), usable: 0 };
    // The message is one of `fetchKeySet`, which names no secret.
    const why = error instanceof Error ? error.message : "unknown";
    return { problem: failure(`${from}: ${why}`, ADVICE), usable: 0 };
  }
}

async function isUsable(key: JWK): Promise<boolean> {
  try {
    await importJWK(key, key.alg ?? USUAL[key.crv ?? key.kty ?? ""]);
    return true;
  } catch {
    return false;
  }
}

/** For keys that name no algorithm: by their curve, or their kind. */
const USUAL: Readonly<Record<string, string>> = {
  "P-256": "ES256",
  "P-384": "ES384",
  "P-521": "ES512",
  Ed25519: "EdDSA",
  RSA: "RS256",
};

const LIMITS = { timeoutMs: 4_500, bytesMax: 64 * 1024 };

type Vault = NonNullable<Config["vault"]>;

export async function vaultFindings(vault: Vault, trusted: Outbound): Promise<Finding[]> {
  const server = observed(trusted);
  const { problem, fine } = await tokenLook(vault, server.outbound);
  return findings("vault", [problem, server.certificateProblem()], fine);
}

const BAD_TOKEN =
  "TOLLGATE_VAULT_TOKEN must be a good one, best with auth/token/lookup-self (as in the policy `default`)";
const NOT_READY = "unseal it, or see why it is not ready: calls with its secrets fail meanwhile";

/** No tenant has this name. A token that may read the secrets of all tenants is answered that there are none. */
const NO_TENANT = "tollgate-doctor";
/** Newer servers say this about an unknown token, and do not say it about a token that may not do what was asked. */
const INVALID_TOKEN = /invalid token/i;

/**
 * The token is asked about itself, which the policy `default` of every Vault allows. One whose policies do not is tried on the
 * secrets; and where it may read those of certain tenants alone, only they can tell.
 */
async function tokenLook(vault: Vault, outbound: Outbound): Promise<{ problem: Problem | null; fine: string }> {
  const bad = (problem: Problem) => ({ problem, fine: "" });
  try {
    const token = await currentToken(vault);
    const headers = { "x-vault-token": token, "x-vault-request": "true" };
    const ask = (path: string) =>
      fetchJson(outbound, `${vault.address.replace(/\/+$/, "")}/v1/${path}`, headers, LIMITS);
    const { status, body } = await ask("auth/token/lookup-self");
    if (status === 503) return bad(failure("it answers 503: it is sealed, or has no leader", NOT_READY));
    if (status === 403) {
      if (INVALID_TOKEN.test(JSON.stringify(body))) return bad(failure("it does not know the token", BAD_TOKEN));
      const { status: second } = await ask(`${vault.prefix.replaceAll("{tenant}", NO_TENANT)}/none`);
      const fine = "it answers, and takes the token, which may not ask for how long";
      if (second === 404 || second === 200) return { problem: null, fine };
      return bad(
        warning("it tells nothing about the token", `${BAD_TOKEN}, or one that may read certain tenants' alone`),
      );
    }
    if (status !== 200) return bad(failure(`it answers ${status} about the token`, NOT_READY));
    return judgeToken(ttlOf(body), vault.tokenFile !== null);
  } catch (error) {
    return bad(problemOf(error, "TOLLGATE_VAULT_ADDR must be its address, and this machine must reach it"));
  }
}

/** Seconds; null for a token that does not end. */
function ttlOf(body: unknown): number | null {
  const ttl = (body as { readonly data?: { readonly ttl?: unknown } } | undefined)?.data?.ttl;
  return typeof ttl === "number" && ttl > 0 ? ttl : null;
}

function judgeToken(ttl: number | null, isRenewed: boolean): { problem: Problem | null; fine: string } {
  if (ttl === null) return { problem: null, fine: "it answers, and the token is good without end" };
  const fine = `it answers, and the token is good for ${ttl} s`;
  if (isRenewed || ttl >= 14 * 86_400) return { problem: null, fine };
  const advice = "have it renewed, or hand it over by TOLLGATE_VAULT_TOKEN_FILE from an agent that does";
  return { problem: warning(`the token is good for ${ttl} s, and this program does not renew it`, advice), fine };
}
