// The HTTP client, through which all outgoing requests are made. It is ours because the runtime's `fetch` will not do (measured
// on Bun 1.4.5): it reads ahead of a body that nobody reads (1.4 MB of each), drops received bytes of an answer when the
// connection closes before they were read (21 of 60 answers closed right after their first part, 42 of 60 destroyed; here
// none), does not distinguish a reset from a close, does not tell when a request has been sent, and dials addresses that no
// host rule has judged. A version of Bun whose `fetch` does none of this makes the client unnecessary.
//
// The host of every request is resolved and judged, and the request goes to the very address that was judged, with the SNI
// and Host of its name. Redirects are returned as they are, and proxies are ignored.
//
// A POST is sent once; other requests are retried when a pooled connection closes without an answer. So whatever must not
// happen twice is sent as a POST.
import { networkInterfaces } from "node:os";
import { attempt, errorCode, errorName, Fault } from "../../core/fault.ts";
import type { Address, HostRules } from "../../core/host.ts";
import {
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
import type { Answer, DialTarget, SentRequest } from "./exchange.ts";
import { OutboundError, reasonOf, UNTRUSTED_SERVER } from "./exchange.ts";
import { bareValue } from "./response-parser.ts";

type HeaderFields = ReadonlyArray<readonly [name: string, value: string]>;

export interface OutboundRequest extends SentRequest {
  readonly headers: HeaderFields;
  readonly tls?: ClientIdentity | null;
  /** The tenant whose connections are used, and in whose turns the answer is read; the operator when omitted. */
  readonly tenant?: string;
}

export interface Outbound {
  /** Resolves with the head; the body is still encoded and must be read or cancelled. @throws OutboundError; the signal's reason */
  request(url: string, request: OutboundRequest): Promise<Answer>;
}

export interface OutboundOptions {
  /** Null for servers that the operator configured, which may have any address. */
  readonly rules: HostRules | null;
  /** Roots to trust in addition to the default ones, as PEM. */
  readonly extraCa: string | null;
  readonly lookup?: Lookup;
}

/**
 * Error codes of a failed dial. Linux reports ETIMEDOUT, EHOSTUNREACH and the like for established connections too, but the
 * transport turns all of those into ECONNRESET. Two codes are the transport's own: EBUSY for too many dials at once, and
 * ENOTCONN for a connection that was closed before the first byte of the request.
 */
const DIAL_FAILURES = new Set([
  ...["ECONNREFUSED", "EHOSTUNREACH", "EHOSTDOWN", "ENETUNREACH", "ENETDOWN", "ETIMEDOUT", "EADDRNOTAVAIL"],
  ...["EACCES", "EPERM", "EINVAL", "EBUSY", "ENOTCONN"],
]);

/** The host and the port, also where the URL leaves it to the scheme; and the address, unless the URL has it. */
const placeOf = ({ hostname, port, isTls }: DialTarget, address: string) =>
  `${hostname}:${port || (isTls ? "443" : "80")}${hostname === address ? "" : ` at ${address}`}`;

function failureAt(where: string, error: unknown): OutboundError {
  const code = errorName(error);
  const isUnreached = DIAL_FAILURES.has(code) || UNTRUSTED_SERVER.test(code);
  return new OutboundError(isUnreached ? "unreached" : "lost", `${where}: ${code}`, reasonOf(code));
}

/** @throws OutboundError */
function toTarget(text: string): DialTarget {
  const url = URL.parse(text);
  const isHttp = url?.protocol === "http:" || url?.protocol === "https:";
  if (url === null || !isHttp) throw new OutboundError("blocked", "not an http or https URL");
  if (url.username + url.password !== "") throw new OutboundError("blocked", "the URL carries user information");
  const { host, hostname, port } = url;
  const isTls = url.protocol === "https:";
  const isName = isTls && literalAddress(hostname) === null;
  const serverName = isName ? hostname.replace(/\.+$/, "") : null;
  return { isTls, host, hostname, port, path: `${url.pathname}${url.search}`, serverName };
}

/** The client manages connections and lengths, whatever headers a caller passes. */
const OWNED_HEADERS = new Set([
  ...["host", "connection", "keep-alive", "content-length", "transfer-encoding", "te", "trailer", "upgrade", "expect"],
]);

/** Sent unless the request has its own, since some servers would assume other values. `identity` asks for no encoding. */
const DEFAULTS: HeaderFields = [
  ["accept", "*/*"],
  ["user-agent", "tollgate"],
  ["accept-encoding", "identity"],
];

/** A token (RFC 9110, section 5.6.2). */
const NAME = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;
/** A header value that the Fetch standard allows: without line breaks, and each character fits into a byte. */
const VALUE = /^[^\0\r\n\u0100-\uffff]*$/;

/** The header lines as they go on the wire, checked as the runtime's Headers would. @throws OutboundError for a bad header */
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

/** The header lines when a name is given more than once, combined by the runtime's rules. */
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

const unsendable = (): OutboundError => new OutboundError("unreached", "a header holds characters that can't be sent");

export function createOutbound(options: OutboundOptions): Outbound {
  const { rules, lookup } = options;
  const resolve = createResolver({ rules, lookup });
  const contextOf = createTlsContexts(options.extraCa);
  const transport = openTransport();
  /** Parsed URLs, since most are called often and parsing one takes 1 µs. */
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
          failure = failureAt(placeOf(target, address), error);
          // The next address is tried after a failed dial only.
          if (!DIAL_FAILURES.has(errorName(error))) break;
        }
      }
      throw failure ?? new OutboundError("unreached", "no address");
    },
  };
}

