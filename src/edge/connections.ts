// The connection pools of outgoing calls: one per TLS identity, which is the name that the certificate must
// carry and the client certificate that is shown. A pool never serves another identity, and inside it
// connections belong to the address that was dialled, so reuse can't carry a call past the check of addresses.
import tls from "node:tls";

/** What a call shows to a server that asks for a certificate. All PEM. */
export interface ClientIdentity {
  readonly cert: string;
  readonly key: string;
  /** Roots trusted for this server beside the usual ones. */
  readonly ca: string | null;
}

/** `serverName` is null for plain HTTP and for hosts that are addresses. */
export type Connections = (serverName: string | null, identity: ClientIdentity | null) => Bun.FetchSession;

const SESSIONS_MAX = 128;
/**
 * A session with roots of its own holds a copy of all roots, 0.3 MB that the collector does not see (measured:
 * 1,000 names, 440 MB of garbage), so it is told after this many evictions. Opening one costs 4 ms anyway.
 */
const EVICTIONS_PER_COLLECTION = 64;
/** Seconds. Short, since a server that drops idle connections unseen costs the call that finds out. */
const IDLE_SECONDS = 30;

function identityKey(identity: ClientIdentity | null): string {
  if (identity === null) return "";
  const parts = JSON.stringify([identity.cert, identity.key, identity.ca]);
  return new Bun.CryptoHasher("sha256").update(parts).digest("base64");
}

/** The system's roots and the built-in ones are largely the same, in other line lengths. */
function distinct(certificates: readonly string[]): string[] {
  return [...new Map(certificates.map((pem) => [pem.replace(/\s/g, ""), pem])).values()];
}

export function createConnections(extraCa: string | null): Connections {
  const sessions = new Map<string, Bun.FetchSession>();
  let defaultRoots: string[] | null = null;
  let evictions = 0;

  /** `ca` replaces the default roots, so they are listed with it; undefined leaves them as they are. */
  function roots(identity: ClientIdentity | null): string[] | undefined {
    const extra = [extraCa, identity?.ca ?? null].filter((pem) => pem !== null);
    if (extra.length === 0) return undefined;
    defaultRoots ??= distinct(tls.getCACertificates("default"));
    return [...defaultRoots, ...extra];
  }

  function open(serverName: string | null, identity: ClientIdentity | null): Bun.FetchSession {
    const ca = roots(identity);
    return new Bun.FetchSession({
      // Proxy variables are ignored: a proxy would resolve the name again, unchecked.
      proxy: false,
      keepAlive: { idleTimeout: IDLE_SECONDS },
      tls: {
        // Said aloud, because NODE_TLS_REJECT_UNAUTHORIZED could switch it off.
        rejectUnauthorized: true,
        ...(serverName === null ? {} : { serverName }),
        ...(ca === undefined ? {} : { ca }),
        ...(identity === null ? {} : { cert: identity.cert, key: identity.key }),
      },
    });
  }

  function evictUnused(): void {
    const oldest = sessions.entries().next();
    if (oldest.done === true) return;
    const [key, session] = oldest.value;
    sessions.delete(key);
    // Closes what is idle; calls in flight finish.
    session.close();
    evictions++;
    if (defaultRoots !== null && evictions % EVICTIONS_PER_COLLECTION === 0) Bun.gc(true);
  }

  return (serverName, identity) => {
    const key = `${serverName ?? ""} ${identityKey(identity)}`;
    const found = sessions.get(key);
    if (found === undefined && sessions.size >= SESSIONS_MAX) evictUnused();
    const session = found ?? open(serverName, identity);
    // Put last, so that the first one is always the one unused for longest.
    sessions.delete(key);
    sessions.set(key, session);
    return session;
  };
}
