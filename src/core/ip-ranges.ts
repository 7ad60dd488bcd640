// IP addresses and networks as bytes: every spelling of an address is folded into one form before anything is judged.

/** 4 or 16 bytes, in network order. */
export type Address = Uint8Array;

export interface Network {
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

export function parseV6(text: string): Address | null {
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

export function parseNetwork(text: string): Network | null {
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

export function inAny(networks: readonly Network[], address: Address): boolean {
  return networks.some((network) => contains(network, address));
}

export function table(...texts: string[]): Network[] {
  return texts.map((text) => {
    const network = parseNetwork(text);
    if (network === null) throw new Error(`no network: ${text}`);
    return network;
  });
}

export const MAPPED = table("::ffff:0:0/96");

/** IPv6 forms that carry an IPv4 address, and the byte where it starts. */
const EMBEDDINGS = [
  { networks: MAPPED, offset: 12 },
  // IPv4-compatible (RFC 4291), IPv4-translated (RFC 2765), NAT64 (RFC 6052).
  { networks: table("::/96", "::ffff:0:0:0/96", "64:ff9b::/96"), offset: 12 },
  // 6to4 (RFC 3056).
  { networks: table("2002::/16"), offset: 2 },
];

export function embeddedV4(address: Address): Address | null {
  const form = EMBEDDINGS.find((candidate) => inAny(candidate.networks, address));
  return form === undefined ? null : address.slice(form.offset, form.offset + 4);
}

/** The kernel dials an IPv4-mapped address as the IPv4 address itself, so the two are one. */
export function unmapped(address: Address): Address {
  return inAny(MAPPED, address) ? address.slice(12) : address;
}

export function isSame(one: Address, other: Address): boolean {
  return one.length === other.length && one.every((byte, index) => byte === other[index]);
}
