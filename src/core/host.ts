// The host rules that prevent SSRF: which URLs may be stored, which addresses may be dialled, which hosts are exempt, and which
// hosts a secret may be sent to. Pure. Addresses are bytes here: every spelling of an address is normalised before it is
// judged, and what can't be parsed is refused.
import { isIPv4, isIPv6 } from "node:net";

export const URL_CHARACTERS_MAX = 2048;
/** The most hosts that one credential may list. */
export const ALLOWED_HOSTS_MAX = 32;

/** 4 or 16 bytes, in network order. */
export type Address = Uint8Array;

export interface AddressRange {
  readonly address: Address;
  /** Length of the prefix in bits. */
  readonly prefix: number;
}

/** Parses a canonical IPv4 address or any text form of an IPv6 address (RFC 4291 section 2.2), without zone and brackets. */
export function parseAddress(text: string): Address | null {
  if (isIPv4(text)) return Uint8Array.from(text.split("."), Number);
  return isIPv6(text) && !text.includes("%") ? bytesOfV6(text) : null;
}

/** The bytes of an IPv6 address whose form has been checked; an IPv4 address may stand for the last two groups. */
function bytesOfV6(text: string): Address {
  const [head = [], tail = []] = text.split("::").map((half) => half.split(":").flatMap(bytesOfGroup));
  const address = new Uint8Array(16);
  address.set(head);
  address.set(tail, 16 - tail.length);
  return address;
}

function bytesOfGroup(group: string): number[] {
  if (group === "") return [];
  if (group.includes(".")) return group.split(".").map(Number);
  const value = Number.parseInt(group, 16);
  return [value >> 8, value & 0xff];
}

function parseRange(text: string): AddressRange | null {
  const slash = text.indexOf("/");
  const address = parseAddress(slash < 0 ? text : text.slice(0, slash));
  if (address === null) return null;
  const bits = address.length * 8;
  if (slash < 0) return { address, prefix: bits };
  const suffix = text.slice(slash + 1);
  if (!/^(0|[1-9]\d{0,2})$/.test(suffix) || Number(suffix) > bits) return null;
  return { address, prefix: Number(suffix) };
}

function contains(range: AddressRange, address: Address): boolean {
  if (range.address.length !== address.length) return false;
  let bits = range.prefix;
  for (let index = 0; bits > 0; index++, bits -= 8) {
    const mask = bits >= 8 ? 0xff : (0xff << (8 - bits)) & 0xff;
    if ((((range.address[index] ?? 0) ^ (address[index] ?? 0)) & mask) !== 0) return false;
  }
  return true;
}

const inAny = (ranges: readonly AddressRange[], address: Address): boolean =>
  ranges.some((range) => contains(range, address));

/** @param lists with blanks between the ranges */
function parseRanges(...lists: string[]): AddressRange[] {
  return lists
    .flatMap((list) => list.split(" "))
    .map((text) => {
      const range = parseRange(text);
      if (range === null) throw new Error(`no range: ${text}`);
      return range;
    });
}

const MAPPED = parseRanges("::ffff:0:0/96");

/** IPv6 forms that carry an IPv4 address, and the byte where it starts. */
const EMBEDDINGS = [
  { ranges: MAPPED, offset: 12 },
  // IPv4-compatible (RFC 4291), IPv4-translated (RFC 2765), NAT64 (RFC 6052).
  { ranges: parseRanges("::/96 ::ffff:0:0:0/96 64:ff9b::/96"), offset: 12 },
  // 6to4 (RFC 3056).
  { ranges: parseRanges("2002::/16"), offset: 2 },
];

function embeddedV4(address: Address): Address | null {
  const form = EMBEDDINGS.find((candidate) => inAny(candidate.ranges, address));
  return form === undefined ? null : address.slice(form.offset, form.offset + 4);
}

/** The IPv4 address of an IPv4-mapped one, which the kernel dials as that IPv4 address; other addresses as they are. */
const unmapped = (address: Address): Address => (inAny(MAPPED, address) ? address.slice(12) : address);

export interface HostList {
  readonly names: ReadonlySet<string>;
  readonly ranges: readonly AddressRange[];
}

