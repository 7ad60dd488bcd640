// Authenticates callers by a bearer token (RFC 6750) of the local issuer or of an OIDC issuer, and checks the scope that a
// request needs. A token's signature is verified once; its caller is then cached until the token expires or the issuer's keys
// change. The last part of the file keeps the issuer's keys.
import type { CryptoKey, JSONWebKeySet, JWTPayload, JWTVerifyGetKey, JWTVerifyOptions } from "jose";
import { createLocalJWKSet, decodeJwt, decodeProtectedHeader, errors, jwtVerify } from "jose";
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
import { madeAfter, SIGNING_ALGORITHM } from "../../keys/signing-keys.ts";
import { isJsonObject } from "../../wire/json.ts";

/** Issuer and audience of the tokens that the local issuer signs. */
export const LOCAL_ISSUER = "tollgate";

/** Tolerated difference between the issuer's clock and the gateway's. */
const SKEW_SECONDS = 60;

/** Why a token is refused. Only the log shows it (field `why`), in fixed words that quote nothing of the token. */
export const TOKEN_PROBLEMS = [
  "no token",
  "not a bearer token",
  "too long",
  "malformed",
  "other issuer",
  "other algorithm",
  "other type",
  "bound to a key",
  "no expiry",
  "expired",
  "not yet valid",
  "other audience",
  "unknown key",
  "wrong signature",
  "not valid",
  "no tenant claim",
  "no user claim",
  "revoked",
] as const;
type TokenProblem = (typeof TOKEN_PROBLEMS)[number];

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
  readonly oidc: { readonly issuer: string; readonly audience: string; readonly jwksUrl: string | null } | null;
  readonly keyring: LocalKeyring;
  /** Makes a GET with bounded time and size; throws for any answer but a 200 with JSON. */
  readonly fetchJson: (url: string) => Promise<unknown>;
  readonly clock: Clock;
  readonly log: Log;
  /** Milliseconds of a monotonic clock. */
  readonly now?: () => number;
}

interface VerifiedToken {
  readonly caller: Caller;
  /** The keys that the token was verified with. When the keys change, the token must be verified again. */
  readonly keys: Keys;
  /** Number of the newest revocation when the token was issued. */
  readonly madeAfter: number;
  /** When the token expires, in milliseconds since the epoch. */
  readonly until: number;
}

interface Issuer {
  readonly name: string;
  readonly audience: string;
  readonly algorithms: readonly string[];
}

export function createIdentity(options: IdentityOptions) {
  const verified = tenantCache<string, VerifiedToken>(MAX.tokensCharacters);
  const { issuer, keys, revocations } = openIssuer(options);
  const { clock, claims } = options;

  async function verifyCaller(authorization: string): Promise<Caller> {
    // The tenant is not known before the check, so all unverified tokens share one tenant's part of the event loop.
    await turnOf(STRANGERS);
    const token = bearerToken(authorization);
    const problem = problemOf(token, issuer, clock.now());
    if (problem !== null) throw refused(problem);
    // Keys that were no longer fresh have been fetched again, usually unchanged: then the cached caller is still valid.
    if ((await keys.settled()) !== null) {
      const caller = cachedCaller(authorization);
      if (caller !== null) return caller;
    }
    const { payload, keys: used } = await verify(token, issuer, keys, clock);
    const caller = readCaller(payload, claims);
    // jwtVerify requires `exp`.
    const until = ((payload.exp ?? 0) + SKEW_SECONDS) * 1000;
    const entry = { caller, keys: used, until, madeAfter: madeAfter(payload) };
    if (isRevoked(entry)) throw refused("revoked");
    verified.set(caller.tenant, authorization, entry, authorization.length);
    return caller;
  }

  /** Null when the token must be verified. @throws Fault `unauthenticated` when the token was revoked */
  function cachedCaller(authorization: string): Caller | null {
    const token = verified.get(authorization);
    if (token === undefined || clock.now() >= token.until || keys.fresh() !== token.keys) return null;
    if (isRevoked(token)) throw refused("revoked");
    return token.caller;
  }

  const isRevoked = ({ caller: { tenant, user }, madeAfter }: VerifiedToken): boolean =>
    revocations?.isRevoked(tenant, user, madeAfter) === true;

  return {
    /**
     * Returns the caller that an `Authorization` header names: synchronously if the token is cached, else a promise.
     * @throws Fault `unauthenticated`, synchronously or as a rejection; `unavailable` when the issuer's keys could not be
     *   fetched yet, so that the token may be valid after all
     */
    authenticate(authorization: string | null): Caller | Promise<Caller> {
      if (authorization === null) throw refused("no token");
      return cachedCaller(authorization) ?? verifyCaller(authorization);
    },
  };
}

