// The verification keys of the issuer of tokens, a remote OIDC issuer or the local one. Keys of a remote issuer are kept
// fresh without a timer: a request for the keys starts a fetch that is due. While the issuer is away the known keys stay in
// use, since it issues no tokens then and the old ones expire.
import { createLocalJWKSet, type JSONWebKeySet, type JWTVerifyGetKey } from "jose";
import type { Log } from "../../core/log.ts";
import type { Keyring } from "../../keys/keyring.ts";

/** A key that the issuer has removed verifies nothing after this time. */
const FRESH_MS = 5 * 60_000;
/** From this age on keys are fetched again in the background, so that no request waits for it. */
const REFRESH_AFTER_MS = 4 * 60_000;
/** Keys are used for at most this long after the last answer of the issuer. */
const STALE_MAX_MS = 24 * 3_600_000;
const ASYMMETRIC = ["RSA", "EC", "OKP"];

interface IssuerKeysOptions {
  readonly issuer: string;
  /** Null: by discovery. */
  readonly jwksUrl: string | null;
  /** Bounded in time and size; throws for any answer but 200 with JSON. */
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

export function openIssuerKeys(options: IssuerKeysOptions): IssuerKeySource {
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

  /** Joins the fetch in flight, or starts one unless the last was just before. */
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

/**
 * The keys of the local issuer. They change when a command in another process rotates them, so a token with an unknown key
 * makes the gateway read the database once more. No token is accepted while its revocations have been unreadable for long.
 */
export function localKeys(keyring: LocalKeyring): IssuerKeySource {
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
