// The mutual-TLS port, and reloading its certificates when their files change. A client without a valid certificate of the
// client CA is refused in the handshake; any other client is identified by its certificate's fingerprint. node:tls hands the
// verified sockets directly to the HTTP server, without a relay to an inner port, so no other process can get in between.
import { constants, X509Certificate } from "node:crypto";
import { createServer, type Server, type TLSSocket, type TlsOptions } from "node:tls";
import { parseCertificates } from "../core/certificates.ts";
import { errorCode } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import type { HttpOptions, KnownPeer, PortAddress } from "../http/http1.ts";
import { OpenSockets, openPort, serveConnections } from "../http/http1.ts";
import { MAX } from "../kernel/limits.ts";
import { every } from "../kernel/loop.ts";
import { createReservedShare } from "../kernel/share.ts";

/** A client, by the certificate that the handshake has verified. */
export interface Peer extends KnownPeer {
  /** The SHA-256 of the certificate, in lower-case hex. */
  readonly fingerprint: string;
  readonly certificate: X509Certificate;
}

export type ListenerLimits = typeof LISTENER_LIMITS;

export const LISTENER_LIMITS = {
  handshakeMs: 5_000,
  /** Concurrent handshakes. One more ends the oldest; an honest peer's handshake does not stay the oldest for long. */
  handshakes: 1_024,
  /** Connections in all, shared among the accounts, so that no account shuts out the others. */
  connections: MAX.settleConnections,
  idleMs: 60_000,
  headMs: 10_000,
  bodyMs: 10_000,
  flushMs: 10_000,
};

/** The name under which all certificates without an account share their connections. No account can have it. */
const STRANGERS = "";

export interface MtlsListenerOptions extends HttpOptions<Peer>, Omit<PortAddress, "variable"> {
  readonly tls: TlsMaterial;
  /** The name of the account that a certificate belongs to; null for none. */
  readonly ownerOf: (fingerprint: string) => Promise<string | null>;
  readonly limits: ListenerLimits;
}

/** @throws StartupProblem when certificate or key are unusable, or the address can't be listened on */
export async function listenMutualTls(options: MtlsListenerOptions) {
  const server = createTlsServer(options.tls);
  const sockets = new OpenSockets();
  const admitted = admit(server, sockets, options);
  let roots = parseCertificates(options.tls.clientCa);
  const { host, port, log } = options;
  return {
    ...(await openPort(server, sockets, admitted, { host, port, log, variable: "TOLLGATE_PORT" })),
    /**
     * Uses the new material for all further handshakes. Open connections go on, except those whose client certificate was
     * issued by none of the new CAs: these end once their requests in progress are answered.
     * @throws when the material is unusable: nothing has changed then
     */
    renew(tls: TlsMaterial): void {
      const next = parseCertificates(tls.clientCa);
      server.setSecureContext(secureOptions(tls));
      const isAnyGone = roots.some((root) => !next.some((each) => each.fingerprint256 === root.fingerprint256));
      roots = next;
      // Only direct issuers count here; a longer chain is verified only in a handshake.
      const isTrusted = (certificate: X509Certificate) =>
        next.some((root) => certificate.checkIssued(root) && certificate.verify(root.publicKey));
      if (isAnyGone) admitted.keep(isTrusted);
    },
  };
}

/** All options of a secure context, since Bun keeps nothing of the previous context. */
function secureOptions({ cert, key, clientCa }: TlsMaterial): TlsOptions {
  return {
    cert,
    key,
    ca: clientCa,
    requestCert: true,
    rejectUnauthorized: true,
    minVersion: "TLSv1.2",
    ALPNProtocols: ["http/1.1"],
    // A resumed session would skip the check of the certificate's dates.
    secureOptions: constants.SSL_OP_NO_TICKET,
  };
}

function createTlsServer(tls: TlsMaterial): Server {
  try {
    return createServer(secureOptions(tls));
  } catch (cause) {
    const pair = "TOLLGATE_TLS_CERT_FILE and TOLLGATE_TLS_KEY_FILE must be a certificate and its private key";
    throw new StartupProblem(`${pair}, and TOLLGATE_CLIENT_CA_FILE the certificates of a CA`, { cause });
  }
}

