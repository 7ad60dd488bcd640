// The mutual-TLS port. A client without a valid certificate of the client CA is refused in the handshake; the others
// are known by the fingerprint of theirs. There is no inner port that plain bytes are relayed to: node:tls hands
// its verified sockets to the HTTP side directly, so no other process can get in between.
import { constants, X509Certificate } from "node:crypto";
import { createServer, type Server, type TLSSocket, type TlsOptions } from "node:tls";
import { parseCertificates } from "../core/certificates.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import {
  type HttpOptions,
  type KnownPeer,
  listenAt,
  OpenSockets,
  type PortAddress,
  serveConnections,
} from "../http/http1.ts";
import { MAX } from "../kernel/limits.ts";
import { every } from "../kernel/loop.ts";
import { createReservedShare } from "../kernel/share.ts";

/** By the certificate that the handshake has verified. */
export interface Peer extends KnownPeer {
  /** SHA-256 of the certificate, lower-case hex. */
  readonly fingerprint: string;
  readonly certificate: X509Certificate;
}

export type ListenerLimits = typeof LISTENER_LIMITS;

export const LISTENER_LIMITS = {
  handshakeMs: 5_000,
  /** Under way at a time. One more ends the oldest; an honest peer's handshake is never that for long. */
  handshakes: 1_024,
  /** In all, shared out among the accounts, so that none shuts out the others. */
  connections: MAX.settleConnections,
  idleMs: 60_000,
  headMs: 10_000,
  bodyMs: 10_000,
  flushMs: 10_000,
};

/** Certificates that belong to no account share one part. No account has this name. */
const STRANGERS = "";

export interface MtlsListenerOptions extends HttpOptions<Peer>, Omit<PortAddress, "variable"> {
  readonly tls: TlsMaterial;
  /** The account that a certificate is of; null for none. */
  readonly ownerOf: (fingerprint: string) => Promise<string | null>;
  readonly limits: ListenerLimits;
}

/** @throws StartupProblem when certificate and key are unusable, or it can't have its address */
export async function listenMutualTls(options: MtlsListenerOptions) {
  const server = createTlsServer(options.tls);
  const sockets = new OpenSockets();
  const admitted = admit(server, sockets, options);
  let roots = parseCertificates(options.tls.clientCa);
  const { host, log } = options;
  const port = await listenAt(server, { host, port: options.port, variable: "TOLLGATE_PORT" }, log);
  const sweeping = setInterval(admitted.sweep, 250);

  async function drain(): Promise<void> {
    server.close();
    admitted.closeIdle();
    await sockets.empty();
  }

  return {
    port,
    /**
     * Handshakes from now on are made with this; connections and requests at work go on. Those whose certificate no CA
     * of it has issued end, when they have answered what they are at work on.
     *
     * @throws when it can't be used: then nothing has changed
     */
    renew(tls: TlsMaterial): void {
      const next = parseCertificates(tls.clientCa);
      server.setSecureContext(secureOptions(tls));
      const isAnyGone = roots.some((root) => !next.some((each) => each.fingerprint256 === root.fingerprint256));
      roots = next;
      if (isAnyGone) admitted.keep((certificate) => next.some((root) => isIssuedBy(certificate, root)));
    },
    /** Listens no more, and closes what is idle. Resolves when every connection is gone. */
    drain,
    /** Closes everything. */
    async stop(): Promise<void> {
      sockets.closeAll();
      await drain();
      clearInterval(sweeping);
    },
  };
}

/** Complete each time: Bun keeps nothing from the context before. */
function secureOptions({ cert, key, clientCa }: TlsMaterial): TlsOptions {
  return {
    cert,
    key,
    ca: clientCa,
    requestCert: true,
    rejectUnauthorized: true,
    minVersion: "TLSv1.2",
    ALPNProtocols: ["http/1.1"],
    // A resumed session would carry a certificate past the check of its dates.
    secureOptions: constants.SSL_OP_NO_TICKET,
  };
}

/** Directly; a chain with other certificates in between is judged in a handshake only. */
function isIssuedBy(certificate: X509Certificate, root: X509Certificate): boolean {
  return certificate.checkIssued(root) && certificate.verify(root.publicKey);
}

function createTlsServer(tls: TlsMaterial): Server {
  try {
    return createServer(secureOptions(tls));
  } catch (cause) {
    throw new StartupProblem(
      "TOLLGATE_TLS_CERT_FILE and TOLLGATE_TLS_KEY_FILE must be a certificate and its private key, and TOLLGATE_CLIENT_CA_FILE the certificates of a CA",
      { cause },
    );
  }
}