/** As `outbound.request`, but tries it twice more as long as it certainly never reached the upstream. */
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

/**
 * The delay in milliseconds that a Retry-After header asks for, as seconds or as a date by the server's clock (RFC 9110, section
 * 10.2.3), at most `mostMs`; null when it can't be parsed. @param now milliseconds since the epoch
 */
export function retryAfterMs(value: string | null, now: number, mostMs: number): number | null {
  const text = value?.trim() ?? "";
  const ms = /^\d{1,9}$/.test(text) ? Number(text) * 1000 : Date.parse(text) - now;
  return Number.isNaN(ms) ? null : Math.min(Math.max(ms, 0), mostMs);
}

// Dial-time resolution: a host name becomes addresses that may be dialled, or an error. The addresses that were judged are the
// ones that are dialled, so a name that changes its addresses in between (DNS rebinding, SSRF) gains nothing.

/** All addresses of a name; rejects when it has none. */
export type Lookup = (name: string) => Promise<ReadonlyArray<{ readonly address: string }>>;

export interface ResolveOptions {
  /** Null for servers that the operator configured, which may have any address. */
  readonly rules: HostRules | null;
  readonly lookup?: Lookup | undefined;
  readonly lookupTimeoutMs?: number;
  /** How long addresses are cached. */
  readonly cacheMs?: number;
}

/**
 * By c-ares, with /etc/hosts and the resolv.conf (search domains too) as read at the start. The C library's getaddrinfo would block
 * one of a few threads, which file access shares, while a name server is silent: four such names would stop all others. Bun uses it
 * anyway for names under .local, unless they are in capitals, which DNS does not distinguish.
 */
const systemLookup: Lookup = (name) => Bun.dns.lookup(name.replace(/\.local$/, ".LOCAL"), { backend: "c-ares" });

