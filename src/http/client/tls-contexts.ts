// TLS contexts of outgoing connections: a client certificate to show, and the roots to trust. Making one with roots of its
// own takes 4 ms, so contexts are kept, with a share for each tenant.
import { createPrivateKey } from "node:crypto";
import tls from "node:tls";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";

/** What a call shows to a server that asks for a certificate. All PEM. */
export interface ClientIdentity {
  readonly cert: string;
  readonly key: string;
  /** Roots trusted for this server beside the usual ones. */
  readonly ca: string | null;
}

export interface TlsContext {
  /** Contexts with the same certificate and roots have the same name. */
  readonly name: string;
  /** Undefined for the usual roots and no certificate. */
  readonly secureContext: tls.SecureContext | undefined;
  /** Its key signs in milliseconds, on the thread of the event loop: RSA-4096 takes 5 ms, EC and RSA-2048 less than one. */
  readonly isSlowToSign: boolean;
}

const QUICK_RSA_BITS = 2048;

/**
 * A context with roots of its own holds a copy of all roots, 0.3 MB that the garbage collector does not see (measured:
 * 1,000 of them, 440 MB of garbage). So the collector is run after this many evictions. That takes 9 ms, and making so
 * many contexts 250 ms; a concurrent collection would free none of them.
 */
const EVICTIONS_PER_COLLECTION = 64;

/** The system's roots and the built-in ones are largely the same, in other line lengths. */
function distinct(certificates: readonly string[]): string[] {
  return [...new Map(certificates.map((pem) => [pem.replace(/\s/g, ""), pem])).values()];
}

export function createTlsContexts(extraCa: string | null) {
  const known = tenantCache<string, TlsContext>(MAX.tlsContexts, evicted);
  let defaultRoots: string[] | null = null;
  let usual: TlsContext | null = null;
  let evictions = 0;

  function evicted(): void {
    evictions++;
    if (defaultRoots !== null && evictions % EVICTIONS_PER_COLLECTION === 0) Bun.gc(true);
  }

  /** `ca` replaces the default roots, so they are listed with it; undefined leaves them as they are. */
  function roots(own: string | null): string[] | undefined {
    const extra = [extraCa, own].filter((pem) => pem !== null);
    if (extra.length === 0) return undefined;
    defaultRoots ??= distinct(tls.getCACertificates("default"));
    return [...defaultRoots, ...extra];
  }

  function usualContext(): TlsContext {
    const ca = roots(null);
    return { name: "", secureContext: ca && tls.createSecureContext({ ca }), isSlowToSign: false };
  }

  return (tenant: string, identity: ClientIdentity | null): TlsContext => {
    if (identity === null) {
      usual ??= usualContext();
      return usual;
    }
    const { cert, key } = identity;
    const parts = JSON.stringify([tenant, cert, key, identity.ca]);
    const name = new Bun.CryptoHasher("sha256").update(parts).digest("base64");
    const found = known.get(name);
    if (found !== undefined) return found;
    const ca = roots(identity.ca);
    const secureContext = tls.createSecureContext({ cert, key, ...(ca && { ca }) });
    const bits = createPrivateKey(key).asymmetricKeyDetails?.modulusLength ?? 0;
    const context = { name, secureContext, isSlowToSign: bits > QUICK_RSA_BITS };
    known.set(tenant, name, context);
    return context;
  };
}