/** Counts connections from their first packet on, and hands those with a verified certificate to HTTP. */
function admit(server: Server, sockets: OpenSockets, options: MtlsListenerOptions) {
  const { ownerOf, limits, log } = options;
  const http = serveConnections(options);
  /** When each has to be done, the oldest first. */
  const handshakes = new Map<TLSSocket, number>();
  const shares = createReservedShare(limits.connections);
  const refused = refusals(log);

  server.on("connection", (raw) => {
    // In Bun it is the socket that the handshake makes secure.
    const socket = raw as TLSSocket;
    handshakes.set(socket, performance.now() + limits.handshakeMs);
    sockets.add(socket, () => handshakes.delete(socket));
    // The oldest handshake makes room for a new one. It may be the new one itself.
    const [oldest] = handshakes.keys();
    if (sockets.size > limits.connections || handshakes.size > limits.handshakes) oldest?.destroy();
  });
  server.on("tlsClientError", (error, socket) => {
    refused("code" in error ? String(error.code) : error.message, socket.remoteAddress);
    socket.destroy();
  });
  server.on("secureConnection", (socket) => {
    const peer = peerOf(socket);
    if (peer === null) refuse(socket, "no verified certificate");
    else void enter(socket, peer);
  });

  function refuse(socket: TLSSocket, reason: string): void {
    refused(reason, socket.remoteAddress);
    socket.destroy();
  }

  /** The handshake's time limit holds until it is known whose share the connection counts to. */
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
    /** Connections whose certificate is still trusted. Handshakes under way began with what was trusted before. */
    keep(isTrusted: (certificate: X509Certificate) => boolean) {
      for (const socket of handshakes.keys()) socket.destroy();
      const known = new Map<string, boolean>();
      http.keep(({ fingerprint, certificate }) => {
        const trusted = known.get(fingerprint) ?? isTrusted(certificate);
        known.set(fingerprint, trusted);
        return trusted;
      });
    },
  };
}

/** Null for what the handshake should not have let through. */
function peerOf(socket: TLSSocket): Peer | null {
  if (!socket.authorized || socket.isSessionReused()) return null;
  const certificate = new X509Certificate(socket.getPeerCertificate().raw);
  const expiresAt = Date.parse(certificate.validTo);
  const fingerprint = certificate.fingerprint256.replaceAll(":", "").toLowerCase();
  if (!/^[0-9a-f]{64}$/.test(fingerprint) || !Number.isFinite(expiresAt)) return null;
  return { fingerprint, certificate, expiresAt };
}

function refusals(log: Log): (reason: string, address: string | undefined) => void {
  let count = 0;
  let toldAt = Number.NEGATIVE_INFINITY;
  return (reason, address) => {
    log.debug("handshake_refused", { reason, address });
    count++;
    const now = performance.now();
    // A summary of refused handshakes is logged this often at most; anybody can cause them.
    if (now - toldAt < 10_000) return;
    log.info("handshakes_refused", { count, last_reason: reason, last_address: address });
    [count, toldAt] = [0, now];
  };
}

/** PEM. */
export interface TlsMaterial {
  /** The server's certificate and what leads from it to a root. */
  readonly cert: string;
  /** Without a passphrase. */
  readonly key: string;
  /** The one or more roots of client certificates. */
  readonly clientCa: string;
}

/** What the files hold now. */
export interface TlsReading {
  /** Equal for equal content, and for no other. */
  readonly digest: string;
  judge():
    | { readonly tls: TlsMaterial; readonly warnings: readonly string[] }
    | { readonly tls: null; readonly problem: string };
}

interface Following {
  readonly read: () => Promise<TlsReading>;
  /** What is in force. */
  readonly tls: TlsMaterial;
  /** Puts it in force. When it throws, the last one stays. */
  readonly take: (tls: TlsMaterial) => void;
  readonly log: Log;
  /** Between two looks; tests shorten it. */
  readonly lookMs?: number;
}

/**
 * Follows the certificate, key and client CA while the port runs: to renew them, one only has to write the files. A change
 * counts once two looks in a row have found the same content, so a half-written one does not. If the new content can't be
 * used, the last one stays in force, and that is logged once.
 *
 * @returns what ends it
 */
export function followTlsFiles({ read, tls, take, log, lookMs = 1_000 }: Following): () => void {
  let inForce = tls;
  let seen = "";
  let judged = "";

  async function look(): Promise<void> {
    const reading = await read();
    const isSettled = reading.digest === seen;
    seen = reading.digest;
    if (!isSettled || reading.digest === judged) return;
    judged = reading.digest;
    const found = reading.judge();
    if (found.tls === null) log.error("tls_files_refused", { problem: found.problem });
    else if (!isSame(found.tls, inForce)) put(found.tls, found.warnings);
  }

  function put(next: TlsMaterial, warnings: readonly string[]): void {
    try {
      take(next);
    } catch (error) {
      log.error("tls_files_refused", { error });
      return;
    }
    inForce = next;
    log.info("tls_files_taken");
    for (const warning of warnings) log.warn("tls_files_suspect", { warning });
  }

  // While a file system hangs, it is not asked again.
  return every(lookMs, () => look().catch((error) => log.error("tls_files_not_read", { error })));
}

const isSame = (a: TlsMaterial, b: TlsMaterial): boolean =>
  a.cert === b.cert && a.key === b.key && a.clientCa === b.clientCa;
