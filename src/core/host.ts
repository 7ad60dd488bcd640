// The rules for upstream hosts: which URLs may be stored, which addresses may be dialled, and who is exempt.
// Pure, and in terms of addresses as bytes: every spelling is folded before it is judged, and what can't be
// read is refused. A stored URL is judged for a clear error early; what protects is the rule at dial time.

import { isBadPort } from "./blocked-ports.ts";
import { bareName, type HostList, isName, literalAddress, parseHostList } from "./host-list.ts";
import { type Address, embeddedV4, inAny, isSame, parseAddress, table, unmapped } from "./ip-ranges.ts";
import { URL_CHARACTERS_MAX } from "./limits.ts";

/** Beside the rules that always hold. */
export interface HostRules {
  /** Exempt. An address exempts whatever name led to it; a name exempts what it resolves to. */
  readonly allow: HostList;
  /** Refused, also where they are exempt. */
  readonly deny: HostList;
  /** The addresses of this machine as they are now: refused unless they are exempt. */
  readonly own: () => readonly Address[];
}

export interface WrittenRules {
  readonly allow?: readonly string[];
  readonly deny?: readonly string[];
  readonly own?: HostRules["own"];
}

/** @throws Error that quotes the first entry which is no host, address or CIDR */
export function hostRules({ allow = [], deny = [], own = () => [] }: WrittenRules): HostRules {
  return { allow: parseHostList(allow), deny: parseHostList(deny), own };
}

export type WrittenUrl =
  | { readonly ok: true; readonly url: URL }
  /** `reason` is safe for callers and follows the name of a field. */
  | { readonly ok: false; readonly reason: string };

/** What a stored URL may not name. Narrower than the rule at dial time: other ranges fail there. */
const WRITTEN_REFUSED = table(
  // Unspecified, private, loopback, link-local, multicast.
  "0.0.0.0/8",
  "10.0.0.0/8",
  "127.0.0.0/8",
  "169.254.0.0/16",
  "172.16.0.0/12",
  "192.168.0.0/16",
  "224.0.0.0/4",
  "::/128",
  "::1/128",
  "fc00::/7",
  "fe80::/10",
  "fec0::/10",
  "ff00::/8",
);

/** IANA's special-purpose registry for IPv4, multicast and reserved space, and Azure's metadata address. */
const DIAL_REFUSED_V4 = table(
  "0.0.0.0/8",
  "10.0.0.0/8",
  "100.64.0.0/10",
  "127.0.0.0/8",
  "168.63.129.16/32",
  "169.254.0.0/16",
  "172.16.0.0/12",
  "192.0.0.0/24",
  "192.0.2.0/24",
  "192.31.196.0/24",
  "192.52.193.0/24",
  "192.88.99.0/24",
  "192.168.0.0/16",
  "192.175.48.0/24",
  "198.18.0.0/15",
  "198.51.100.0/24",
  "203.0.113.0/24",
  "224.0.0.0/4",
  "240.0.0.0/4",
);

/** All of IPv6 that IANA has opened for global unicast. Everything outside is special or unassigned. */
const GLOBAL_V6 = table("2000::/3");

/** The special-purpose parts of it. 2001::/23 holds Teredo, benchmarking, ORCHID and more. */
const DIAL_REFUSED_V6 = table("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20");

function isGlobal(address: Address): boolean {
  if (address.length === 4) return !inAny(DIAL_REFUSED_V4, address);
  return inAny(GLOBAL_V6, address) && !inAny(DIAL_REFUSED_V6, address);
}

/** Whether an address is ordinary public unicast. One that can't be read is not. */
export function isGlobalUnicast(text: string): boolean {
  const address = parseAddress(text);
  return address !== null && isGlobal(address);
}

/** The addresses that are reached by this one. */
function reached(address: Address): Address[] {
  const carried = embeddedV4(address);
  return carried === null ? [address] : [unmapped(address), carried];
}

function isDeniedAddress(address: Address, { deny }: HostRules): boolean {
  return reached(address).some((each) => inAny(deny.networks, each));
}

function isExemptAddress(address: Address, { allow }: HostRules): boolean {
  return inAny(allow.networks, unmapped(address));
}

function isOwn(address: Address, { own }: HostRules): boolean {
  return reached(address).some((each) => own().some((mine) => isSame(mine, each)));
}

