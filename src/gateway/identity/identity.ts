// The caller, by the bearer token (RFC 6750) of the local issuer or of an OIDC issuer. A token's signature is checked once.
// After that the token is known until it expires or the issuer's keys change. Also the scope that a request needs.
import {
  type CryptoKey,
  createLocalJWKSet,
  decodeJwt,
  decodeProtectedHeader,
  errors,
  type JSONWebKeySet,
  type JWTPayload,
  type JWTVerifyGetKey,
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
import { madeAfter, SIGNING_ALGORITHM } from "../../keys/signing-keys.ts";

/** Issuer and audience of the tokens that the local issuer signs. */
export const LOCAL_ISSUER = "tollgate";

const SKEW_SECONDS = 60;

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
  readonly oidc: {
    readonly issuer: string;
    readonly audience: string;
    readonly jwksUrl: string | null;
  } | null;
  readonly keyring: LocalKeyring;
  /** GET with bounded time and size; throws for any answer but 200 with JSON. */
  readonly fetchJson: (url: string) => Promise<unknown>;
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
    const problem = problemOf(token, issuer, clock.now());
    if (problem !== null) throw refused(problem);
    // After a pause the keys are looked at again, and are mostly the same.
    if ((await keys.settled()) !== null) {
      const caller = remembered(authorization);
      if (caller !== null) return caller;
    }
    const { payload, keys: used } = await verify(token, issuer, keys, clock);
    const caller = readCaller(payload, claims);
    // jwtVerify has checked that `exp` is there.
    const until = ((payload.exp ?? 0) + SKEW_SECONDS) * 1000;
    const entry = { caller, keys: used, until, madeAfter: madeAfter(payload) };
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

  function isRevoked({ caller: { tenant, user }, madeAfter }: Known): boolean {
    return revocations?.isRevoked(tenant, user, madeAfter) === true;
  }

  return {
    /**
     * The caller that an `Authorization` header names: at once for a token that is known, else after its check.
     * @throws Fault `unauthenticated`, at once or as rejection; `unavailable` when the token can't be judged because the
     *   issuer's keys could not be fetched yet: the same token may be valid in a moment.
     */
    authenticate(authorization: string | null): Caller | Promise<Caller> {
      if (authorization === null) throw refused("no token");
      return remembered(authorization) ?? judge(authorization);
    },
  };
}

export type Identity = ReturnType<typeof createIdentity>;

