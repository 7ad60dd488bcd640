// The connection pools of outgoing calls: one per TLS identity, which is the name that the certificate must
// carry and the client certificate that is shown. A pool never serves another identity, and inside it
// connections belong to the address that was dialled, so reuse can't carry a call past the check of addresses.
import tls from "node:tls";
import { openTransport } from "./http-client.ts";
import type { Transport, TransportOptions } from "./transport.ts";

/** What a call shows to a server that asks for a certificate. All PEM. */
export interface ClientIdentity {
  readonly cert: string;
  readonly key: string;
  /** Roots trusted for this server beside the usual ones. */
  readonly ca: string | null;
}

/** `serverName` is null for plain HTTP and for hosts that are addresses. */
export type Connections = (serverName: string | null, identity: ClientIdentity | null) => Transport;

const POOLS_MAX = 128;
/**
 * A pool with roots of its own holds a copy of all roots, 0.3 MB that the collector does not see (measured:
 * 1,000 names, 440 MB of garbage), so it is told after this many evictions. Opening one costs 4 ms anyway.
 */
const EVICTIONS_PER_COLLECTION = 64;

function identityKey(identity: ClientIdentity | null): string {
  if (identity === null) return "";
  const parts = JSON.stringify([identity.cert, identity.key, identity.ca]);
  return new Bun.CryptoHasher("sha256").update(parts).digest("base64");
}

function shown(identity: ClientIdentity | null): TransportOptions["client"] {
  return identity === null ? null : { cert: identity.cert, key: identity.key };
}

/** The system's roots and the built-in ones are largely the same, in other line lengths. */
function distinct(certificates: readonly string[]): string[] {
  return [...new Map(certificates.map((pem) => [pem.replace(/\s/g, ""), pem])).values()];
}

export function createConnections(extraCa: string | null): Connections {
  const pools = new Map<string, Transport>();
  let defaultRoots: string[] | null = null;
  let evictions = 0;

  /** `ca` replaces the default roots, so they are listed with it; null leaves them as they are. */
  function roots(identity: ClientIdentity | null): string[] | null {
    const extra = [extraCa, identity?.ca ?? null].filter((pem) => pem !== null);
    if (extra.length === 0) return null;
    defaultRoots ??= distinct(tls.getCACertificates("default"));
    return [...defaultRoots, ...extra];
  }

  function evictUnused(): void {
    const oldest = pools.entries().next();
    if (oldest.done === true) return;
    const [key, pool] = oldest.value;
    pools.delete(key);
    pool.close();
    evictions++;
    if (defaultRoots !== null && evictions % EVICTIONS_PER_COLLECTION === 0) Bun.gc(true);
  }

  return (serverName, identity) => {
    const key = `${serverName ?? ""} ${identityKey(identity)}`;
    const found = pools.get(key);
    if (found === undefined && pools.size >= POOLS_MAX) evictUnused();
    const pool = found ?? openTransport({ serverName, ca: roots(identity), client: shown(identity) });
    // Put last, so that the first one is always the one unused for longest.
    pools.delete(key);
    pools.set(key, pool);
    return pool;
  };
}
