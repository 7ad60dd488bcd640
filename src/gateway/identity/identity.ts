// The caller, by the bearer token (RFC 6750) of the local issuer or of an OIDC issuer. A token's signature is checked
// once. After that the token is known until it expires or the issuer's keys change. Also the scope that a request needs.
import {
  type CryptoKey,
  decodeJwt,
  decodeProtectedHeader,
  errors,
  type JWTPayload,
  type JWTVerifyOptions,
  jwtVerify,
} from "jose";
import type { Caller } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { hasControls } from "../../core/text.ts";
import type { Clock } from "../../core/time.ts";
import { pathPattern } from "../../http/elysia.ts";
import { STRANGERS } from "../../http/server.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { turnOf } from "../../kernel/turns.ts";
import type { Keyring } from "../../keys/keyring.ts";
import { madeAfter } from "../../keys/revocations.ts";
import { SIGNING_ALGORITHM } from "../../keys/signing-keys.ts";
import { type IssuerKeySource, type Keys, type LocalKeyring, localKeys, openIssuerKeys } from "./issuer-keys.ts";

/** Issuer and audience of the tokens that the local issuer signs. */
export const LOCAL_ISSUER = "tollgate";

const SKEW_SECONDS = 60;
const RETRY_AFTER_SECONDS = 10;

const REMOTE_ALGORITHMS = [
  ...["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"],
  ...["ES256", "ES384", "ES512", "EdDSA", "Ed25519"],
];

interface ClaimNames {
  readonly tenant: string;
  readonly user: string;
  readonly scope: string;
}

export interface IdentityOptions {
  readonly claims: ClaimNames;
  /** Null for the local issuer. */
  readonly oidc: {
    readonly issuer: string;
    readonly audience: string;
    readonly jwksUrl: string | null;
  } | null;
  readonly keyring: LocalKeyring;
  /** GET with bounded time and size; throws for any answer but 200 with JSON. */
  readonly fetchJson: (url: string) => Promise<unknown>;
  /** Only for the times in a token. */
  readonly clock: Clock;
  readonly log: Log;
  /** Milliseconds of a clock that never goes back. */
  readonly now?: () => number;
}

interface Known {
  readonly caller: Caller;
  /** The keys that it was verified with. When the keys change, the token must be checked again. */
  readonly keys: Keys;
  /** The newest revocation of the time when it was made. */
  readonly madeAfter: number;
  /** The newest revocation that is known not to concern it. */
  heldAgainst: number;
  /** When its `exp` has passed: milliseconds since the epoch. */
  readonly until: number;
}

interface Issuer {
  readonly name: string;
  readonly audience: string;
  readonly algorithms: readonly string[];
}

export function createIdentity(options: IdentityOptions) {
  const known = tenantCache<string, Known>(MAX.tokensCharacters);
  const { issuer, keys, revocations } = openIssuer(options);
  const { clock, claims } = options;

  async function judge(authorization: string): Promise<Caller> {
    // Until the check the tenant is unknown, so all strangers share one tenant's part of the event loop.
    await turnOf(STRANGERS);
    const token = bearerToken(authorization);
    precheck(token, issuer, clock.now());
    // After a pause the keys are looked at again, and are mostly the same.
    if ((await keys.settled()) !== null) {
      const caller = remembered(authorization);
      if (caller !== null) return caller;
    }
    const { payload, keys: used } = await verify(token, issuer, keys, clock);
    const caller = readCaller(payload, claims);
    // jwtVerify has checked that `exp` is there.
    const until = ((payload.exp ?? 0) + SKEW_SECONDS) * 1000;
    const entry = { caller, keys: used, until, madeAfter: madeAfter(payload), heldAgainst: Number.NaN };
    if (isRevoked(entry)) throw refused("revoked");
    known.set(caller.tenant, authorization, entry, authorization.length);
    return caller;
  }

  /** Null when the token must be checked. @throws Fault when it was revoked */
  function remembered(authorization: string): Caller | null {
    const seen = known.get(authorization);
    if (seen === undefined || clock.now() >= seen.until || keys.fresh() !== seen.keys) return null;
    if (isRevoked(seen)) throw refused("revoked");
    return seen.caller;
  }

  /** Looked up once for each token and revocation. */
  function isRevoked(entry: Known): boolean {
    const newest = revocations?.newest() ?? 0;
    if (entry.heldAgainst === newest) return false;
    const { tenant, user } = entry.caller;
    if (revocations?.isRevoked(tenant, user, entry.madeAfter) === true) return true;
    entry.heldAgainst = newest;
    return false;
  }

  return {
    /**
     * The caller that an `Authorization` header names: at once for a token that is known, else after its check.
     *
     * @throws Fault `unauthenticated`, at once or as rejection; `unavailable` when the token can't be judged
     *   because the issuer's keys could not be fetched yet: the same token may be valid in a moment.
     */
    authenticate(authorization: string | null): Caller | Promise<Caller> {
      if (authorization === null) throw refused("no token");
      return remembered(authorization) ?? judge(authorization);
    },
  };
}

