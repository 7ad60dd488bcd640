// Hosts and their addresses: how each is spelled, which URLs may be stored, which addresses may be dialled, who is exempt,
// and which hosts a secret may go to. Pure, and in terms of addresses as bytes: every spelling of an address is folded into
// one form before it is judged, and what can't be read is refused.

export const URL_CHARACTERS_MAX = 2048;
/** Hosts that one credential may be for. */
export const ALLOWED_HOSTS_MAX = 32;

/** 4 or 16 bytes, in network order. */
export type Address = Uint8Array;

export interface AddressRange {
  readonly address: Address;
  /** Bits. */
  readonly prefix: number;
}

const V4_PART = "(0|[1-9]\\d?|1\\d\\d|2[0-4]\\d|25[0-5])";
const V4 = new RegExp(`^${[V4_PART, V4_PART, V4_PART, V4_PART].join("\\.")}$`);

function parseV4(text: string): Address | null {
  const match = V4.exec(text);
  if (match === null) return null;
  const [, a, b, c, d] = match;
  return Uint8Array.of(Number(a), Number(b), Number(c), Number(d));
}

/** Colon-separated groups as bytes; an IPv4 address may stand for the last two. */
function parseGroups(text: string): number[] | null {
  if (text === "") return [];
  const bytes: number[] = [];
  const groups = text.split(":");
  for (const [index, group] of groups.entries()) {
    const v4 = index === groups.length - 1 && group.includes(".") ? parseV4(group) : null;
    if (v4 !== null) {
      bytes.push(...v4);
      continue;
    }
    if (!/^[0-9a-f]{1,4}$/i.test(group)) return null;
    const value = Number.parseInt(group, 16);
    bytes.push(value >> 8, value & 0xff);
  }
  return bytes;
}

function parseV6(text: string): Address | null {
  if (text.length > 45) return null;
  const halves = text.split("::");
  const head = parseGroups(halves[0] ?? "");
  const tail = parseGroups(halves[1] ?? "");
  if (head === null || tail === null || halves.length > 2) return null;
  const gap = 16 - head.length - tail.length;
  if (halves.length === 1 ? gap !== 0 : gap < 2) return null;
  // The IPv4 form ends an address, so it can't stand before the gap.
  if (halves.length === 2 && halves[0]?.includes(".")) return null;
  const address = new Uint8Array(16);
  address.set(head);
  address.set(tail, 16 - tail.length);
  return address;
}