export type Identity = ReturnType<typeof createIdentity>;

/** Opens the local issuer or the OIDC one. Only the local issuer has revocations. */
function openIssuer({ oidc, keyring, fetchJson, log, now }: IdentityOptions) {
  if (oidc === null) {
    const issuer = { name: LOCAL_ISSUER, audience: LOCAL_ISSUER, algorithms: [SIGNING_ALGORITHM] };
    return { issuer, keys: localKeys(keyring), revocations: keyring.revocations };
  }
  const keys = openIssuerKeys({ ...oidc, fetchJson, log, ...(now !== undefined && { now }) });
  // Fetch at the start, so that the first request need not wait and a wrong issuer shows in the log.
  keys.fresh();
  const issuer = { name: oidc.issuer, audience: oidc.audience, algorithms: REMOTE_ALGORITHMS };
  return { issuer, keys, revocations: null };
}

function refused(reason: TokenProblem, cause?: unknown): Fault {
  return new Fault("unauthenticated", "a valid bearer token is required", {
    cause: new Error(reason, cause === undefined ? undefined : { cause }),
  });
}

/** Why `jwtVerify` refused a token, in our own words: the library's message may quote the token. */
function whyInvalid(error: unknown): TokenProblem {
  if (error instanceof errors.JWKSNoMatchingKey) return "unknown key";
  if (error instanceof errors.JWSSignatureVerificationFailed) return "wrong signature";
  if (error instanceof errors.JWTExpired) return "expired";
  if (!(error instanceof errors.JWTClaimValidationFailed)) return "not valid";
  return PROBLEMS_OF_CLAIMS[error.claim] ?? "not valid";
}

const PROBLEMS_OF_CLAIMS: Readonly<Record<string, TokenProblem>> = {
  aud: "other audience",
  iss: "other issuer",
  nbf: "not yet valid",
};

function bearerToken(authorization: string): string {
  if (authorization.length > MAX.tokenCharacters) throw refused("too long");
  const token = /^bearer +([\w-]+\.[\w-]+\.[\w-]+)$/i.exec(authorization)?.[1];
  if (token === undefined) throw refused("not a bearer token");
  return token;
}

/** The checks that need no key. They come first: else expired tokens of a removed key would keep us asking the issuer. */
function problemOf(token: string, issuer: Issuer, now: number): TokenProblem | null {
  try {
    const { alg, typ } = decodeProtectedHeader(token);
    const { iss, exp, cnf } = decodeJwt(token);
    // The issuer is compared first: a token of another one often has another algorithm and type too, which would say less.
    if (iss !== issuer.name) return "other issuer";
    if (alg === undefined || !issuer.algorithms.includes(alg)) return "other algorithm";
    if (!isAccessTokenType(typ)) return "other type";
    // RFC 7800: a token with `cnf` needs a proof that the sender holds a key, and this gateway asks for none.
    if (cnf !== undefined) return "bound to a key";
    if (exp === undefined) return "no expiry";
    return (exp + SKEW_SECONDS) * 1000 <= now ? "expired" : null;
  } catch {
    return "malformed";
  }
}

/** Whether `typ` is that of an access token (RFC 7519, section 5.1, and RFC 9068, section 4). */
function isAccessTokenType(typ: unknown): boolean {
  if (typ === undefined) return true;
  return typeof typ === "string" && /^(application\/)?(at\+)?jwt$/i.test(typ);
}

async function verify(token: string, issuer: Issuer, keys: IssuerKeySource, clock: Clock) {
  const found = await keys.settled();
  if (found === null) {
    throw new Fault("unavailable", "tokens can't be checked at the moment", { retryAfterSeconds: 10 });
  }
  try {
    return await verifyWith(found, token, issuer, clock).catch(async (error) => {
      // The issuer may have just begun to use a new key, even under the `kid` of an old one.
      const next = mayBeNewKey(error) ? await keys.renewed(found) : null;
      if (next === null) throw error;
      return verifyWith(next, token, issuer, clock);
    });
  } catch (cause) {
    throw refused(whyInvalid(cause), cause);
  }
}

const mayBeNewKey = (error: unknown): boolean =>
  error instanceof errors.JWKSNoMatchingKey || error instanceof errors.JWSSignatureVerificationFailed;