export type Identity = ReturnType<typeof createIdentity>;

interface OpenIssuer {
  readonly issuer: Issuer;
  readonly keys: IssuerKeySource;
  /** Null where the issuer is a remote one. */
  readonly revocations: Keyring["revocations"] | null;
}

function openIssuer(options: IdentityOptions): OpenIssuer {
  const { oidc, keyring, fetchJson, log, now } = options;
  if (oidc === null) {
    const issuer = { name: LOCAL_ISSUER, audience: LOCAL_ISSUER, algorithms: [SIGNING_ALGORITHM] };
    return { issuer, keys: localKeys(keyring), revocations: keyring.revocations };
  }
  const keys = openIssuerKeys({ ...oidc, fetchJson, log, ...(now !== undefined && { now }) });
  // The first request should not have to wait, and a wrong issuer should show in the log at start.
  keys.fresh();
  const issuer = { name: oidc.issuer, audience: oidc.audience, algorithms: REMOTE_ALGORITHMS };
  return { issuer, keys, revocations: null };
}

function refused(reason: string, cause?: unknown): Fault {
  return new Fault("unauthenticated", "a valid bearer token is required", {
    cause: new Error(reason, cause === undefined ? undefined : { cause }),
  });
}

/** The message of a refusal is the reason for the log. */
class Refusal extends Error {}

/** The reason in our words: the library's may quote what the token says. */
function whyInvalid(error: unknown): string {
  if (error instanceof errors.JWKSNoMatchingKey) return "unknown key";
  if (error instanceof errors.JWSSignatureVerificationFailed) return "wrong signature";
  if (error instanceof errors.JWTExpired) return "expired";
  if (!(error instanceof errors.JWTClaimValidationFailed)) return "not valid";
  return { aud: "other audience", iss: "other issuer", nbf: "not yet valid" }[error.claim] ?? "not valid";
}

function bearerToken(authorization: string): string {
  if (authorization.length > MAX.tokenCharacters) throw refused("the token is too long");
  const token = /^bearer +([\w-]+\.[\w-]+\.[\w-]+)$/i.exec(authorization)?.[1];
  if (token === undefined) throw refused("not a bearer token");
  return token;
}

/**
 * Refuses tokens that no key could make valid, before any key is looked for. Otherwise old tokens of a removed key
 * would make the gateway ask the issuer again and again.
 */
function precheck(token: string, issuer: Issuer, now: number): void {
  try {
    const { alg, typ } = decodeProtectedHeader(token);
    if (alg === undefined || !issuer.algorithms.includes(alg)) throw new Refusal("other algorithm");
    if (!isAccessTokenType(typ)) throw new Refusal("other type");
    const { iss, exp, cnf } = decodeJwt(token);
    if (iss !== issuer.name) throw new Refusal("other issuer");
    // RFC 7800: such a token needs a proof that the sender holds a key, and this gateway asks for none.
    if (cnf !== undefined) throw new Refusal("bound to a key");
    if (exp === undefined || (exp + SKEW_SECONDS) * 1000 <= now) throw new Refusal("expired");
  } catch (cause) {
    throw refused(cause instanceof Refusal ? cause.message : "malformed", cause);
  }
}

/** RFC 7519, section 5.1, and RFC 9068, section 4: tokens of other types are not access tokens. */
function isAccessTokenType(typ: unknown): boolean {
  if (typ === undefined) return true;
  return typeof typ === "string" && /^(application\/)?(at\+)?jwt$/i.test(typ);
}

interface Verified {
  readonly payload: JWTPayload;
  readonly keys: Keys;
}

