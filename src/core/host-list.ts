// Host names and addresses as texts of URLs and of settings: how each is spelled, and lists of them.
import { inAny, MAPPED, type Network, parseAddress, parseNetwork, parseV6 } from "./ip-ranges.ts";

export interface HostList {
  readonly names: ReadonlySet<string>;
  readonly networks: readonly Network[];
}

/** The name without the dots that only say "absolute". */
export function bareName(hostname: string): string {
  return hostname.toLowerCase().replace(/\.+$/, "");
}

/** Whether the text could be a name at all (RFC 1035 section 2.3.4); it bounds what reaches the resolver. */
export function isName(name: string): boolean {
  return name.length <= 253 && name.split(".").every((label) => label.length > 0 && label.length <= 63);
}

/** The address that a URL's host spells out, or null when the host is a name. */
export function literalAddress(hostname: string): string | null {
  const text = hostname.startsWith("[") ? hostname.slice(1, -1) : hostname;
  return parseAddress(text) === null ? null : text;
}

/**
 * A name or an address as URLs spell it, so that IDNs and the short forms of addresses compare equal; null when it is
 * none.
 */
export function canonicalHost(text: string): string | null {
  const bare = /^\[.*\]$/.test(text) ? text.slice(1, -1) : text;
  if (bare.includes(":")) return parseV6(bare) === null ? null : (URL.parse(`http://[${bare}]/`)?.hostname ?? null);
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
 * Names are exact: a name does not stand for the names under it.
 * @throws Error that quotes the first entry which is no host, address or CIDR.
 */
export function parseHostList(entries: readonly string[]): HostList {
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