/** The name in lower case, without the trailing dots that only mark it as absolute. */
const bareName = (hostname: string): string => hostname.toLowerCase().replace(/\.+$/, "");

/** Whether the text has the lengths of a DNS name (RFC 1035 section 2.3.4), which bounds what reaches the resolver. */
const isName = (name: string): boolean =>
  name.length <= 253 && name.split(".").every((label) => label.length > 0 && label.length <= 63);

/** The address that a URL's host spells out, or null when the host is a name. */
export function literalAddress(hostname: string): string | null {
  const text = hostname.startsWith("[") ? hostname.slice(1, -1) : hostname;
  return parseAddress(text) === null ? null : text;
}

/** The host as URLs spell it, so that IDNs and short forms of addresses compare equal; null when it is not a host. */
function canonicalHost(text: string): string | null {
  const bare = /^\[.*\]$/.test(text) ? text.slice(1, -1) : text;
  if (bare.includes(":"))
    return parseAddress(bare) === null ? null : (URL.parse(`http://[${bare}]/`)?.hostname ?? null);
  if (!/^[^\s/\\?#@:*[\]%]+$/.test(text)) return null;
  const url = URL.parse(`http://${text}/`);
  const name = url === null ? "" : bareName(url.hostname);
  return isName(name) ? name : null;
}

function parseEntry(entry: string): AddressRange | string | null {
  const text = entry.trim();
  const range = parseRange(/^\[.*\]$/.test(text) ? text.slice(1, -1) : text);
  if (range !== null) {
    const inMapped = range.prefix >= 96 && inAny(MAPPED, range.address);
    return inMapped ? { address: range.address.slice(12), prefix: range.prefix - 96 } : range;
  }
  const name = canonicalHost(text);
  return name === null ? null : (parseRange(name) ?? name);
}

/**
 * Parses host names, addresses and CIDR ranges. A name is exact: it does not include its subdomains.
 * @throws Error that quotes the first entry which is none of the three
 */
export function parseHostList(entries: readonly string[]): HostList {
  const names = new Set<string>();
  const ranges: AddressRange[] = [];
  for (const entry of entries) {
    const parsed = parseEntry(entry);
    if (parsed === null) throw new Error(`${JSON.stringify(entry)} is not a host name, address or CIDR range`);
    if (typeof parsed === "string") names.add(parsed);
    else ranges.push(parsed);
  }
  return { names, ranges };
}

// Ports of servers that might take the lines of an HTTP request for commands (mail, chat, file sharing): the Fetch standard's
// list of bad ports, and two stores that read commands line by line.
const BAD_PORTS: ReadonlySet<number> = new Set([
  ...[0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104],
  ...[109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515],
  ...[526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049],
  ...[3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10_080],
  // Redis and memcached.
  ...[6379, 11_211],
]);

/** @param port as in a URL: empty for the scheme's default */
export const isBadPort = (port: string): boolean => port !== "" && BAD_PORTS.has(Number(port));

// A URL is judged when it is stored, for a clear and early error. The protection is the second check, at dial time.

/** The operator's rules, which are added to the built-in ones. */
export interface HostRules {
  /** Exempt hosts. An address is exempt whatever name resolved to it; a name exempts every address that it resolves to. */
  readonly allow: HostList;
  /** Refused hosts, even if they are exempt. */
  readonly deny: HostList;
  /** The current addresses of this machine, which are refused unless they are exempt. */
  readonly own: () => readonly Address[];
}

export interface WrittenRules {
  readonly allow?: readonly string[];
  readonly deny?: readonly string[];
  readonly own?: HostRules["own"];
}

/** @throws Error that quotes the first entry which is not a host, address or CIDR range */
export function hostRules({ allow = [], deny = [], own = () => [] }: WrittenRules): HostRules {
  return { allow: parseHostList(allow), deny: parseHostList(deny), own };
}

/** Unspecified, private, loopback, link-local and multicast. */
const LOCAL_V4 = parseRanges(
  "0.0.0.0/8 10.0.0.0/8 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.168.0.0/16 224.0.0.0/4",
);
const LOCAL_V6 = parseRanges("::/128 ::1/128 fc00::/7 fe80::/10 fec0::/10 ff00::/8");

/** Addresses that a stored URL may not name. The rule at dial time refuses more ranges. */
const WRITTEN_REFUSED = [...LOCAL_V4, ...LOCAL_V6];

/** The rest of IANA's special-purpose registry for IPv4, reserved space, and Azure's metadata address. */
const SPECIAL_V4 = parseRanges(
  "100.64.0.0/10 168.63.129.16/32 192.0.0.0/24 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24",
  "192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4",
);
const DIAL_REFUSED_V4 = [...LOCAL_V4, ...SPECIAL_V4];

/** The IPv6 space that IANA has opened for global unicast. Everything outside of it is special or unassigned. */
const GLOBAL_V6 = parseRanges("2000::/3");

/** The special-purpose parts of the global unicast space. 2001::/23 holds Teredo, benchmarking, ORCHID and more. */
const DIAL_REFUSED_V6 = parseRanges("2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48 3fff::/20");

function isGlobal(address: Address): boolean {
  if (address.length === 4) return !inAny(DIAL_REFUSED_V4, address);
  return inAny(GLOBAL_V6, address) && !inAny(DIAL_REFUSED_V6, address);
}

/** The addresses that a packet to this one may reach: itself, and an IPv4 address that it embeds. */
function reached(address: Address): Address[] {
  const carried = embeddedV4(address);
  return carried === null ? [address] : [unmapped(address), carried];
}

const isDeniedAddress = (address: Address, { deny }: HostRules): boolean =>
  reached(address).some((each) => inAny(deny.ranges, each));

const isExemptAddress = (address: Address, { allow }: HostRules): boolean => inAny(allow.ranges, unmapped(address));

const isOwn = (address: Address, { own }: HostRules): boolean =>
  reached(address).some((each) => own().some((mine) => Buffer.compare(mine, each) === 0));

export const isDeniedName = (hostname: string, { deny }: HostRules): boolean => deny.names.has(bareName(hostname));

/** Whether this address of the host is exempt from the built-in rules. */
export function isExempt(hostname: string, text: string, rules: HostRules): boolean {
  const address = parseAddress(text);
  return address !== null && (rules.allow.names.has(bareName(hostname)) || isExemptAddress(address, rules));
}

/** Whether this address of the host may be dialled: not denied, and either exempt or a foreign global unicast address. */
export function mayDial(hostname: string, text: string, rules: HostRules): boolean {
  const address = parseAddress(text);
  if (address === null || isDeniedName(hostname, rules) || isDeniedAddress(address, rules)) return false;
  return isExempt(hostname, text, rules) || (isGlobal(address) && !isOwn(address, rules));
}

const LOOPBACK = ["127.0.0.1", "::1"];
const LOCAL = "is a private or local address; the operator can allow it with TOLLGATE_ALLOW_HOSTS";
const DENIED = "must not name a host that this gateway is set to refuse";

/**
 * The addresses of localhost and the names under it, whatever a name server says: the loopback addresses that may be dialled,
 * or both where none may. Null for names that are resolved: other names, and those exempt by name.
 */
export function localAddresses(hostname: string, rules: HostRules): readonly string[] | null {
  const name = bareName(hostname);
  // RFC 6761 section 6.3: localhost and every name under it mean the loopback addresses.
  const isLocal = name === "localhost" || name.endsWith(".localhost");
  if (!isLocal || rules.allow.names.has(name)) return null;
  const exempt = LOOPBACK.filter((address) => mayDial(name, address, rules));
  return exempt.length > 0 ? exempt : LOOPBACK;
}

/** Why a stored URL may not name this host; null when it may. */
function problemOfHost(hostname: string, rules: HostRules): string | null {
  if (isDeniedName(hostname, rules)) return DENIED;
  const address = parseAddress(literalAddress(hostname) ?? "");
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

/** Whether the host could be exempt. A name is not resolved yet, so it could be where any range is exempt. */
function mayBeExempt(hostname: string, rules: HostRules): boolean {
  const literal = literalAddress(hostname);
  if (literal !== null) return isExempt(hostname, literal, rules);
  return rules.allow.names.has(bareName(hostname)) || rules.allow.ranges.length > 0;
}

/** Asks back where a URL lacks its scheme; null for a text that may be something else, and hold a secret. */
export function urlMeant(text: string): string | null {
  const isPlain = /^(localhost|\[[\da-f:.]+\]|[\w-]+(\.[\w-]+)+)(:\d{1,5})?(\/[\w./-]*)?$/i.test(text);
  return isPlain && URL.canParse(`http://${text}`) ? `did you mean http://${text}?` : null;
}

type UrlSchemes = "https" | "http or https";

/**
 * Why a URL may not be stored, safe for callers and to follow the name of a field; null when it may. The text must be plainly
 * `http(s)://host…`: what the URL parser would repair (backslashes, white space, missing or extra slashes) is refused, so that no
 * other parser can see a different host.
 */
export function writtenUrlProblem(text: string, rules: HostRules, scheme: UrlSchemes = "http or https"): string | null {
  const noUrl = `must be an ${scheme} URL with a host`;
  if (text.length > URL_CHARACTERS_MAX) return `must be at most ${URL_CHARACTERS_MAX} characters`;
  const [, s, authority] = /^http(s?):\/\/([^/?#\\]+)/i.exec(text) ?? [];
  // biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is looked for.
  if (authority === undefined || /[\u0000-\u0020\u007f\\]/.test(text)) return noUrl;
  if (s === "" && scheme === "https") return noUrl;
  // Parsing leaves some characters out. Without them a host has 254 at most, and is so within the first 300 of its URL.
  if (authority.length > 260) return "must name a valid host";
  if (authority.includes("@")) return "must not carry user information";
  const url = URL.parse(text);
  if (url === null) return noUrl;
  if (url.port === "0") return "must not name port 0";
  if (literalAddress(url.hostname) === null && !isName(bareName(url.hostname))) return "must name a valid host";
  const problem = problemOfHost(url.hostname, rules);
  if (problem !== null) return problem;
  const isRefused = isBadPort(url.port) && !mayBeExempt(url.hostname, rules);
  return isRefused ? "must not name a port that belongs to another protocol" : null;
}

// The hosts that a secret may be sent to: names, addresses, and `*.name` for the names under one. Entries are stored as URL
// parsing spells a host, so that a comparison of texts is enough.

const WILDCARD = "*.";

export type AllowedHosts =
  | { readonly ok: true; readonly hosts: readonly string[] }
  /** `index` is that of the wrong entry; null when the list itself is wrong. */
  | { readonly ok: false; readonly index: number | null; readonly reason: string };

/** Parses a caller's list. Entries of equal meaning are kept once. */
export function parseAllowedHosts(entries: readonly string[]): AllowedHosts {
  if (entries.length === 0 || entries.length > ALLOWED_HOSTS_MAX) {
    return { ok: false, index: null, reason: `must be 1 to ${ALLOWED_HOSTS_MAX} host names, or null` };
  }
  const hosts = entries.map(canonicalEntry);
  const index = hosts.indexOf(null);
  if (index >= 0) return { ok: false, index, reason: "must be a host without a port, or *. and a host name" };
  return { ok: true, hosts: [...new Set(hosts.filter((host) => host !== null))] };
}

function canonicalEntry(entry: string): string | null {
  if (!entry.startsWith(WILDCARD)) return canonicalHost(entry);
  const name = canonicalHost(entry.slice(WILDCARD.length));
  // An address has no subdomains.
  return name === null || literalAddress(name) !== null ? null : `${WILDCARD}${name}`;
}

export function isAllowedUrl(url: string, hosts: readonly string[]): boolean {
  const hostname = bareName(URL.parse(url)?.hostname ?? "");
  if (hostname === "") return false;
  return hosts.some((host) =>
    host.startsWith(WILDCARD) ? hostname.length >= host.length && hostname.endsWith(host.slice(1)) : hostname === host,
  );
}

/** Whether a host, as URLs spell it, is this machine, so that what plain HTTP carries to it does not leave the machine. */
export const isLoopback = (hostname: string): boolean => /^(localhost|127\.\d+\.\d+\.\d+|\[::1\])$/.test(hostname);