/** Reads a canonical IPv4 or any textual IPv6 address (RFC 4291 section 2.2), no zone and no brackets. */
export function parseAddress(text: string): Address | null {
  return text.includes(":") ? parseV6(text) : parseV4(text);
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

function inAny(ranges: readonly AddressRange[], address: Address): boolean {
  return ranges.some((range) => contains(range, address));
}

function table(...texts: string[]): AddressRange[] {
  return texts.map((text) => {
    const range = parseRange(text);
    if (range === null) throw new Error(`no range: ${text}`);
    return range;
  });
}

const MAPPED = table("::ffff:0:0/96");

/** IPv6 forms that carry an IPv4 address, and the byte where it starts. */
const EMBEDDINGS = [
  { ranges: MAPPED, offset: 12 },
  // IPv4-compatible (RFC 4291), IPv4-translated (RFC 2765), NAT64 (RFC 6052).
  { ranges: table("::/96", "::ffff:0:0:0/96", "64:ff9b::/96"), offset: 12 },
  // 6to4 (RFC 3056).
  { ranges: table("2002::/16"), offset: 2 },
];

function embeddedV4(address: Address): Address | null {
  const form = EMBEDDINGS.find((candidate) => inAny(candidate.ranges, address));
  return form === undefined ? null : address.slice(form.offset, form.offset + 4);
}

/** The kernel dials an IPv4-mapped address as the IPv4 address itself, so the two are one. */
function unmapped(address: Address): Address {
  return inAny(MAPPED, address) ? address.slice(12) : address;
}

export function isSame(one: Address, other: Address): boolean {
  return one.length === other.length && one.every((byte, index) => byte === other[index]);
}

export interface HostList {
  readonly names: ReadonlySet<string>;
  readonly ranges: readonly AddressRange[];
}

/** The name without the dots that only say "absolute". */
function bareName(hostname: string): string {
  return hostname.toLowerCase().replace(/\.+$/, "");
}

/** Whether the text could be a name at all (RFC 1035 section 2.3.4); it bounds what reaches the resolver. */
function isName(name: string): boolean {
  return name.length <= 253 && name.split(".").every((label) => label.length > 0 && label.length <= 63);
}

/** The address that a URL's host spells out, or null when the host is a name. */
export function literalAddress(hostname: string): string | null {
  const text = hostname.startsWith("[") ? hostname.slice(1, -1) : hostname;
  return parseAddress(text) === null ? null : text;
}

/** As URLs spell it, so that IDNs and short forms of addresses compare equal; null when it is no name and no address. */
function canonicalHost(text: string): string | null {
  const bare = /^\[.*\]$/.test(text) ? text.slice(1, -1) : text;
  if (bare.includes(":")) return parseV6(bare) === null ? null : (URL.parse(`http://[${bare}]/`)?.hostname ?? null);
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
 * Names are exact: a name does not stand for the names under it.
 * @throws Error that quotes the first entry which is no host, address or CIDR.
 */
export function parseHostList(entries: readonly string[]): HostList {
  const names = new Set<string>();
  const ranges: AddressRange[] = [];
  for (const entry of entries) {
    const parsed = parseEntry(entry);
    if (parsed === null) throw new Error(`${JSON.stringify(entry)} is no host name, address or CIDR`);
    if (typeof parsed === "string") names.add(parsed);
    else ranges.push(parsed);
  }
  return { names, ranges };
}

// Ports at which a server of another protocol listens, which might take the lines of a request for commands: mail, chat,
// file sharing and so on. The Fetch standard's list of bad ports, and two stores that read commands line by line.

const BAD_PORTS: ReadonlySet<number> = new Set([
  ...[0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104],
  ...[109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515],
  ...[526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049],
  ...[3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10_080],
  // Redis and memcached.
  ...[6379, 11_211],
]);

/** @param port of a URL: empty for the one of its scheme */
export function isBadPort(port: string): boolean {
  return port !== "" && BAD_PORTS.has(Number(port));
}

// A URL that is to be stored is judged for a clear error early; what protects is the rule at dial time.

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

/** Unspecified, private, loopback, link-local and multicast. */
const LOCAL_V4 = table(
  "0.0.0.0/8",
  "10.0.0.0/8",
  "127.0.0.0/8",
  "169.254.0.0/16",
  "172.16.0.0/12",
  "192.168.0.0/16",
  "224.0.0.0/4",
);
const LOCAL_V6 = table("::/128", "::1/128", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8");

/** What a stored URL may not name. Narrower than the rule at dial time: other ranges fail there. */
const WRITTEN_REFUSED = [...LOCAL_V4, ...LOCAL_V6];

/** The rest of IANA's special-purpose registry for IPv4, reserved space, and Azure's metadata address. */
const SPECIAL_V4 = table(
  "100.64.0.0/10",
  "168.63.129.16/32",
  "192.0.0.0/24",
  "192.0.2.0/24",
  "192.31.196.0/24",
  "192.52.193.0/24",
  "192.88.99.0/24",
  "192.175.48.0/24",
  "198.18.0.0/15",
  "198.51.100.0/24",
  "203.0.113.0/24",
  "240.0.0.0/4",
);
const DIAL_REFUSED_V4 = [...LOCAL_V4, ...SPECIAL_V4];

/** All of IPv6 that IANA has opened for global unicast. Everything outside is special or unassigned. */
const GLOBAL_V6 = table("2000::/3");

/** The special-purpose parts of it. 2001::/23 holds Teredo, benchmarking, ORCHID and more. */
const DIAL_REFUSED_V6 = table("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20");

function isGlobal(address: Address): boolean {
  if (address.length === 4) return !inAny(DIAL_REFUSED_V4, address);
  return inAny(GLOBAL_V6, address) && !inAny(DIAL_REFUSED_V6, address);
}

/** The addresses that are reached by this one. */
function reached(address: Address): Address[] {
  const carried = embeddedV4(address);
  return carried === null ? [address] : [unmapped(address), carried];
}

function isDeniedAddress(address: Address, { deny }: HostRules): boolean {
  return reached(address).some((each) => inAny(deny.ranges, each));
}

function isExemptAddress(address: Address, { allow }: HostRules): boolean {
  return inAny(allow.ranges, unmapped(address));
}

function isOwn(address: Address, { own }: HostRules): boolean {
  return reached(address).some((each) => own().some((mine) => isSame(mine, each)));
}

export function isDeniedName(hostname: string, { deny }: HostRules): boolean {
  return deny.names.has(bareName(hostname));
}

/** Whether this address of the host is free of the rules that hold for everybody. */
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

/** What a name will lead to is not known yet: it may be exempt where any range is. */
function mayBeExempt(hostname: string, rules: HostRules): boolean {
  const literal = literalAddress(hostname);
  if (literal !== null) return isExempt(hostname, literal, rules);
  return rules.allow.names.has(bareName(hostname)) || rules.allow.ranges.length > 0;
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

// The hosts that a secret may go to: names or addresses, and `*.` before a name for the names under it. Entries are
// kept in the spelling that URL parsing gives a host, so that one text is compared with another.

const WILDCARD = "*.";

export type AllowedHosts =
  | { readonly ok: true; readonly hosts: readonly string[] }
  /** `index` is of the entry that is wrong; null when it is the list. */
  | { readonly ok: false; readonly index: number | null; readonly reason: string };

/** Reads what a caller gives as a list. An entry that says the same as another one is kept once. */
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
  // No name is under an address.
  return name === null || literalAddress(name) !== null ? null : `${WILDCARD}${name}`;
}

/** Whether a request to this URL, dialled as it is written, goes to one of the hosts. */
export function isAllowedUrl(url: string, hosts: readonly string[]): boolean {
  const hostname = bareName(URL.parse(url)?.hostname ?? "");
  if (hostname === "") return false;
  return hosts.some((host) =>
    host.startsWith(WILDCARD) ? hostname.length >= host.length && hostname.endsWith(host.slice(1)) : hostname === host,
  );
}
