// The HTTP client, the one place that makes outgoing requests. It is ours because the runtime's `fetch` will not do (measured
// on Bun 1.4.5): it reads ahead of a body that nobody reads (1.4 MB of each), drops what has arrived of an answer when the
// connection closes before it was read (21 of 60 answers closed right after their first part, 42 of 60 destroyed; here none),
// does not tell a reset from a close, nor when a request has left, and dials an address that nobody has judged. A version
// of Bun whose `fetch` does none of this makes the client unnecessary.
//
// The host of every request is resolved and judged, and the request goes to the very address that was judged, with the SNI
// and Host of its name. Redirects are returned as they are, and proxies are ignored.
//
// A POST is sent once; other requests are sent again when a kept-alive connection closes without an answer. So whatever
// must not happen twice is sent as a POST.

import { networkInterfaces } from "node:os";
import {
  type Address,
  type HostRules,
  isBadPort,
  isDeniedName,
  isExempt,
  literalAddress,
  localAddresses,
  mayDial,
  parseAddress,
} from "../../core/host.ts";
import { StartupProblem } from "../../core/startup.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { createLimiter } from "../../kernel/share.ts";
import { joinInFlight } from "../../kernel/turns.ts";
import { unlessAborted, withDeadline } from "../../kernel/wait.ts";
import { readBody } from "./body.ts";
import { type ClientIdentity, createTlsContexts, openTransport } from "./connections.ts";
import { type Answer, type DialTarget, errorCode, OutboundError, type SentRequest } from "./exchange.ts";
import { bareValue } from "./response-parser.ts";

type HeaderFields = ReadonlyArray<readonly [name: string, value: string]>;

