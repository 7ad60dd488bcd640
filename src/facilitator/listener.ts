// The mutual-TLS port. Whoever has no valid certificate of the client CA is refused in the handshake; the others
// are known by the fingerprint of theirs. There is no inner port that plain bytes are relayed to: node:tls hands
// its verified sockets to the HTTP side directly, so no other process can get in between.
import { constants } from "node:crypto";
import { createServer, type Server, type TLSSocket } from "node:tls";
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { type ConnectionLimits, type HttpOptions, type Peer, serveConnections } from "./connection.ts";

export interface ListenerLimits extends ConnectionLimits {
  readonly handshakeMs: number;
  /** Handshakes under way at a time; a further one ends the oldest, which an honest peer's never is for long. */
  readonly handshakes: number;
  /** Connections in all. */
  readonly connections: number;
  /** Connections of one certificate, so that no account shuts out the others. */
  readonly connectionsOfPeer: number;
}

export const LISTENER_LIMITS: ListenerLimits = {
  handshakeMs: 5_000,
  handshakes: 1_024,
  connections: 4_096,
  connectionsOfPeer: 2_048,
  idleMs: 60_000,
  headMs: 10_000,
  bodyMs: 10_000,
  flushMs: 10_000,
};

const SWEEP_MS = 250;
/** A summary of refused handshakes is logged this often at most; anybody can cause them. */
const REFUSALS_EVERY_MS = 10_000;

export interface ListenerOptions {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  readonly tls: { readonly cert: string; readonly key: string; readonly clientCa: string };
  readonly answer: HttpOptions["answer"];
  readonly bodyBytesMax: number;
  readonly limits: ListenerLimits;
  readonly clock: Clock;
  readonly log: Log;
}

export interface Listener {
  readonly port: number;
  /** Listens no more, and closes what is idle. Resolves when every connection is gone. */
  drain(): Promise<void>;
  /** Closes everything. */
  stop(): Promise<void>;
}

/** @throws StartupProblem when certificate and key are unusable, or the port is taken */
export async function listenMutualTls(options: ListenerOptions): Promise<Listener> {
  const server = createTlsServer(options.tls);
  const sockets = admit(server, options);
  await listen(server, options);
  const sweeping = setInterval(sockets.sweep, SWEEP_MS);
  const address = server.address();
  const port = typeof address === "object" && address !== null ? address.port : options.port;

  async function drain(): Promise<void> {
    server.close();
    sockets.closeIdle();
    await sockets.empty();
  }

  return {
    port,
    drain,
    async stop() {
      sockets.closeAll();
      await drain();
      clearInterval(sweeping);
    },
  };
}

function createTlsServer({ cert, key, clientCa }: ListenerOptions["tls"]): Server {
  try {
    return createServer({
      cert,
      key,
      ca: clientCa,
      requestCert: true,
      rejectUnauthorized: true,
      minVersion: "TLSv1.2",
      ALPNProtocols: ["http/1.1"],
      // A resumed session would carry a certificate past a look at its dates.
      secureOptions: constants.SSL_OP_NO_TICKET,
    });
  } catch (cause) {
    throw new StartupProblem(
      "TOLLGATE_TLS_CERT_FILE and TOLLGATE_TLS_KEY_FILE must be a certificate and its private key, and TOLLGATE_CLIENT_CA_FILE the certificates of a CA",
      { cause },
    );
  }
}

function listen(server: Server, { host, port, log }: ListenerOptions): Promise<void> {
  return new Promise((resolve, reject) => {
    const refuse = (cause: Error) =>
      reject(
        new StartupProblem(
          `TOLLGATE_HOST and TOLLGATE_PORT must be free to listen on: ${host} port ${port}`,
          { cause },
        ),
      );
    server.once("error", refuse);
    server.listen({ host, port }, () => {
      server.off("error", refuse);
      server.on("error", (error) => log.error("listener failed", { error }));
      resolve();
    });
  });
}

/** Counts connections from their first packet on, and hands those with a verified certificate to HTTP. */
function admit(server: Server, { answer, bodyBytesMax, limits, clock, log }: ListenerOptions) {
  const http = serveConnections({ answer, bodyBytesMax, limits, clock, log });
  const sockets = new Set<TLSSocket>();
  /** When each has to be done, the oldest first. */
  const handshakes = new Map<TLSSocket, number>();
  const peers = new Map<string, number>();
  const refused = refusals(log);
  const awaitEmpty: (() => void)[] = [];

  server.on("connection", (raw) => {
    // In Bun it is the socket that the handshake makes secure.
    const socket = raw as TLSSocket;
    sockets.add(socket);
    handshakes.set(socket, performance.now() + limits.handshakeMs);
    socket.on("error", () => socket.destroy());
    socket.on("close", () => {
      sockets.delete(socket);
      handshakes.delete(socket);
      if (sockets.size === 0) for (const tell of awaitEmpty.splice(0)) tell();
    });
    const [oldest] = handshakes.keys();
    if (sockets.size > limits.connections) socket.destroy();
    else if (handshakes.size > limits.handshakes) oldest?.destroy();
  });
  server.on("tlsClientError", (error, socket) => {
    refused("code" in error ? String(error.code) : error.message, socket.remoteAddress);
    socket.destroy();
  });
  server.on("secureConnection", (socket) => {
    handshakes.delete(socket);
    const peer = peerOf(socket);
    const others = peers.get(peer?.fingerprint ?? "") ?? 0;
    if (peer === null || others >= limits.connectionsOfPeer) {
      refused(peer === null ? "no verified certificate" : "too many connections", socket.remoteAddress);
      socket.destroy();
      return;
    }
    peers.set(peer.fingerprint, others + 1);
    http.take(socket, peer, () => {
      const left = (peers.get(peer.fingerprint) ?? 1) - 1;
      if (left > 0) peers.set(peer.fingerprint, left);
      else peers.delete(peer.fingerprint);
    });
  });

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
    closeAll() {
      for (const socket of sockets) socket.destroy();
    },
    empty(): Promise<void> {
      if (sockets.size === 0) return Promise.resolve();
      return new Promise((resolve) => {
        awaitEmpty.push(resolve);
      });
    },
  };
}

/** Null for what the handshake should not have let through. */
function peerOf(socket: TLSSocket): Peer | null {
  if (!socket.authorized || socket.isSessionReused()) return null;
  const { fingerprint256, valid_to } = socket.getPeerCertificate();
  const expiresAt = Date.parse(valid_to);
  const fingerprint = fingerprint256.replaceAll(":", "").toLowerCase();
  return /^[0-9a-f]{64}$/.test(fingerprint) && Number.isFinite(expiresAt) ? { fingerprint, expiresAt } : null;
}

function refusals(log: Log): (reason: string, address: string | undefined) => void {
  let count = 0;
  let toldAt = Number.NEGATIVE_INFINITY;
  return (reason, address) => {
    log.debug("handshake refused", { reason, address });
    count++;
    const now = performance.now();
    if (now - toldAt < REFUSALS_EVERY_MS) return;
    log.info("handshakes refused", { count, last_reason: reason, last_address: address });
    [count, toldAt] = [0, now];
  };
}
