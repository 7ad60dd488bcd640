// The one place that makes outgoing HTTP requests. The host of every request is resolved and judged, and the request goes
// to the very address that was judged, with the SNI and Host of its name. Redirects are returned as they are, and proxies
// are ignored.
//
// A POST is sent once; other requests are sent again when a kept-alive connection closes without an answer. So whatever
// must not happen twice is sent as a POST.
import { unlessAborted } from "../concurrency/deadline.ts";
import { isBadPort } from "../core/blocked-ports.ts";
import { type HostRules, isExempt } from "../core/host.ts";
import { literalAddress } from "../core/host-list.ts";
import type { CallBody } from "../wire/body.ts";
import { openTransport } from "./connections.ts";
import type { AnswerReadAhead } from "./read-ahead.ts";
import { createResolver, type Lookup } from "./resolve.ts";
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
  readonly signal: AbortSignal;
  readonly tls?: ClientIdentity | null;
  /** Whose connections are used, and in whose turns the answer is read. Left out: the operator's. */
  readonly tenant?: string;
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
  request(url: string, request: OutboundRequest): Promise<Response>;
}

export interface OutboundOptions {
  /** Null for servers that the operator configured: they may be anywhere. */
  readonly rules: HostRules | null;
  /** PEM of roots that are trusted beside the usual ones. */
  readonly extraCa: string | null;
  readonly lookup?: Lookup;
}

interface DialTarget {
  readonly url: URL;
  /** The name for SNI and certificate, without the dots at its end (RFC 6066 section 3). */
  readonly serverName: string | null;
}

const DIALS_MAX = 4;

/**
 * Codes that come only while a socket is opened. Linux has ETIMEDOUT, EHOSTUNREACH and their like for established
 * connections too, but the transport tells of whatever ends those as ECONNRESET.
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
]);

/**
 * Verification of the server's certificate, which comes before the request is written. EPROTO is not one of
 * them: a TLS failure that follows the request, even after the upstream acted on it, has that code as well.
 */
const UNTRUSTED_SERVER =
  /^(CERT_|UNABLE_TO_|SELF_SIGNED_|DEPTH_ZERO_|ERR_TLS_CERT_|INVALID_CA$|INVALID_PURPOSE$|PATH_LENGTH_|HOSTNAME_)/;

/** This module manages connections, whatever headers a caller passes. */
const OWNED_HEADERS = new Set([
  "host",
  "connection",
  "keep-alive",
  "content-length",
  "transfer-encoding",
  "te",
  "trailer",
  "upgrade",
  "expect",
]);

function errorCode(error: unknown): string {
  if (typeof error !== "object" || error === null) return "unknown";
  if ("code" in error && typeof error.code === "string") return error.code;
  return "name" in error && typeof error.name === "string" ? error.name : "unknown";
}

/** A connection that failed after sending may have begun. */
export function lost(error: unknown): OutboundError {
  return new OutboundError("lost", `connection lost: ${errorCode(error)}`);
}

function toTarget(text: string): DialTarget {
  const url = URL.parse(text);
  if (url === null || (url.protocol !== "http:" && url.protocol !== "https:")) {
    throw new OutboundError("blocked", "not an http or https URL");
  }
  if (url.username !== "" || url.password !== "") {
    throw new OutboundError("blocked", "the URL carries user information");
  }
  const isName = url.protocol === "https:" && literalAddress(url.hostname) === null;
  return { url, serverName: isName ? url.hostname.replace(/\.+$/, "") : null };
}

/** A transport would add a User-Agent of its own and ask for encodings; `identity` asks for none. */
function toHeaders(target: DialTarget, pairs: OutboundRequest["headers"]): Headers {
  const headers = new Headers({ accept: "*/*", "user-agent": "tollgate", "accept-encoding": "identity" });
  const given = new Set<string>();
  try {
    for (const [name, value] of pairs) {
      const key = name.toLowerCase();
      if (OWNED_HEADERS.has(key)) continue;
      if (given.has(key)) headers.append(key, value);
      else headers.set(key, value);
      given.add(key);
    }
  } catch {
    // The message of the cause quotes the value, which may be a secret.
    throw new OutboundError("unreached", "a header holds characters that can't be sent");
  }
  headers.set("host", target.url.host);
  return headers;
}

export function createOutbound(options: OutboundOptions): Outbound {
  const { rules, lookup } = options;
  const resolve = createResolver({ rules, lookup });
  const contextOf = createTlsContexts(options.extraCa);
  const transport = openTransport();

  async function addressesOf({ hostname, port }: URL, tenant: string, signal: AbortSignal) {
    const pending = resolve(hostname, tenant);
    const resolution = pending instanceof Promise ? await unlessAborted(signal, pending) : pending;
    if (!resolution.ok) throw new OutboundError(resolution.kind, `${hostname}: ${resolution.detail}`);
    const { addresses } = resolution;
    if (rules === null || !isBadPort(port)) return addresses;
    if (addresses.every((address) => isExempt(hostname, address, rules))) return addresses;
    throw new OutboundError("blocked", `${hostname}: port ${port} is not allowed`);
  }

  return {
    async request(text, { method, headers: pairs, body = null, signal, tls = null, tenant = "", ...rest }) {
      signal.throwIfAborted();
      const target = toTarget(text);
      const headers = toHeaders(target, pairs);
      const addresses = await addressesOf(target.url, tenant, signal);
      const tlsContext = contextOf(tenant, tls);
      let failure: OutboundError | null = null;
      for (const address of addresses.slice(0, DIALS_MAX)) {
        try {
          return await transport.send({
            url: target.url,
            address,
            method,
            headers,
            body,
            signal,
            tenant,
            serverName: target.serverName,
            tlsContext,
            ...rest,
          });
        } catch (error) {
          signal.throwIfAborted();
          const code = errorCode(error);
          const isUnreached = DIAL_FAILURES.has(code) || UNTRUSTED_SERVER.test(code);
          failure = new OutboundError(
            isUnreached ? "unreached" : "lost",
            `${target.url.hostname} at ${address}: ${code}`,
          );
          // The next address is tried after a failed dial only.
          if (!DIAL_FAILURES.has(code)) break;
        }
      }
      throw failure ?? new OutboundError("unreached", "no address");
    },
  };
}
