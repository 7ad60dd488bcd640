// `tollgate token revoke`: the tokens of the local issuer that a tenant or one of its users has are no longer taken.
import type { Config } from "../config.ts";
import { systemClock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { isPrincipal } from "../gateway/identity/identity.ts";
import { revokeTokens } from "../keys/revocations.ts";
import { openStore } from "../storage/open.ts";
import { openDataDir, patient } from "./open.ts";
import { PRINCIPAL_MUST, remoteIssuerProblems } from "./token.ts";

export interface RevokeRequest {
  readonly tenant: string;
  /** Null for all users of the tenant. */
  readonly user: string | null;
}

/** The request that the flags make, or null and every problem that they have or that forbids it. */
export function readRevokeRequest(
  flags: ReadonlyMap<string, string>,
  config: Config | null,
): { readonly request: RevokeRequest | null; readonly problems: readonly string[] } {
  const problems = remoteIssuerProblems(config);
  const tenant = flags.get("tenant");
  const user = flags.get("user") ?? null;
  if (!isPrincipal(tenant)) problems.push(`--tenant ${PRINCIPAL_MUST}`);
  if (user !== null && !isPrincipal(user)) problems.push(`--user ${PRINCIPAL_MUST}`);
  return { request: isPrincipal(tenant) && problems.length === 0 ? { tenant, user } : null, problems };
}

/** @throws StartupProblem */
export async function revoke(config: Config, { tenant, user }: RevokeRequest, log: Log): Promise<string> {
  openDataDir(config, log);
  const { databaseUrl, dataDir } = config;
  const store = patient(await openStore({ databaseUrl, dataDir, log, clock: systemClock }));
  try {
    await revokeTokens(store, tenant, user);
  } finally {
    await store.close();
  }
  const whose = user === null ? `all users of ${tenant}` : `${user} of ${tenant}`;
  return `the tokens that were made for ${whose} until now are refused from two seconds later on\n`;
}