/** There are no revocations where the issuer is a remote one. */
function openIssuer({ oidc, keyring, fetchJson, log, now }: IdentityOptions) {
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

/** Checked before any key is looked for: else old tokens of a removed key would make the gateway ask the issuer for ever. */
function problemOf(token: string, issuer: Issuer, now: number): string | null {
  try {
    const { alg, typ } = decodeProtectedHeader(token);
    if (alg === undefined || !issuer.algorithms.includes(alg)) return "other algorithm";
    if (!isAccessTokenType(typ)) return "other type";
    const { iss, exp, cnf } = decodeJwt(token);
    if (iss !== issuer.name) return "other issuer";
    // RFC 7800: such a token needs a proof that the sender holds a key, and this gateway asks for none.
    if (cnf !== undefined) return "bound to a key";
    return exp === undefined || (exp + SKEW_SECONDS) * 1000 <= now ? "expired" : null;
  } catch {
    return "malformed";
  }
}

/** RFC 7519, section 5.1, and RFC 9068, section 4: tokens of other types are not access tokens. */
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

/** A token that names no key, or one of several of the same name: the first that verifies it counts. */
async function verifyWithAny(
  candidates: AsyncIterable<CryptoKey>,
  token: string,
  checks: JWTVerifyOptions,
): Promise<JWTPayload> {
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

/** Unpaired surrogates of two tenants would be stored as the same replacement character. */
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

// The verification keys of the issuer, a remote OIDC issuer or the local one. Keys of a remote issuer are kept fresh without
// a timer: a request for the keys starts a fetch that is due. While the issuer is away the known keys stay in use, since it
// issues no tokens then and the old ones expire.

/** A key that the issuer has removed verifies nothing after this time. */
const FRESH_MS = 5 * 60_000;
/** From this age on keys are fetched again in the background, so that no request waits for it. */
const REFRESH_AFTER_MS = 4 * 60_000;
/** Keys are used for at most this long after the last answer of the issuer. */
const STALE_MAX_MS = 24 * 3_600_000;
const ASYMMETRIC = ["RSA", "EC", "OKP"];

interface IssuerKeysOptions {
  readonly issuer: string;
  readonly jwksUrl: string | null;
  readonly fetchJson: (url: string) => Promise<unknown>;
  readonly log: Log;
  /** Milliseconds of a clock that never goes back. */
  readonly now?: () => number;
}

/** Finds the key of a token. The function stays the same as long as the set of keys does. */
export type Keys = JWTVerifyGetKey;

export interface IssuerKeySource {
  /** The keys, or null when they must be fetched before use. Starts a fetch when one is due. */
  fresh(): Keys | null;
  /** Fresh keys if the issuer answers, else the known ones; null when there are none yet or they are too old. */
  settled(): Promise<Keys | null>;
  /** Other keys than these, or null: the issuer is asked again, unless it was asked a moment ago. */
  renewed(used: Keys): Promise<Keys | null>;
}

function openIssuerKeys(options: IssuerKeysOptions): IssuerKeySource {
  const { log, now = () => performance.now() } = options;
  let keys: Keys | null = null;
  let freshUntil = Number.NEGATIVE_INFINITY;
  let printed = "";
  let answeredAt = Number.NEGATIVE_INFINITY;
  let askedAt = Number.NEGATIVE_INFINITY;
  let inFlight: Promise<void> | null = null;

  function accept(set: JSONWebKeySet): void {
    const print = JSON.stringify(set);
    if (keys === null || print !== printed) keys = createLocalJWKSet(set);
    answeredAt = now();
    freshUntil = answeredAt + FRESH_MS;
    printed = print;
  }

  /** While the issuer is away, extends the keys a little at a time, so that requests do not wait for a fetch. */
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
    // Least time between two fetches, whatever tokens come in. A new key is accepted within 30 s of its publication.
    if (inFlight === null && now() - askedAt >= 10_000) {
      askedAt = now();
      inFlight = fetchKeys();
    }
    await inFlight;
  }

  function usable(): Keys | null {
    return now() < answeredAt + STALE_MAX_MS ? keys : null;
  }

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
      // Another request may have fetched them since the caller read them.
      if (usable() === used) await ask();
      const next = usable();
      return next === used ? null : next;
    },
  };
}

/** @throws Error, and what `fetchJson` throws, when the issuer has no keys that can verify a token */
export async function fetchKeySet({
  issuer,
  jwksUrl,
  fetchJson,
}: Pick<IssuerKeysOptions, "issuer" | "jwksUrl" | "fetchJson">): Promise<JSONWebKeySet> {
  const set = await fetchJson(jwksUrl ?? (await discover(issuer, fetchJson)));
  const listed = isRecord(set) ? set["keys"] : null;
  if (!Array.isArray(listed)) throw new Error("the key set has no keys");
  const keys = listed.slice(0, 100).filter(isVerificationKey);
  if (keys.length === 0) throw new Error("the key set has no key that can verify a token");
  return { keys };
}

/** OpenID Connect Discovery 1.0, section 4: the document must name the very issuer that was asked. */
async function discover(issuer: string, fetchJson: IssuerKeysOptions["fetchJson"]): Promise<string> {
  const document = await fetchJson(`${issuer.replace(/\/$/, "")}/.well-known/openid-configuration`);
  if (!isRecord(document) || document["issuer"] !== issuer) {
    throw new Error("the discovery document names another issuer");
  }
  const url = document["jwks_uri"];
  if (typeof url !== "string" || !URL.canParse(url)) throw new Error("the discovery document has no jwks_uri");
  const { protocol } = new URL(url);
  if (protocol !== "https:" && protocol !== new URL(issuer).protocol) {
    throw new Error("the jwks_uri is not as safe as the issuer");
  }
  return url;
}

/** A symmetric key in a public set would let anyone sign. */
function isVerificationKey(key: unknown): key is JSONWebKeySet["keys"][number] {
  return isRecord(key) && ASYMMETRIC.some((type) => type === key["kty"]) && key["use"] !== "enc";
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export type LocalKeyring = Pick<
  Keyring,
  "issuerJwks" | "isFresh" | "isUsable" | "refreshed" | "renewed" | "revocations"
>;

/** The keys of the local issuer. A command in another process may rotate them, so an unknown key makes the database be read. */
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
