// The one place that makes outgoing HTTP requests. The host of every request is resolved and judged, and the request goes
// to the very address that was judged, with the SNI and Host of its name. Redirects are returned as they are, and proxies
// are ignored. The client is our own for what the runtime's `fetch` loses: see connections.ts.
//
// A POST is sent once; other requests are sent again when a kept-alive connection closes without an answer. So whatever
// must not happen twice is sent as a POST.

import { type HostRules, isBadPort, isExempt, literalAddress } from "../../core/host.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import { unlessAborted } from "../../kernel/wait.ts";
import type { CallBody } from "../../wire/body.ts";
import { type Answer, requestFields } from "./answer.ts";
import { openTransport } from "./connections.ts";
import type { DialTarget } from "./exchange.ts";
import type { AnswerReadAhead } from "./read-ahead.ts";
import { createResolver, type Lookup, type Resolution } from "./resolve.ts";
import { type ClientIdentity, createTlsContexts } from "./tls-contexts.ts";

/**
 * `blocked`: the host rules refuse it. `unreached`: it certainly never reached the upstream, so it may be sent
 * again. `lost`: anything after sending may have begun.
 */
export type OutboundErrorKind = "blocked" | "unreached" | "lost";

/** The message is for the log: it names hosts and error codes, never a path, a query or a header. */
export class OutboundError extends Error {
  readonly kind: OutboundErrorKind;

  constructor(kind: OutboundErrorKind, detail: string) {
    super(detail);
    this.name = "OutboundError";
    this.kind = kind;
  }
}

export interface OutboundRequest {
  readonly method: string;
  readonly headers: ReadonlyArray<readonly [name: string, value: string]>;
  readonly body?: CallBody | null;
  /** The only time limit; its reason is what an aborted request rejects with. It covers the body too. */
  readonly signal: StopSignal;
  readonly tls?: ClientIdentity | null;
  /** Whose connections are used, and in whose turns the answer is read. Left out: the operator's. */
  readonly tenant?: string;
  /** Awaited on the connection, right before the first byte of the request leaves. Nothing has left when it rejects. */
  readonly leaving?: (() => Promise<void>) | undefined;
  /** Called when the body is not needed any more, unless it never left. May be called more than once. */
  readonly sent?: (() => void) | undefined;
  /** Called with the end of the server's certificate, in milliseconds since the epoch, where a connection is made. */
  readonly certified?: ((validTo: number) => void) | undefined;
  /** The share to which answer bytes count that arrive ahead of their reader. Left out: nobody's. */
  readonly ahead?: AnswerReadAhead | undefined;
}

export interface Outbound {
  /**
   * Resolves with the response head; the body is still encoded and must be read or cancelled.
   *
   * @throws OutboundError; the signal's reason
   */
  request(url: string, request: OutboundRequest): Promise<Answer>;
}

export interface OutboundOptions {
  /** Null for servers that the operator configured: they may be anywhere. */
  readonly rules: HostRules | null;
  /** PEM of roots that are trusted beside the usual ones. */
  readonly extraCa: string | null;
  readonly lookup?: Lookup;
}

/**
 * Codes that come only while a socket is opened. Linux has ETIMEDOUT, EHOSTUNREACH and their like for established
 * connections too, but the transport tells of whatever ends those as ECONNRESET. EBUSY is the transport's own word for
 * too many dials at once.
 */
const DIAL_FAILURES = new Set([
  "ECONNREFUSED",
  "EHOSTUNREACH",
  "EHOSTDOWN",
  "ENETUNREACH",
  "ENETDOWN",
  "ETIMEDOUT",
  "EADDRNOTAVAIL",
  "EACCES",
  "EPERM",
  "EINVAL",
  "EBUSY",
]);

/**
 * Verification of the server's certificate, which comes before the request is written. EPROTO is not one of
 * them: a TLS failure that follows the request, even after the upstream acted on it, has that code as well.
 */
const UNTRUSTED_SERVER =
  /^(CERT_|UNABLE_TO_|SELF_SIGNED_|DEPTH_ZERO_|ERR_TLS_CERT_|INVALID_CA$|INVALID_PURPOSE$|PATH_LENGTH_|HOSTNAME_)/;

function errorCode(error: unknown): string {
  if (typeof error !== "object" || error === null) return "unknown";
  if ("code" in error && typeof error.code === "string") return error.code;
  return "name" in error && typeof error.name === "string" ? error.name : "unknown";
}

/** A connection that failed after sending may have begun. */
export function lost(error: unknown): OutboundError {
  return new OutboundError("lost", `connection lost: ${errorCode(error)}`);
}

function failureAt(where: string, error: unknown): OutboundError {
  const code = errorCode(error);
  const isUnreached = DIAL_FAILURES.has(code) || UNTRUSTED_SERVER.test(code);
  return new OutboundError(isUnreached ? "unreached" : "lost", `${where}: ${code}`);
}