export interface OutboundRequest extends SentRequest {
  readonly headers: HeaderFields;
  readonly tls?: ClientIdentity | null;
  /** Whose connections are used, and in whose turns the answer is read. Left out: the operator's. */
  readonly tenant?: string;
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

/** The client manages connections and lengths, whatever headers a caller passes. */
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

/** Without them some servers would assume others. `identity` asks for no encoding. */
const DEFAULTS: HeaderFields = [
  ["accept", "*/*"],
  ["user-agent", "tollgate"],
  ["accept-encoding", "identity"],
];

/** A token (RFC 9110, section 5.6.2). */
const NAME = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;
/** What the Fetch standard lets stand in a value: it splits no head, and a byte can say each character. */
const VALUE = /^[^\0\r\n\u0100-\uffff]*$/;

/**
 * The header fields of a request as they go on the wire, judged as the runtime's Headers would: lines with their ends,
 * names in small letters, without the headers that the client manages.
 *
 * @throws OutboundError when one can't be sent
 */
export function requestFields(pairs: HeaderFields): string {
  const given = new Set<string>();
  let lines = "";
  for (const [name, value] of pairs) {
    const key = name.toLowerCase();
    if (OWNED_HEADERS.has(key)) continue;
    if (given.has(key)) return joinedFields(pairs);
    given.add(key);
    lines += lineOf(name, value);
  }
  for (const [name, value] of DEFAULTS) if (!given.has(name)) lines += lineOf(name, value);
  return lines;
}

function lineOf(name: string, value: string): string {
  const bare = bareValue(value);
  if (!NAME.test(name) || !VALUE.test(bare)) throw unsendable();
  return `${name.toLowerCase()}: ${bare}\r\n`;
}

/** The lines where a name comes more than once, by the runtime's rules for what becomes one field then. */
function joinedFields(pairs: HeaderFields): string {
  const headers = new Headers();
  try {
    for (const [name, value] of pairs) if (!OWNED_HEADERS.has(name.toLowerCase())) headers.append(name, value);
  } catch {
    throw unsendable();
  }
  for (const [name, value] of DEFAULTS) if (!headers.has(name)) headers.set(name, value);
  return [...headers].map(([name, value]) => `${name}: ${value}\r\n`).join("");
}

function unsendable(): OutboundError {
  return new OutboundError("unreached", "a header holds characters that can't be sent");
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

  function checkPort({ hostname, port }: DialTarget, addresses: readonly string[]): void {
    if (rules === null || !isBadPort(port)) return;
    if (addresses.every((address) => isExempt(hostname, address, rules))) return;
    throw new OutboundError("blocked", `${hostname}: port ${port} is not allowed`);
  }

  return {
    async request(text, request) {
      const { signal, tls = null, tenant = "" } = request;
      signal.throwIfAborted();
      const target = targetOf(text, tenant);
      const fields = requestFields(request.headers);
      const found = resolve(target.hostname, tenant);
      const addresses = found instanceof Promise ? await unlessAborted(signal, found) : found;
      checkPort(target, addresses);
      const tlsContext = contextOf(tenant, tls);
      let failure: unknown = null;
      for (const address of addresses.slice(0, 4)) {
        try {
          return await transport.send({ ...request, tenant, target, address, fields, tlsContext });
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
export async function requestSafely(outbound: Outbound, url: string, request: OutboundRequest): Promise<Answer> {
  const { signal } = request;
  for (const pause of [100, 400]) {
    try {
      return await outbound.request(url, request);
    } catch (error) {
      const isSafe = error instanceof OutboundError && error.kind === "unreached";
      if (!isSafe || signal.aborted) throw error;
    }
    await unlessAborted(signal, Bun.sleep(pause));
  }
  return outbound.request(url, request);
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

// Dial-time resolution: a host name becomes the addresses that may be dialled, or a reason why not. The very answers that
// were judged are dialled, so a name that changes its answers later (DNS rebinding, SSRF) gains nothing.

/** All addresses of a name; rejects when it has none. */
export type Lookup = (name: string) => Promise<ReadonlyArray<{ readonly address: string }>>;

export interface ResolveOptions {
  /** Null for the operator's own servers: any address will do. */
  readonly rules: HostRules | null;
  readonly lookup?: Lookup | undefined;
  readonly lookupTimeoutMs?: number;
  /** How long good answers are used again. */
  readonly cacheMs?: number;
}

/**
 * /etc/hosts and the resolv.conf read at the start apply, search domains too. The C library's getaddrinfo would block one
 * of a handful of threads, which file access shares, for as long as a name server is silent: four such names would stop
 * all others. Bun uses it anyway for names under .local, unless they are in capitals, which make no difference in names.
 */
const systemLookup: Lookup = (name) => Bun.dns.lookup(name.replace(/\.local$/, ".LOCAL"), { backend: "c-ares" });

/** A short word for the log: the message of a resolver error may say more than needed. */
function failureName(error: unknown): string {
  if (!(error instanceof Error)) return "failed";
  return "code" in error && typeof error.code === "string" ? error.code.replace(/^DNS_/, "") : error.message;
}

export function createResolver(options: ResolveOptions) {
  const { rules, lookup = systemLookup } = options;
  const { lookupTimeoutMs = 5000, cacheMs = 5000 } = options;
  /** One entry of a name serves all tenants, and counts to the one that asked for it last. */
  const known = tenantCache<string, { readonly addresses: readonly string[]; readonly until: number }>(
    MAX.resolvedNames,
  );
  const few = createLimiter({ size: MAX.lookups, tooMany: "too many names are being looked up" });
  /** By tenant, so that no tenant waits behind another one's look-up. */
  const inFlight = new Map<string, Promise<readonly string[]>>();

  /**
   * The addresses, if all may be dialled. They are remembered: to judge an address again takes 10 µs of each call. This
   * machine may get the address meanwhile, so not for ever.
   */
  function judged(tenant: string, hostname: string, addresses: readonly string[]): readonly string[] {
    known.delete(hostname);
    // `find` finds nothing in an empty list, so no addresses at all have to fail separately.
    if (addresses.length === 0) throw new OutboundError("unreached", `${hostname}: DNS: no address`);
    const refused = addresses.find((text) =>
      rules === null ? parseAddress(text) === null : !mayDial(hostname, text, rules),
    );
    if (refused !== undefined) throw new OutboundError("blocked", `${hostname}: address ${refused} is not allowed`);
    if (cacheMs > 0) known.set(tenant, hostname, { addresses, until: performance.now() + cacheMs });
    return addresses;
  }

  async function lookUp(tenant: string, hostname: string): Promise<readonly string[]> {
    const late = () => new Error("timed out");
    const looking = few(tenant, () => withDeadline(lookupTimeoutMs, lookup(hostname), late));
    const answers = await looking.catch((error) => {
      known.delete(hostname);
      throw new OutboundError("unreached", `${hostname}: DNS: ${failureName(error)}`);
    });
    return judged(tenant, hostname, [...new Set(answers.map((answer) => answer.address))]);
  }

  /** @param tenant for whom; without one it is for the operator. @throws OutboundError, at once or as rejection */
  return (hostname: string, tenant = ""): readonly string[] | Promise<readonly string[]> => {
    const entry = known.get(hostname);
    if (entry !== undefined && performance.now() < entry.until) return entry.addresses;
    const literal = literalAddress(hostname);
    if (literal !== null) return judged(tenant, hostname, [literal]);
    if (rules !== null && isDeniedName(hostname, rules)) {
      throw new OutboundError("blocked", `${hostname}: the name is not allowed`);
    }
    const local = rules && localAddresses(hostname, rules);
    if (local !== null) return judged(tenant, hostname, local);
    const flight = JSON.stringify([tenant, hostname]);
    const running = inFlight.get(flight);
    if (running !== undefined) return joinInFlight(running, tenant);
    const work = lookUp(tenant, hostname).finally(() => inFlight.delete(flight));
    inFlight.set(flight, work);
    return work;
  };
}

function readAddresses(): Address[] {
  const listed = Object.values(networkInterfaces()).flatMap((addresses = []) => addresses);
  return listed.flatMap(({ address }) => parseAddress(address.replace(/%.*$/, "")) ?? []);
}

function firstAddresses(): Address[] {
  try {
    return readAddresses();
  } catch (cause) {
    throw new StartupProblem("the network interfaces of this machine must be readable", { cause });
  }
}

/**
 * Returns a function that gives the addresses of this machine's own network interfaces, which come and go while the
 * process runs. They are read again every few seconds; if that fails, the last known ones are used.
 *
 * @throws StartupProblem when the system does not tell them at all
 */
export function ownAddresses(now = () => performance.now()): () => readonly Address[] {
  let known = firstAddresses();
  let readAt = now();
  return () => {
    if (now() - readAt < 5_000) return known;
    readAt = now();
    try {
      known = readAddresses();
    } catch {}
    return known;
  };
}

// Small JSON documents of other servers: an issuer's keys, a vault's secrets, a facilitator's answers. They are bounded
// in time and size, whatever the server does.

export interface JsonLimits {
  readonly timeoutMs: number;
  readonly bytesMax: number;
}

export interface JsonAnswer {
  readonly status: number;
  /** As it was sent. */
  readonly retryAfter?: string | undefined;
  /** As it was sent. */
  readonly finalAfter?: string | undefined;
  /** Undefined when the body is no JSON. */
  readonly body: unknown;
}

/** A facilitator of ours says with it in how many seconds its answer is final: a reorganisation may change the hash before. */
export const FINAL_AFTER = "settlement-final-after";

const LIMITS: JsonLimits = { timeoutMs: 5000, bytesMax: 1024 * 1024 };

function parse(bytes: Uint8Array): unknown {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    return undefined;
  }
}

/**
 * Sends a request and reads the JSON of its answer, whatever its status.
 *
 * @throws OutboundError, also for an answer of more than `bytesMax`; the signal's reason
 */
export async function exchangeJson(
  outbound: Outbound,
  url: string,
  request: OutboundRequest,
  bytesMax: number,
): Promise<JsonAnswer> {
  const headers = [["accept", "application/json"] as const, ...request.headers];
  const response = await outbound.request(url, { ...request, headers });
  const body = await readBody(response, { maxBytes: bytesMax, captureBytes: bytesMax });
  if (body.tooLarge) throw new OutboundError("lost", `the answer is larger than ${bytesMax} bytes`);
  return {
    status: response.status,
    retryAfter: response.headers.get("retry-after") ?? undefined,
    finalAfter: response.headers.get(FINAL_AFTER) ?? undefined,
    body: parse(body.captured),
  };
}

/** A GET, whatever its status. @throws OutboundError, also when the limits are met */
export async function fetchJson(
  outbound: Outbound,
  url: string,
  headers: Readonly<Record<string, string>> = {},
  limits: JsonLimits = LIMITS,
): Promise<JsonAnswer> {
  const { timeoutMs, bytesMax } = limits;
  const signal = AbortSignal.timeout(timeoutMs);
  try {
    return await exchangeJson(outbound, url, { method: "GET", headers: Object.entries(headers), signal }, bytesMax);
  } catch (error) {
    if (signal.aborted) throw new OutboundError("lost", `no answer within ${timeoutMs} ms`);
    throw error;
  }
}

/** The JSON document at a URL. @throws OutboundError when there is none */
export async function fetchDocument(outbound: Outbound, url: string): Promise<unknown> {
  const { status, body } = await fetchJson(outbound, url);
  if (status !== 200) throw new OutboundError("lost", `answered ${status}`);
  if (body === undefined) throw new OutboundError("lost", "the answer is no JSON");
  return body;
}