export function isDeniedName(hostname: string, { deny }: HostRules): boolean {
  return deny.names.has(bareName(hostname));
}

/** Whether the rules that hold for everybody do not hold for this address of the host. */
export function isExempt(hostname: string, text: string, rules: HostRules): boolean {
  const address = parseAddress(text);
  return address !== null && (rules.allow.names.has(bareName(hostname)) || isExemptAddress(address, rules));
}

/** Whether this address of the host may be dialled: exempt, or global unicast of others; and not denied. */
export function mayDial(hostname: string, text: string, rules: HostRules): boolean {
  const address = parseAddress(text);
  if (address === null || isDeniedName(hostname, rules) || isDeniedAddress(address, rules)) return false;
  return isExempt(hostname, text, rules) || (isGlobal(address) && !isOwn(address, rules));
}

/** RFC 6761 section 6.3: localhost and every name under it mean the loopback addresses. */
function isLocalhost(name: string): boolean {
  return name === "localhost" || name.endsWith(".localhost");
}

const LOOPBACK = ["127.0.0.1", "::1"];
const LOCAL = "must not name localhost or a loopback, private, link-local or other local address";
const DENIED = "must not name a host that this gateway is set to refuse";

/**
 * Where localhost and the names under it lead to, whatever a name server says: to the loopback addresses that may be dialled,
 * to both where none may. Null for other names, and for one that is exempt itself, which leads to what it resolves to.
 */
export function localAddresses(hostname: string, rules: HostRules): readonly string[] | null {
  const name = bareName(hostname);
  if (!isLocalhost(name) || rules.allow.names.has(name)) return null;
  const exempt = LOOPBACK.filter((address) => mayDial(name, address, rules));
  return exempt.length > 0 ? exempt : LOOPBACK;
}

/** What is wrong with a name or an address that must not be written down; null when it may. */
function problemOfHost(hostname: string, rules: HostRules): string | null {
  if (isDeniedName(hostname, rules)) return DENIED;
  const literal = literalAddress(hostname);
  const address = literal === null ? null : parseAddress(literal);
  if (address !== null) return problemOfAddress(address, rules);
  const local = localAddresses(hostname, rules) ?? [];
  return local.every((each) => mayDial(hostname, each, rules)) ? null : LOCAL;
}

function problemOfAddress(address: Address, rules: HostRules): string | null {
  if (isDeniedAddress(address, rules)) return DENIED;
  if (isExemptAddress(address, rules)) return null;
  const isLocal = reached(address).some((each) => inAny(WRITTEN_REFUSED, each));
  return isLocal || isOwn(address, rules) ? LOCAL : null;
}

/** What a name will lead to is not known yet: it may be exempt where any network is. */
function mayBeExempt(hostname: string, rules: HostRules): boolean {
  const literal = literalAddress(hostname);
  if (literal !== null) return isExempt(hostname, literal, rules);
  return rules.allow.names.has(bareName(hostname)) || rules.allow.networks.length > 0;
}

/**
 * Judges a URL that someone wants stored. The text must be plainly `http(s)://host…`: what the URL parser would
 * repair (backslashes, white space, missing or surplus slashes) is refused, so that no reader sees another host.
 */
export function checkWrittenUrl(text: string, rules: HostRules): WrittenUrl {
  const refuse = (reason: string): WrittenUrl => ({ ok: false, reason });
  if (text.length > URL_CHARACTERS_MAX) return refuse(`must be at most ${URL_CHARACTERS_MAX} characters`);
  const authority = /^https?:\/\/([^/?#\\]+)/i.exec(text)?.[1];
  // biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is looked for.
  if (authority === undefined || /[\u0000-\u0020\u007f\\]/.test(text)) {
    return refuse("must be an http or https URL with a host");
  }
  if (authority.includes("@")) return refuse("must not carry user information");
  const url = URL.parse(text);
  if (url === null) return refuse("must be an http or https URL with a host");
  if (url.port === "0") return refuse("must not name port 0");
  if (literalAddress(url.hostname) === null && !isName(bareName(url.hostname))) {
    return refuse("must name a valid host");
  }
  const problem = problemOfHost(url.hostname, rules);
  if (problem !== null) return refuse(problem);
  if (isBadPort(url.port) && !mayBeExempt(url.hostname, rules)) {
    return refuse("must not name a port that belongs to another protocol");
  }
  return { ok: true, url };
}
