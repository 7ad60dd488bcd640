// The hosts that a secret may go to: names or addresses, and `*.` before a name for the names under it. Entries are
// kept in the spelling that URL parsing gives a host, so that one text is compared with another.
import { bareName, canonicalHost, literalAddress } from "./host-list.ts";
import { ALLOWED_HOSTS_MAX } from "./limits.ts";

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
  if (index >= 0) {
    const reason = "must be a host without a port, or *. and a host name";
    return { ok: false, index, reason };
  }
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