async function verifyWith(keys: Keys, token: string, issuer: Issuer, clock: Clock) {
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

/** Verifies a token without a `kid`, or with one that several keys share, by trying up to ten keys. */
async function verifyWithAny(candidates: AsyncIterable<CryptoKey>, token: string, checks: JWTVerifyOptions) {
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

/** Whether a claim can name a tenant or user. Unpaired surrogates are refused: different ones would be stored as one character. */
export function isPrincipal(value: unknown): value is string {
  return (
    typeof value === "string" &&
    value !== "" &&
    value.length <= MAX.principalCharacters &&
    value.isWellFormed() &&
    !hasControls(value)
  );
}

/** Scopes as a string (RFC 8693, section 4.2), or as the array that some issuers send; anything else grants nothing. */
function readScopes(value: unknown): string[] {
  if (typeof value === "string") return value.split(" ").filter((scope) => scope !== "");
  return Array.isArray(value) ? value.filter((scope) => typeof scope === "string") : [];
}

const READ_METHODS: ReadonlySet<string> = new Set(["GET", "HEAD", "OPTIONS"]);

/** Routes that need no scope although they don't use a read method: calls of agents, and reads by POST. */
const EXEMPT = [
  ["POST", "/v1/proxy/:id"],
  ["POST", "/v1/proxy/:id/stream"],
  ["DELETE", "/v1/proxy/:id/stream"],
  ["POST", "/v1/proxy/:id/invocations/:inv_id/cancel"],
  ["POST", "/v1/policy/evaluate"],
].map(([method = "", path = ""]) => ({ method, pattern: pathPattern(path) }));

/**
 * Returns a check that throws Fault `forbidden` when the caller lacks the managing scope. Every request that writes needs the
 * scope if the operator has set one. The exempt routes are listed, so that a new route is protected by default.
 * @param scope null when every token of a tenant may write
 */
export function managePermission(scope: string | null) {
  return (caller: Caller, method: string, path: string): void => {
    if (scope === null || READ_METHODS.has(method) || caller.scopes.has(scope)) return;
    if (EXEMPT.some((route) => route.method === method && route.pattern.test(path))) return;
    const error = `the token lacks the scope ${scope}`;
    // RFC 6750, section 3.1.
    const challenge = `Bearer error="insufficient_scope", scope="${scope}"`;
    throw new Fault("forbidden", error, { answer: { body: { error }, headers: { "www-authenticate": challenge } } });
  };
}

// The verification keys of the issuer, remote (OIDC) or local. A remote issuer's keys are kept fresh without a timer: a request
// that needs the keys starts a fetch when a fetch is due. While the issuer can't be reached, its last keys stay in use: the
// issuer can't issue tokens then, and old tokens expire.

/** While the issuer answers, a key that it has removed is used for at most this long. */
const FRESH_MS = 5 * 60_000;
/** Keys of this age are fetched again in the background, so that no request has to wait. */
const REFRESH_AFTER_MS = 4 * 60_000;
/** Without an answer of the issuer, the last keys are used for at most this long. */
const STALE_MAX_MS = 24 * 3_600_000;
const ASYMMETRIC = ["RSA", "EC", "OKP"];

type RemoteIssuer = Omit<NonNullable<IdentityOptions["oidc"]>, "audience">;
type IssuerKeysOptions = RemoteIssuer & Pick<IdentityOptions, "fetchJson" | "log" | "now">;

/** Finds the key of a token. A change of the key set makes a new function, so two sets can be compared by identity. */
export type Keys = JWTVerifyGetKey;

export interface IssuerKeySource {
  /** The keys; null when they must be fetched before use. Starts a background fetch when one is due. */
  fresh(): Keys | null;
  /** Fresh keys if the issuer answers, else the last ones; null when there are none yet or they are too old. */
  settled(): Promise<Keys | null>;
  /** Keys other than `used`; null when there are none. Asks the issuer again, unless that was done seconds ago. */
  renewed(used: Keys): Promise<Keys | null>;
}

function openIssuerKeys(options: IssuerKeysOptions): IssuerKeySource {
  const { log, now = () => performance.now() } = options;
  let keys: Keys | null = null;
  let freshUntil = Number.NEGATIVE_INFINITY;
  let keysJson = "";
  let answeredAt = Number.NEGATIVE_INFINITY;
  let askedAt = Number.NEGATIVE_INFINITY;
  let inFlight: Promise<void> | null = null;

  function accept(set: JSONWebKeySet): void {
    const json = JSON.stringify(set);
    if (keys === null || json !== keysJson) keys = createLocalJWKSet(set);
    answeredAt = now();
    freshUntil = answeredAt + FRESH_MS;
    keysJson = json;
  }

  /** While the issuer can't be reached, extends the use of its keys a minute at a time, so that no request waits for a fetch. */
  function extend(): void {
    const until = Math.min(now() + FRESH_MS - REFRESH_AFTER_MS, answeredAt + STALE_MAX_MS);
    freshUntil = Math.max(freshUntil, until);
  }

  async function fetchKeys(): Promise<void> {
    try {
      accept(await fetchKeySet(options));
    } catch (error) {
      log.warn("issuer_keys_not_fetched", { issuer: options.issuer, error });
      extend();
    } finally {
      inFlight = null;
    }
  }

  async function ask(): Promise<void> {
    // Ten seconds lie between two fetches, whatever tokens come in. A new key is accepted within 30 s of its publication.
    if (inFlight === null && now() - askedAt >= 10_000) {
      askedAt = now();
      inFlight = fetchKeys();
    }
    await inFlight;
  }

  const usable = (): Keys | null => (now() < answeredAt + STALE_MAX_MS ? keys : null);

  function fresh(): Keys | null {
    if (now() >= answeredAt + REFRESH_AFTER_MS) void ask();
    return now() < freshUntil ? usable() : null;
  }

  return {
    fresh,
    async settled() {
      if (now() >= freshUntil) await ask();
      return usable();
    },
    async renewed(used) {
      // Another request may have fetched new keys since the caller read `used`.
      if (usable() === used) await ask();
      const next = usable();
      return next === used ? null : next;
    },
  };
}

/** Fetches the issuer's keys. @throws Error when no key can verify a token; what `fetchJson` throws */
export async function fetchKeySet(options: RemoteIssuer & Pick<IdentityOptions, "fetchJson">): Promise<JSONWebKeySet> {
  const { issuer, jwksUrl, fetchJson } = options;
  const set = await fetchJson(jwksUrl ?? (await discover(issuer, fetchJson)));
  const listed = isJsonObject(set) ? set["keys"] : null;
  if (!Array.isArray(listed)) throw new Error("the key set has no keys");
  const keys = listed.slice(0, 100).filter(isVerificationKey);
  if (keys.length === 0) throw new Error("the key set has no key that can verify a token");
  return { keys };
}

/** Finds the URL of the keys (OpenID Connect Discovery 1.0, section 4). The document must name the issuer that was asked. */
async function discover(issuer: string, fetchJson: IssuerKeysOptions["fetchJson"]): Promise<string> {
  const document = await fetchJson(`${issuer.replace(/\/$/, "")}/.well-known/openid-configuration`);
  if (!isJsonObject(document) || document["issuer"] !== issuer) {
    throw new Error("the discovery document names another issuer");
  }
  const url = document["jwks_uri"];
  if (typeof url !== "string" || !URL.canParse(url)) throw new Error("the discovery document has no jwks_uri");
  const { protocol } = new URL(url);
  if (protocol !== "https:" && protocol !== new URL(issuer).protocol) {
    throw new Error("the jwks_uri must use https, as the issuer does");
  }
  return url;
}

/** Symmetric keys are refused: one in a public set would let anyone sign. */
const isVerificationKey = (key: unknown): key is JSONWebKeySet["keys"][number] =>
  isJsonObject(key) && ASYMMETRIC.some((type) => type === key["kty"]) && key["use"] !== "enc";

export type LocalKeyring = Pick<
  Keyring,
  "issuerJwks" | "isFresh" | "isUsable" | "refreshed" | "renewed" | "revocations"
>;

/** The keys of the local issuer. A command in another process may rotate them, so an unknown key causes a database read. */
function localKeys(keyring: LocalKeyring): IssuerKeySource {
  let jwks = keyring.issuerJwks();
  let keys: Keys = createLocalJWKSet(jwks);
  function current(): Keys {
    if (jwks === keyring.issuerJwks()) return keys;
    jwks = keyring.issuerJwks();
    keys = createLocalJWKSet(jwks);
    return keys;
  }
  return {
    fresh: () => (keyring.isFresh() ? current() : null),
    async settled() {
      await keyring.refreshed();
      return keyring.isUsable() ? current() : null;
    },
    async renewed(used) {
      await keyring.renewed();
      const next = current();
      return next === used ? null : next;
    },
  };
}