/** @throws OutboundError */
function toTarget(text: string): DialTarget {
  const url = URL.parse(text);
  if (url === null || (url.protocol !== "http:" && url.protocol !== "https:")) {
    throw new OutboundError("blocked", "not an http or https URL");
  }
  if (url.username !== "" || url.password !== "") {
    throw new OutboundError("blocked", "the URL carries user information");
  }
  const { host, hostname, port } = url;
  const isTls = url.protocol === "https:";
  const isName = isTls && literalAddress(hostname) === null;
  const serverName = isName ? hostname.replace(/\.+$/, "") : null;
  return { isTls, host, hostname, port, path: `${url.pathname}${url.search}`, serverName };
}

/** @throws OutboundError */
function fieldsOf(pairs: OutboundRequest["headers"]): string {
  try {
    return requestFields(pairs);
  } catch {
    throw new OutboundError("unreached", "a header holds characters that can't be sent");
  }
}

export function createOutbound(options: OutboundOptions): Outbound {
  const { rules, lookup } = options;
  const resolve = createResolver({ rules, lookup });
  const contextOf = createTlsContexts(options.extraCa);
  const transport = openTransport();
  /** A URL is mostly one of many calls: to take it apart takes 1 µs of each. */
  const targets = tenantCache<string, DialTarget>(MAX.targets);

  function targetOf(text: string, tenant: string): DialTarget {
    const known = targets.get(text);
    if (known !== undefined) return known;
    const target = toTarget(text);
    targets.set(tenant, text, target);
    return target;
  }

  function judged(resolution: Resolution, { hostname, port }: DialTarget): readonly string[] {
    if (!resolution.ok) throw new OutboundError(resolution.kind, `${hostname}: ${resolution.detail}`);
    const { addresses } = resolution;
    if (rules === null || !isBadPort(port)) return addresses;
    if (addresses.every((address) => isExempt(hostname, address, rules))) return addresses;
    throw new OutboundError("blocked", `${hostname}: port ${port} is not allowed`);
  }

  return {
    async request(text, request) {
      const { method, body = null, signal, tls = null, tenant = "", leaving, sent, certified, ahead } = request;
      signal.throwIfAborted();
      const target = targetOf(text, tenant);
      const fields = fieldsOf(request.headers);
      const pending = resolve(target.hostname, tenant);
      const resolution = pending instanceof Promise ? await unlessAborted(signal, pending) : pending;
      const addresses = judged(resolution, target);
      const tlsContext = contextOf(tenant, tls);
      let failure: unknown = null;
      for (const address of addresses.slice(0, 4)) {
        try {
          const parts = { target, address, method, fields, body, signal, tenant, tlsContext };
          return await transport.send({ ...parts, leaving, sent, certified, ahead });
        } catch (error) {
          signal.throwIfAborted();
          failure = failureAt(`${target.hostname} at ${address}`, error);
          // The next address is tried after a failed dial only.
          if (!DIAL_FAILURES.has(errorCode(error))) break;
        }
      }
      throw failure ?? new OutboundError("unreached", "no address");
    },
  };
}

/**
 * Sends a request again as long as it certainly never reached the upstream. Resolves with the response head, as
 * `outbound.request` does.
 *
 * @throws OutboundError; the signal's reason
 */
export function requestSafely(outbound: Outbound, url: string, request: OutboundRequest): Promise<Answer> {
  // The first time without a frame that waits: most requests need no more.
  return outbound.request(url, request).catch((error) => again(outbound, url, request, error));
}

async function again(outbound: Outbound, url: string, request: OutboundRequest, first: unknown): Promise<Answer> {
  const { signal } = request;
  let failure = first;
  for (const pause of [100, 400]) {
    const isSafe = failure instanceof OutboundError && failure.kind === "unreached";
    if (!isSafe || signal.aborted) throw failure;
    await sleep(pause, signal);
    try {
      return await outbound.request(url, request);
    } catch (error) {
      failure = error;
    }
  }
  throw failure;
}

function sleep(ms: number, signal: StopSignal): Promise<void> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const onAbort = () => {
    clearTimeout(timer);
    reject(signal.reason);
  };
  const timer = setTimeout(() => {
    signal.removeEventListener("abort", onAbort);
    resolve();
  }, ms);
  signal.addEventListener("abort", onAbort, { once: true });
  return promise;
}

/** Seconds; the other form of Retry-After is a date by the server's clock (RFC 9110 section 10.2.3). */
const SECONDS = /^\d{1,9}$/;

/**
 * When to come again, in milliseconds from now; null where Retry-After says nothing that can be read. Never more than `mostMs`, whatever the server or a
 * clock says.
 *
 * @param value of the header
 * @param now milliseconds since the epoch
 */
export function retryAfterMs(value: string | null, now: number, mostMs: number): number | null {
  if (value === null) return null;
  const text = value.trim();
  const ms = SECONDS.test(text) ? Number(text) * 1000 : Date.parse(text) - now;
  return Number.isNaN(ms) ? null : Math.min(Math.max(ms, 0), mostMs);
}