export function createResolver(options: ResolveOptions) {
  const { rules, lookup = systemLookup, lookupTimeoutMs = 5000, cacheMs = 5000 } = options;
  /** Addresses by name. An entry serves all tenants, and is charged to the one that looked the name up last. */
  const known = tenantCache<string, Readonly<{ addresses: readonly string[]; until: number }>>(MAX.resolvedNames);
  const lookups = createLimiter({ size: MAX.lookups, tooMany: "too many names are being looked up" });
  /** Look-ups in flight, by tenant and name, so that no tenant waits behind another one's look-up. */
  const inFlight = new Map<string, Promise<readonly string[]>>();

  /** The addresses, if all may be dialled: cached, since to judge one takes 10 µs, but it may become this machine's own. */
  function judged(tenant: string, hostname: string, addresses: readonly string[]): readonly string[] {
    known.delete(hostname);
    // The check below passes for an empty list, so that case fails separately.
    if (addresses.length === 0) throw new OutboundError("unreached", `${hostname}: DNS: no address`, "name_not_found");
    const refused = addresses.find((text) =>
      rules === null ? parseAddress(text) === null : !mayDial(hostname, text, rules),
    );
    if (refused !== undefined) throw new OutboundError("blocked", `${hostname}: address ${refused} is not allowed`);
    if (cacheMs > 0) known.set(tenant, hostname, { addresses, until: performance.now() + cacheMs });
    return addresses;
  }

  async function lookUp(tenant: string, hostname: string): Promise<readonly string[]> {
    const late = () => new Error("timed out");
    const looking = lookups(tenant, () => withDeadline(lookupTimeoutMs, lookup(hostname), late));
    const answers = await looking.catch((error) => {
      known.delete(hostname);
      const reason = error instanceof Fault ? null : "name_not_found";
      // A short word for the log, since the message of a resolver error may say too much.
      const name = errorCode(error)?.replace(/^DNS_/, "") ?? (error instanceof Error ? error.message : "failed");
      throw new OutboundError("unreached", `${hostname}: DNS: ${name}`, reason);
    });
    return judged(tenant, hostname, [...new Set(answers.map((answer) => answer.address))]);
  }

  /** @param tenant the tenant that asks; the operator when omitted. @throws OutboundError, at once or as rejection */
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
    const key = JSON.stringify([tenant, hostname]);
    const running = inFlight.get(key);
    if (running !== undefined) return joinInFlight(running, tenant);
    const work = lookUp(tenant, hostname).finally(() => inFlight.delete(key));
    inFlight.set(key, work);
    return work;
  };
}

function readAddresses(): Address[] {
  const listed = Object.values(networkInterfaces()).flatMap((addresses = []) => addresses);
  return listed.flatMap(({ address }) => parseAddress(address.replace(/%.*$/, "")) ?? []);
}

/**
 * Returns a function for the current addresses of this machine, which come and go. They are read again every few seconds; if that
 * fails, the last known ones are used. @throws StartupProblem when the system does not list them
 */
export function ownAddresses(now = () => performance.now()): () => readonly Address[] {
  let known: readonly Address[] | null = null;
  let readAt = Number.NEGATIVE_INFINITY;
  const current = () => {
    if (known !== null && now() - readAt < 5_000) return known;
    readAt = now();
    try {
      known = readAddresses();
    } catch (cause) {
      if (known === null)
        throw new StartupProblem("the network interfaces of this machine must be readable", { cause });
    }
    return known;
  };
  current();
  return current;
}

// Small JSON documents of other servers, such as an issuer's keys, a vault's secrets and a facilitator's answers, read with
// bounds on time and size.

export interface JsonLimits {
  readonly timeoutMs: number;
  readonly bytesMax: number;
}

export interface JsonAnswer {
  readonly status: number;
  /** The raw Retry-After header. */
  readonly retryAfter?: string | undefined;
  /** The raw FINAL_AFTER header. */
  readonly finalAfter?: string | undefined;
  /** Undefined when the body is not JSON. */
  readonly body: unknown;
}

/** A header of our facilitator: the seconds until its answer is final. Before that a reorganisation may change the hash. */
export const FINAL_AFTER = "settlement-final-after";

const LIMITS: JsonLimits = { timeoutMs: 5000, bytesMax: 1024 * 1024 };

/** Reads an answer as JSON, whatever the status. @throws OutboundError, also for more than `bytesMax`; the signal's reason */
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
    body: attempt(() => JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(body.captured))),
  };
}

/** Sends a GET and reads its answer as JSON, whatever the status. @throws OutboundError, also when a limit is exceeded */
export async function fetchJson(
  outbound: Outbound,
  url: string,
  headers: Readonly<Record<string, string>> = {},
  { timeoutMs, bytesMax }: JsonLimits = LIMITS,
): Promise<JsonAnswer> {
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
  if (body === undefined) throw new OutboundError("lost", "the answer is not JSON");
  return body;
}
