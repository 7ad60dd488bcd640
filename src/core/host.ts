// The rules for upstream hosts: which URLs may be stored, which addresses may be dialled, and who is exempt.
// Pure, and in terms of addresses as bytes: every spelling is folded before it is judged, and what can't be
// read is refused. A stored URL is judged for a clear error early; what protects is the rule at dial time.
import { URL_CHARACTERS_MAX } from "./limits.ts";

/** 4 or 16 bytes, in network order. */
export type Address = Uint8Array;

interface Network {
  readonly address: Address;
  /** Bits. */
  readonly prefix: number;
}

export interface AllowList {
  readonly names: ReadonlySet<string>;
  readonly networks: readonly Network[];
}

export type WrittenUrl =
  | { readonly ok: true; readonly url: URL }
  /** `reason` is safe for callers and follows the name of a field. */
  | { readonly ok: false; readonly reason: string };

function parseV4(text: string): Address | null {
  const parts = text.split(".");
  if (parts.length !== 4) return null;
  const address = new Uint8Array(4);
  for (const [index, part] of parts.entries()) {
    if (!/^(0|[1-9]\d{0,2})$/.test(part) || Number(part) > 255) return null;
    address[index] = Number(part);
  }
  return address;
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

function parseNetwork(text: string): Network | null {
  const slash = text.indexOf("/");
  const address = parseAddress(slash < 0 ? text : text.slice(0, slash));
  if (address === null) return null;
  const bits = address.length * 8;
  if (slash < 0) return { address, prefix: bits };
  const suffix = text.slice(slash + 1);
  if (!/^(0|[1-9]\d{0,2})$/.test(suffix) || Number(suffix) > bits) return null;
  return { address, prefix: Number(suffix) };
}

function contains(network: Network, address: Address): boolean {
  if (network.address.length !== address.length) return false;
  let bits = network.prefix;
  for (let index = 0; bits > 0; index++, bits -= 8) {
    const mask = bits >= 8 ? 0xff : (0xff << (8 - bits)) & 0xff;
    if ((((network.address[index] ?? 0) ^ (address[index] ?? 0)) & mask) !== 0) return false;
  }
  return true;
}

function inAny(networks: readonly Network[], address: Address): boolean {
  return networks.some((network) => contains(network, address));
}

function table(...texts: string[]): Network[] {
  return texts.map((text) => {
    const network = parseNetwork(text);
    if (network === null) throw new Error(`no network: ${text}`);
    return network;
  });
}

const MAPPED = table("::ffff:0:0/96");

/** IPv6 forms that carry an IPv4 address, and the byte where it starts. */
const EMBEDDINGS = [
  { networks: MAPPED, offset: 12 },
  // IPv4-compatible (RFC 4291), IPv4-translated (RFC 2765), NAT64 (RFC 6052).
  { networks: table("::/96", "::ffff:0:0:0/96", "64:ff9b::/96"), offset: 12 },
  // 6to4 (RFC 3056).
  { networks: table("2002::/16"), offset: 2 },
];

function embeddedV4(address: Address): Address | null {
  const form = EMBEDDINGS.find((candidate) => inAny(candidate.networks, address));
  return form === undefined ? null : address.slice(form.offset, form.offset + 4);
}

/** The kernel dials an IPv4-mapped address as the IPv4 address itself, so the two are one. */
function unmapped(address: Address): Address {
  return inAny(MAPPED, address) ? address.slice(12) : address;
}

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

/** Whether an address may be dialled: global unicast, or exempt. */
export function mayDial(text: string, allow: AllowList): boolean {
  const address = parseAddress(text);
  return address !== null && (isGlobal(address) || inAny(allow.networks, unmapped(address)));
}

/** The name without the dots that only say "absolute". */
function bareName(hostname: string): string {
  return hostname.toLowerCase().replace(/\.+$/, "");
}

export function isExemptName(hostname: string, allow: AllowList): boolean {
  return allow.names.has(bareName(hostname));
}

/** The address that a URL's host spells out, or null when the host is a name. */
export function literalAddress(hostname: string): string | null {
  const text = hostname.startsWith("[") ? hostname.slice(1, -1) : hostname;
  return parseAddress(text) === null ? null : text;
}

/** A name as URLs spell it, so that IDNs and the short forms of IPv4 compare equal; null when it is none. */
function canonicalHost(text: string): string | null {
  if (!/^[^\s/\\?#@:*[\]%]+$/.test(text)) return null;
  const url = URL.parse(`http://${text}/`);
  const name = url === null ? "" : bareName(url.hostname);
  return isName(name) ? name : null;
}

function parseEntry(entry: string): Network | string | null {
  const text = entry.trim();
  const network = parseNetwork(/^\[.*\]$/.test(text) ? text.slice(1, -1) : text);
  if (network !== null) {
    const inMapped = network.prefix >= 96 && inAny(MAPPED, network.address);
    return inMapped ? { address: network.address.slice(12), prefix: network.prefix - 96 } : network;
  }
  const name = canonicalHost(text);
  return name === null ? null : (parseNetwork(name) ?? name);
}

/**
 * Names are exact: a name does not exempt the names under it.
 * @throws Error that quotes the first entry which is no host, address or CIDR.
 */
export function parseAllowList(entries: readonly string[]): AllowList {
  const names = new Set<string>();
  const networks: Network[] = [];
  for (const entry of entries) {
    const parsed = parseEntry(entry);
    if (parsed === null) throw new Error(`${JSON.stringify(entry)} is no host name, address or CIDR`);
    if (typeof parsed === "string") names.add(parsed);
    else networks.push(parsed);
  }
  return { names, networks };
}

/** Whether the text could be a name at all (RFC 1035 section 2.3.4); it bounds what reaches the resolver. */
function isName(name: string): boolean {
  return name.length <= 253 && name.split(".").every((label) => label.length > 0 && label.length <= 63);
}

/** RFC 6761 section 6.3: localhost and every name under it mean the loopback addresses. */
function isLocalhost(name: string): boolean {
  return name === "localhost" || name.endsWith(".localhost");
}

const LOOPBACK = ["127.0.0.1", "::1"];

/** Names and addresses that must not be written down, the exempt ones aside. */
function isRefusedHost(hostname: string, allow: AllowList): boolean {
  const literal = literalAddress(hostname);
  const address = literal === null ? null : parseAddress(literal);
  if (address !== null) {
    if (inAny(allow.networks, unmapped(address))) return false;
    const carried = address.length === 16 ? embeddedV4(address) : null;
    return inAny(WRITTEN_REFUSED, address) || (carried !== null && inAny(WRITTEN_REFUSED, carried));
  }
  const name = bareName(hostname);
  if (allow.names.has(name) || !isLocalhost(name)) return false;
  // A network exempts addresses, whatever name leads to them: here the name says which ones it leads to.
  return !LOOPBACK.every((loopback) => mayDial(loopback, allow));
}

/**
 * Judges a URL that someone wants stored. The text must be plainly `http(s)://host…`: what the URL parser would
 * repair (backslashes, white space, missing or surplus slashes) is refused, so that no reader sees another host.
 */
export function checkWrittenUrl(text: string, allow: AllowList): WrittenUrl {
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
  if (isRefusedHost(url.hostname, allow)) {
    return refuse("must not name localhost or a loopback, private, link-local or other local address");
  }
  return { ok: true, url };
}
