// `tollgate token revoke`: the tokens of the local issuer that a tenant or one of its users has are no longer taken; or all
// of them, forged ones too, whose makers had a key of the issuer.
import type { Config } from "../config.ts";
import type { Log } from "../core/log.ts";
import { isPrincipal } from "../gateway/identity/identity.ts";
import { openKeyring } from "../keys/keyring.ts";
import type { MasterKeys } from "../keys/master-keys.ts";
import { revokeTokens } from "../keys/revocations.ts";
import { replaceIssuerKey } from "../keys/signing-keys.ts";
import type { Store } from "../storage/store.ts";
import { openGatewayStore, requireMasterKeys } from "./open.ts";
import { PRINCIPAL_MUST, remoteIssuerProblems } from "./token.ts";

export type RevokeRequest =
  | { readonly isForAll: true }
  | {
      readonly isForAll: false;
      readonly tenant: string;
      /** Null for all users of the tenant. */
      readonly user: string | null;
    };

/** The request that the flags make, or null and every problem that they have or that forbids it. */
export function readRevokeRequest(
  flags: ReadonlyMap<string, string>,
  config: Config | null,
): { readonly request: RevokeRequest | null; readonly problems: readonly string[] } {
  const problems = remoteIssuerProblems(config);
  const tenant = flags.get("tenant");
  const user = flags.get("user") ?? null;
  if (flags.has("all")) {
    const isMixed = tenant !== undefined || user !== null || flags.get("all") !== "";
    if (isMixed) problems.push("--all must stand alone: it ends the tokens of every tenant");
    return { request: problems.length === 0 ? { isForAll: true } : null, problems };
  }
  if (!isPrincipal(tenant)) problems.push(`--tenant ${PRINCIPAL_MUST}`);
  if (user !== null && !isPrincipal(user)) problems.push(`--user ${PRINCIPAL_MUST}`);
  const isWhole = isPrincipal(tenant) && problems.length === 0;
  return { request: isWhole ? { isForAll: false, tenant, user } : null, problems };
}

/** @throws StartupProblem */
export async function revoke(config: Config, request: RevokeRequest, log: Log): Promise<string> {
  const store = await openGatewayStore(config, log);
  try {
    if (request.isForAll) await replaceKey(store, requireMasterKeys(config, log));
    else await revokeTokens(store, request.tenant, request.user);
  } finally {
    await store.close();
  }
  return `the tokens that were made ${whose(request)}until now are refused from two seconds later on\n`;
}

async function replaceKey(store: Store, masterKeys: MasterKeys): Promise<void> {
  await openKeyring(store, masterKeys, store.clock);
  await replaceIssuerKey(store, masterKeys);
}

function whose(request: RevokeRequest): string {
  if (request.isForAll) return "";
  const { tenant, user } = request;
  return user === null ? `for all users of ${tenant} ` : `for ${user} of ${tenant} `;
}