/** Counts connections from their first packet on, and hands those with a verified certificate to the HTTP server. */
function admit(server: Server, sockets: OpenSockets, options: MtlsListenerOptions) {
  const { ownerOf, limits, log } = options;
  const http = serveConnections(options);
  /** The deadline of each handshake (performance.now), oldest first. */
  const handshakes = new Map<TLSSocket, number>();
  const shares = createReservedShare(limits.connections);
  const refused = createHandshakeRefusalLog(log);

  server.on("connection", (raw) => {
    // In Bun, `connection` passes the very TLSSocket that `secureConnection` passes later.
    const socket = raw as TLSSocket;
    handshakes.set(socket, performance.now() + limits.handshakeMs);
    sockets.add(socket, () => handshakes.delete(socket));
    // Over a limit, the oldest handshake is ended, which may be the new one itself.
    const [oldest] = handshakes.keys();
    if (sockets.size > limits.connections || handshakes.size > limits.handshakes) oldest?.destroy();
  });
  server.on("tlsClientError", (error, socket) => refuse(socket, errorCode(error) ?? error.message));
  server.on("secureConnection", (socket) => {
    const peer = peerOf(socket);
    if (peer === null) refuse(socket, "no verified certificate");
    else void enter(socket, peer);
  });

  function refuse(socket: TLSSocket, reason: string): void {
    refused(reason, socket.remoteAddress);
    socket.destroy();
  }

  /** Admits a connection to its account's share. The handshake's deadline covers the lookup of the account too. */
  async function enter(socket: TLSSocket, peer: Peer): Promise<void> {
    const owner = await ownerOf(peer.fingerprint).catch((error) => {
      log.warn("account_lookup_failed", { error });
      return null;
    });
    if (!handshakes.delete(socket) || socket.destroyed) return;
    const share = owner ?? STRANGERS;
    if (!shares.take(share)) return refuse(socket, "too many connections");
    socket.once("close", () => shares.giveBack(share));
    http.take(socket, peer);
  }

  return {
    sweep() {
      const now = performance.now();
      for (const [socket, deadline] of handshakes) {
        if (now <= deadline) break;
        socket.destroy();
      }
      http.sweep();
    },
    closeIdle() {
      for (const socket of handshakes.keys()) socket.destroy();
      http.closeIdle();
    },
    /** Keeps only connections whose certificate is still trusted. Handshakes in progress end, as they began with the old CAs. */
    keep(isTrusted: (certificate: X509Certificate) => boolean) {
      for (const socket of handshakes.keys()) socket.destroy();
      const known = new Map<string, boolean>();
      http.keep(({ fingerprint, certificate }) => known.getOrInsertComputed(fingerprint, () => isTrusted(certificate)));
    },
  };
}

/** The verified client of a socket; null for a socket that the handshake should not have let through. */
function peerOf(socket: TLSSocket): Peer | null {
  if (!socket.authorized || socket.isSessionReused()) return null;
  const certificate = new X509Certificate(socket.getPeerCertificate().raw);
  const expiresAt = Date.parse(certificate.validTo);
  const fingerprint = certificate.fingerprint256.replaceAll(":", "").toLowerCase();
  if (!/^[0-9a-f]{64}$/.test(fingerprint) || !Number.isFinite(expiresAt)) return null;
  return { fingerprint, certificate, expiresAt };
}

function createHandshakeRefusalLog(log: Log): (reason: string, address: string | undefined) => void {
  let count = 0;
  let loggedAt = Number.NEGATIVE_INFINITY;
  return (reason, address) => {
    log.debug("handshake_refused", { reason, address });
    count++;
    const now = performance.now();
    // Anybody can cause refused handshakes, so they are summed up in one log line per ten seconds at most.
    if (now - loggedAt < 10_000) return;
    log.info("handshakes_refused", { count, last_reason: reason, last_address: address });
    [count, loggedAt] = [0, now];
  };
}

/** Certificates and key, each as PEM text. */
export interface TlsMaterial {
  /** The server's certificate, with the chain from it to a root. */
  readonly cert: string;
  /** The private key, without a passphrase. */
  readonly key: string;
  /** One or more root certificates that issue client certificates. */
  readonly clientCa: string;
}

/** The files' content at one moment. */
export interface TlsReading {
  /** Two digests are equal exactly if the contents are. */
  readonly digest: string;
  judge():
    | { readonly tls: TlsMaterial; readonly warnings: readonly string[] }
    | { readonly tls: null; readonly problem: string };
}

interface Following {
  readonly read: () => Promise<TlsReading>;
  /** The material in use. */
  readonly tls: TlsMaterial;
  /** Puts new material into use. When this throws, the last one stays in use. */
  readonly take: (tls: TlsMaterial) => void;
  readonly log: Log;
  /** The polling interval; tests shorten it. */
  readonly lookMs?: number;
}

/**
 * Polls the files of certificate, key and client CA while the port runs, so that writing the files renews them. A change counts
 * once two consecutive reads have found the same content, so that a half-written file is not used. If the new content is
 * unusable, the last material stays in use, and the problem is logged once. Returns a function that ends the polling.
 */
export function followTlsFiles({ read, tls, take, log, lookMs = 1_000 }: Following): () => void {
  let inUse = tls;
  let lastDigest = "";
  let judgedDigest = "";

  async function look(): Promise<void> {
    const reading = await read();
    const isStable = reading.digest === lastDigest;
    lastDigest = reading.digest;
    if (!isStable || reading.digest === judgedDigest) return;
    judgedDigest = reading.digest;
    const found = reading.judge();
    if (found.tls === null) log.error("tls_files_refused", { problem: found.problem });
    else if (!Bun.deepEquals(found.tls, inUse)) apply(found.tls, found.warnings);
  }

  function apply(next: TlsMaterial, warnings: readonly string[]): void {
    try {
      take(next);
    } catch (error) {
      log.error("tls_files_refused", { error });
      return;
    }
    inUse = next;
    log.info("tls_files_taken");
    for (const warning of warnings) log.warn("tls_files_suspect", { warning });
  }

  // The next read waits for the last one, so a hung file system is not read again.
  return every(lookMs, () => look().catch((error) => log.error("tls_files_not_read", { error })));
}