async function verify(token: string, issuer: Issuer, keys: IssuerKeySource, clock: Clock): Promise<Verified> {
  const found = await keys.settled();
  if (found === null) {
    throw new Fault("unavailable", "tokens can't be checked at the moment", {
      retryAfterSeconds: RETRY_AFTER_SECONDS,
    });
  }
  try {
    return await verifyWith(found, token, issuer, clock);
  } catch (error) {
    // The issuer may have just begun to use a new key, even one with the name of an old one.
    const next = mayBeNewKey(error) ? await keys.renewed(found) : null;
    if (next === null) throw refused(whyInvalid(error), error);
    try {
      return await verifyWith(next, token, issuer, clock);
    } catch (cause) {
      throw refused(whyInvalid(cause), cause);
    }
  }
}

function mayBeNewKey(error: unknown): boolean {
  return error instanceof errors.JWKSNoMatchingKey || error instanceof errors.JWSSignatureVerificationFailed;
}

async function verifyWith(keys: Keys, token: string, issuer: Issuer, clock: Clock): Promise<Verified> {
  const checks = {
    algorithms: [...issuer.algorithms],
    issuer: issuer.name,
    audience: issuer.audience,
    requiredClaims: ["exp"],
    clockTolerance: SKEW_SECONDS,
    currentDate: new Date(clock.now()),
  };
  try {
    return { payload: (await jwtVerify(token, keys, checks)).payload, keys };
  } catch (error) {
    if (!(error instanceof errors.JWKSMultipleMatchingKeys)) throw error;
    return { payload: await verifyWithAny(error, token, checks), keys };
  }
}

/** A token that names no key, or one of several of the same name: the first that verifies it counts. */
async function verifyWithAny(
  candidates: AsyncIterable<CryptoKey>,
  token: string,
  checks: JWTVerifyOptions,
): Promise<JWTPayload> {
  // A token that names no key may fit several, of which so many are tried.
  let left = 10;
  for await (const key of candidates) {
    if (left-- === 0) break;
    try {
      return (await jwtVerify(token, key, checks)).payload;
    } catch (error) {
      if (!(error instanceof errors.JWSSignatureVerificationFailed)) throw error;
    }
  }
  throw new errors.JWSSignatureVerificationFailed();
}

function readCaller(payload: JWTPayload, claims: ClaimNames): Caller {
  const tenant = payload[claims.tenant];
  const user = payload[claims.user];
  if (!isPrincipal(tenant)) throw refused("no tenant claim");
  if (!isPrincipal(user)) throw refused("no user claim");
  return { tenant, user, scopes: new Set(readScopes(payload[claims.scope])) };
}

/**
 * A name that keeps its identity on its way through the database: unpaired surrogates of two tenants would be
 * stored as the same replacement character.
 */
export function isPrincipal(value: unknown): value is string {
  return (
    typeof value === "string" &&
    value !== "" &&
    value.length <= MAX.principalCharacters &&
    value.isWellFormed() &&
    !hasControls(value)
  );
}

/** RFC 8693, section 4.2, or the array that some issuers give; anything else grants nothing. */
function readScopes(value: unknown): string[] {
  if (typeof value === "string") return value.split(" ").filter((scope) => scope !== "");
  return Array.isArray(value) ? value.filter((scope) => typeof scope === "string") : [];
}

const READING: ReadonlySet<string> = new Set(["GET", "HEAD", "OPTIONS"]);

/** Routes that need no scope: calls of agents, and reads that have the form of a write. */
const EXEMPT = [
  ["POST", "/v1/proxy/:id"],
  ["POST", "/v1/proxy/:id/stream"],
  ["DELETE", "/v1/proxy/:id/stream"],
  ["POST", "/v1/proxy/:id/invocations/:inv_id/cancel"],
  ["POST", "/v1/policy/evaluate"],
].map(([method = "", path = ""]) => ({ method, pattern: pathPattern(path) }));

/**
 * Throws Fault `forbidden` where the caller lacks the scope for managing, which every request that writes needs if the
 * operator has set one. The exempt routes are named, so a new route that writes can't be forgotten.
 *
 * @param scope null when every token of a tenant may write
 */
export function managePermission(scope: string | null) {
  return (caller: Caller, method: string, path: string): void => {
    if (scope === null || READING.has(method) || caller.scopes.has(scope)) return;
    if (EXEMPT.some((route) => route.method === method && route.pattern.test(path))) return;
    const error = `the token lacks the scope ${scope}`;
    // RFC 6750, section 3.1.
    const challenge = `Bearer error="insufficient_scope", scope="${scope}"`;
    throw new Fault("forbidden", error, {
      answer: { body: { error }, headers: { "www-authenticate": challenge } },
    });
  };
}
