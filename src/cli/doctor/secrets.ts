// The stores of secrets outside of the database: a directory, and HashiCorp Vault or OpenBao.
import { accessSync, constants, statSync } from "node:fs";
import type { Config } from "../../config.ts";
import { currentToken } from "../../gateway/credentials/secrets-stores.ts";
import { fetchJson } from "../../http/fetch-json.ts";
import type { Outbound } from "../../http/outbound.ts";
import { type Finding, failure, findings, type Problem, warning } from "./finding.ts";
import { observed } from "./observed.ts";
import { problemOf } from "./run.ts";

const LIMITS = { timeoutMs: 4_500, bytesMax: 64 * 1024 };
const OTHERS = 0o007;
const TTL_SECONDS_MIN = 14 * 86_400;

export async function secretsDirFindings(path: string): Promise<Finding[]> {
  return findings("secrets directory", [secretsDirProblem(path)], `${path} can be read`);
}

function secretsDirProblem(path: string): Problem | null {
  try {
    accessSync(path, constants.R_OK | constants.X_OK);
  } catch {
    return failure(`${path} can't be read`, "the user of the service must be allowed to enter and read it");
  }
  if ((statSync(path).mode & OTHERS) === 0) return null;
  return warning(`everybody may look into ${path}`, "take the rights of others away: it holds secrets");
}

type Vault = NonNullable<Config["vault"]>;

export async function vaultFindings(vault: Vault, trusted: Outbound): Promise<Finding[]> {
  const server = observed(trusted);
  const { problem, fine } = await tokenLook(vault, server.outbound);
  return findings("vault", [problem, server.certificateProblem()], fine);
}

const BAD_TOKEN =
  "TOLLGATE_VAULT_TOKEN must be a good one, best with auth/token/lookup-self (as in the policy `default`)";
const NOT_READY = "unseal it, or see why it is not ready: calls with its secrets fail meanwhile";

/** Nobody's: whoever may read the secrets of all tenants may ask for those of this one, and is told that there are none. */
const NO_TENANT = "tollgate-doctor";
/** Newer servers say it of a token that they do not know, and not of one that may not do what was asked. */
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
  if (isRenewed || ttl >= TTL_SECONDS_MIN) return { problem: null, fine };
  const advice = "have it renewed, or hand it over by TOLLGATE_VAULT_TOKEN_FILE from an agent that does";
  return { problem: warning(`the token is good for ${ttl} s, and this program does not renew it`, advice), fine };
}
