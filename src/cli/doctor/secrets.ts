// The stores of secrets outside of the database: a directory, and HashiCorp Vault or OpenBao.
import { accessSync, constants, statSync } from "node:fs";
import type { Config } from "../../config.ts";
import { currentToken } from "../../gateway/credentials/vault.ts";
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

const NOT_READY = "unseal it, or see why it is not ready: calls with its secrets fail meanwhile";

/** The token is asked about itself, which the policy `default` of every Vault allows. */
async function tokenLook(vault: Vault, outbound: Outbound): Promise<{ problem: Problem | null; fine: string }> {
  const url = `${vault.address.replace(/\/+$/, "")}/v1/auth/token/lookup-self`;
  const bad = (problem: Problem) => ({ problem, fine: "" });
  try {
    const token = await currentToken(vault);
    const headers = { "x-vault-token": token, "x-vault-request": "true" };
    const { status, body } = await fetchJson(outbound, url, headers, LIMITS);
    if (status === 503) return bad(failure("it answers 503: it is sealed, or has no leader", NOT_READY));
    if (status === 403) {
      const advice =
        "set TOLLGATE_VAULT_TOKEN to a good one, whose policy has auth/token/lookup-self (as `default` does)";
      return bad(failure("it refuses the token", advice));
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
