// `tollgate token` signs a token with the key of the local issuer. The key is in the database, so the command works beside a
// running gateway and before the first start. `tollgate token revoke` revokes the tokens that a tenant or one of its users has
// so far; with --all, all tokens, even those forged with a stolen key of the issuer.
import { join } from "node:path";
import { SignJWT } from "jose";
import type { Config } from "../config.ts";
import { READ_BODY_SCOPE } from "../core/call.ts";
import type { Log } from "../core/log.ts";
import { didYouMean } from "../core/text.ts";
import { systemClock } from "../core/time.ts";
import { isPrincipal, LOCAL_ISSUER } from "../gateway/identity/identity.ts";
import { openKeyring } from "../keys/keyring.ts";
import { DATABASE_FILE } from "../keys/master-keys.ts";
import * as keys from "../keys/signing-keys.ts";
import { begin, type CommandLine, type CommandOutcome, neededFlag, shownWord } from "./command-line.ts";
import * as place from "./open.ts";
import { disagreement, requireAgreement } from "./terminal/interactive.ts";

interface TokenRequest {
  readonly tenant: string;
  readonly user: string;
  /** Space-separated; null for none. */
  readonly scope: string | null;
  readonly ttlSeconds: number;
}

const TTL_DEFAULT = "12h";
const PRINCIPAL_IS = "a text of at most 256 characters without control characters";
const UNIT_SECONDS: Readonly<Record<string, number>> = { s: 1, m: 60, h: 3600, d: 86_400 };
/** RFC 6749, section 3.3. */
const SCOPE = /^[\x21\x23-\x5B\x5D-\x7E]+( [\x21\x23-\x5B\x5D-\x7E]+)*$/;

function remoteIssuerProblems({ identity }: Config): readonly string[] {
  if (identity.oidc === null) return [];
  return ["TOLLGATE_OIDC_ISSUER must be unset: while it is set, the gateway accepts only the tokens of that issuer"];
}

export async function token(line: CommandLine): Promise<string> {
  const request = readTokenRequest(line);
  const { config, log } = begin(line, "token", remoteIssuerProblems);
  for (const scope of request.scope?.split(" ") ?? []) warnOfScope(scope, config);
  return `${await mintToken(config, request, log)}\n`;
}

/** Warns of a scope that is nearly one that the gateway reads. Any other may be for the gateway's upstreams. */
function warnOfScope(scope: string, { manageScope }: Config): void {
  const known = [READ_BODY_SCOPE, ...(manageScope === null ? [] : [manageScope])];
  const meant = known.includes(scope) ? "" : didYouMean(scope, known);
  if (meant !== "") process.stderr.write(`warning: the gateway reads no scope ${scope}${meant}\n`);
}

function readTokenRequest(line: CommandLine): TokenRequest {
  const [tenant, user] = [readPrincipal(line, "tenant"), readPrincipal(line, "user")];
  const scope = line.flags.get("scope") ?? null;
  if (scope !== null && !SCOPE.test(scope))
    line.problems.push('--scope must be one or more scopes with one space between them, such as "read write"');
  const ttl = line.flags.get("ttl") ?? TTL_DEFAULT;
  const [, count = "", unit = ""] = /^(\d{1,9})([smhd])$/.exec(ttl) ?? [];
  const ttlSeconds = Number(count) * (UNIT_SECONDS[unit] ?? 0);
  const most = keys.TOKEN_DAYS_MAX;
  if (ttlSeconds === 0 || ttlSeconds > most * 86_400) {
    const why = unit === "" ? "none" : ttlSeconds === 0 ? "no time at all" : "longer";
    line.problems.push(`--ttl must be a time like 90s, 30m, 12h or 7d, at most ${most}d: ${shownWord(ttl)} is ${why}`);
  }
  return { tenant, user, scope, ttlSeconds };
}

export function readPrincipal(line: CommandLine, flag: string): string {
  const value = neededFlag(line, flag, PRINCIPAL_IS);
  if (value === "" || isPrincipal(value)) return value;
  line.problems.push(`--${flag} must be ${PRINCIPAL_IS}`);
  return "";
}

/** Signs a token, for which a missing database is created. @throws StartupProblem when database or key can't be used */
export async function mintToken(config: Config, request: TokenRequest, log: Log): Promise<string> {
  const isNew = place.lacksDatabase(config);
  // Before a master key is made, which must not come to lie beside a facilitator's database.
  await place.requireOwnDataDir("gateway", config);
  const masterKeys = place.prepareMasterKeys(config, log).keys;
  return place.withStore(place.openStoreOf("gateway", config, log), async (store) => {
    const keyring = await openKeyring(store, masterKeys, systemClock);
    if (isNew)
      process.stderr.write(`tollgate token has created a new database, ${join(config.dataDir, DATABASE_FILE)}: \
only a gateway with this data directory accepts the token\n`);
    const { kid, privateKey } = keyring.signingKey("issuer");
    const { claims } = config.identity;
    const now = Math.floor(systemClock.now() / 1000);
    const payload = {
      [claims.tenant]: request.tenant,
      [claims.user]: request.user,
      ...(request.scope === null ? {} : { [claims.scope]: request.scope }),
      [keys.REVOCATION_CLAIM]: keyring.revocations.newest(),
    };
    return new SignJWT(payload)
      .setProtectedHeader({ alg: keys.SIGNING_ALGORITHM, kid, typ: "JWT" })
      .setIssuer(LOCAL_ISSUER)
      .setAudience(LOCAL_ISSUER)
      .setIssuedAt(now)
      .setExpirationTime(now + request.ttlSeconds)
      .setJti(crypto.randomUUID())
      .sign(privateKey);
  });
}

export async function revoke(line: CommandLine): Promise<CommandOutcome> {
  const { flags } = line;
  const isForAll = flags.has("all");
  if (isForAll) requireAgreement(line);
  if (isForAll && (flags.has("tenant") || flags.has("user")))
    line.problems.push("--all can't be combined with --tenant or --user: it revokes the tokens of every tenant");
  const missing =
    "--tenant is missing: name the tenant whose tokens to revoke, or give --all for those of every tenant";
  if (!isForAll && !flags.has("tenant")) line.problems.push(missing);
  const tenant = isForAll ? "" : readPrincipal(line, "tenant");
  const user = isForAll || !flags.has("user") ? null : readPrincipal(line, "user");
  const { config, log } = begin(line, "token", remoteIssuerProblems);
  const disagreed = isForAll ? await disagreement(line, "This revokes every token of every tenant.") : null;
  if (disagreed !== null) return disagreed;
  await place.withStore(place.openGatewayStore(config, log), async (store) => {
    if (!isForAll) {
      await keys.revokeTokens(store, tenant, user);
      return place.warnOfUnknownTenant(store, tenant);
    }
    const masterKeys = place.requireMasterKeys(config, log);
    await openKeyring(store, masterKeys, store.clock);
    await keys.replaceIssuerKey(store, masterKeys);
  });
  const whose = isForAll ? "" : ` to ${user === null ? "all users" : `user ${user}`} of tenant ${tenant}`;
  return `all tokens issued so far${whose} are refused within two seconds\n`;
}
