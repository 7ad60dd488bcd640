// The issuer of the callers' tokens: whether its keys can be had, and can verify anything.
import { importJWK, type JWK } from "jose";
import type { Config } from "../../config.ts";
import { fetchKeySet } from "../../gateway/identity/issuer-keys.ts";
import { fetchDocument } from "../../http/fetch-json.ts";
import { type Outbound, OutboundError } from "../../http/outbound.ts";
import { type Finding, failure, findings, type Problem } from "./finding.ts";
import { observed } from "./observed.ts";
import { problemOf } from "./run.ts";

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
    // The words of `fetchKeySet`, which name no secret.
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
