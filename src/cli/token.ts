// `tollgate token` signs a token with the key of the local issuer. The key is in the database, so this works beside a running
// gateway and before the first start. `tollgate token revoke` refuses the tokens that a tenant or one of its users has by
// now; or all tokens, forged ones too, whose makers had a key of the issuer.
import { join } from "node:path";
import { SignJWT } from "jose";
import type { Config } from "../config.ts";
import type { Log } from "../core/log.ts";
import { systemClock } from "../core/time.ts";
import { isPrincipal, LOCAL_ISSUER } from "../gateway/identity/identity.ts";
import { openKeyring } from "../keys/keyring.ts";
import { DATABASE_FILE, type MasterKeys } from "../keys/master-keys.ts";
import {
  REVOCATION_CLAIM,
  replaceIssuerKey,
  revokeTokens,
  SIGNING_ALGORITHM,
  TOKEN_DAYS_MAX,
} from "../keys/signing-keys.ts";
import { openStore } from "../storage/open.ts";
import type { Store } from "../storage/store.ts";
import { lacksDatabase, openGatewayStore, prepareMasterKeys, requireMasterKeys } from "./open.ts";

interface TokenRequest {
  readonly tenant: string;
  readonly user: string;
  /** Space-separated; null for none. */
  readonly scope: string | null;
  readonly ttlSeconds: number;
}

const TTL_DEFAULT = "12h";
const UNIT_SECONDS: Readonly<Record<string, number>> = { s: 1, m: 60, h: 3600, d: 86_400 };
/** RFC 6749, section 3.3. */
const SCOPE = /^[\x21\x23-\x5B\x5D-\x7E]+( [\x21\x23-\x5B\x5D-\x7E]+)*$/;

const PRINCIPAL_MUST = "must be given: a text of at most 256 characters without control characters";

function remoteIssuerProblems(config: Config | null): string[] {
  if (config === null || config.identity.oidc === null) return [];
  return ["TOLLGATE_OIDC_ISSUER must be unset: with it only the tokens of that issuer are accepted"];
}

/** The request that the flags make, or null and every problem that they have or that forbids tokens. */
export function readTokenRequest(
  flags: ReadonlyMap<string, string>,
  config: Config | null,
): { readonly request: TokenRequest | null; readonly problems: readonly string[] } {
  const problems = remoteIssuerProblems(config);
  const tenant = flags.get("tenant");
  const user = flags.get("user");
  const scope = flags.get("scope") ?? null;
  const ttlSeconds = readTtl(flags.get("ttl") ?? TTL_DEFAULT);
  if (!isPrincipal(tenant)) problems.push(`--tenant ${PRINCIPAL_MUST}`);
  if (!isPrincipal(user)) problems.push(`--user ${PRINCIPAL_MUST}`);
  if (scope !== null && !SCOPE.test(scope)) problems.push("--scope must be scopes with one space between them");
  if (ttlSeconds === null) {
    problems.push(`--ttl must be a time like 90s, 30m, 12h or 7d, at most ${TOKEN_DAYS_MAX}d`);
  }
  const complete = isPrincipal(tenant) && isPrincipal(user) && ttlSeconds !== null && problems.length === 0;
  return { request: complete ? { tenant, user, scope, ttlSeconds } : null, problems };
}

function readTtl(text: string): number | null {
  const [, count = "", unit = ""] = /^(\d{1,9})([smhd])$/.exec(text) ?? [];
  const seconds = Number(count) * (UNIT_SECONDS[unit] ?? 0);
  return seconds > 0 && seconds <= TOKEN_DAYS_MAX * 86_400 ? seconds : null;
}

/** @throws StartupProblem */
export async function mintToken(config: Config, request: TokenRequest, log: Log): Promise<string> {
  const isNew = lacksDatabase(config);
  const { keys } = prepareMasterKeys(config, log);
  const store = await openStore({ ...config, log, clock: systemClock });
  try {
    const keyring = await openKeyring(store, keys, systemClock);
    if (isNew)
      process.stderr.write(`tollgate token has made a new database, ${join(config.dataDir, DATABASE_FILE)}: \
only a gateway with this data directory accepts the token\n`);
    const { kid, privateKey } = keyring.signingKey("issuer");
    const { claims } = config.identity;
    const now = Math.floor(systemClock.now() / 1000);
    const payload = {
      [claims.tenant]: request.tenant,
      [claims.user]: request.user,
      ...(request.scope === null ? {} : { [claims.scope]: request.scope }),
      [REVOCATION_CLAIM]: keyring.revocations.newest(),
    };
    return await new SignJWT(payload)
      .setProtectedHeader({ alg: SIGNING_ALGORITHM, kid, typ: "JWT" })
      .setIssuer(LOCAL_ISSUER)
      .setAudience(LOCAL_ISSUER)
      .setIssuedAt(now)
      .setExpirationTime(now + request.ttlSeconds)
      .setJti(crypto.randomUUID())
      .sign(privateKey);
  } finally {
    await store.close();
  }
}

type RevokeRequest =
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
