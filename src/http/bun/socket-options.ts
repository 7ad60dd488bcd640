// Socket options and facts that the runtime does not offer, by calls to the system library.
//
// The kernel's receive buffer: the runtime reads a socket until that buffer is nearly empty, paused or not, in pieces of
// half a megabyte (measured on Bun 1.4.5: 15 MB at once from a fast sender). The kernel lets the buffer of a fast connection
// grow to megabytes. With a small buffer no read brings more than the buffer holds.
//
// The backlog of connections that wait to be accepted: the runtime asks for 512. When it is full, the handshake of a new client
// is dropped, and the client retries after a whole second.
//
// The peer of a connection, and how long nothing has passed on it: the runtime tells of no connection before its first
// request is complete.
//
// A filter on handshakes, for a process that leaves a shared port.
//
// Needed up to Bun 1.4.5 at least: a version whose server reports connections and takes a backlog, and whose sockets take a
// size for their receive buffer, makes this file unnecessary.
import { dlopen, ptr } from "bun:ffi";
import { attempt } from "../../core/fault.ts";

/** For upstream connections. Linux doubles the size, for its book-keeping. At 100 ms to the upstream it allows 2.5 MB/s. */
const BUFFER_BYTES = 128 * 1024;
/**
 * The receive buffer of callers' connections. One read may be full of one-byte chunks: half a megabyte of them took 5 ms, on
 * 1,500 connections 8 s. At 100 ms from the caller, 39 KB in flight make 0.4 MB/s; twice the size would make 0.8 (measured).
 */
const CALLER_BUFFER_BYTES = 32 * 1024;
/** The receive buffer where bodies are small and chunks cost more, since `node:http` emits an event for each. */
export const SMALL_BODIES_BUFFER_BYTES = 16 * 1024;
/** Equals the default of the kernel's own limit, `net.core.somaxconn`. */
const BACKLOG_MAX = 4096;

/** Constants of Linux; elsewhere none of the libraries exists. */
const SOL_SOCKET = 1;
const SO_RCVBUF = 8;
const SO_ATTACH_FILTER = 26;
const SO_ACCEPTCONN = 30;
const LIBRARIES = ["libc.so.6", "libc.musl-x86_64.so.1", "libc.musl-aarch64.so.1"];

const bufferBytes = new Int32Array(1);
const accepts = new Int32Array(1);
const length = new Int32Array([accepts.byteLength]);

function openLibrary(name: string) {
  return dlopen(name, {
    setsockopt: { args: ["i32", "i32", "i32", "ptr", "u32"], returns: "i32" },
    getsockopt: { args: ["i32", "i32", "i32", "ptr", "ptr"], returns: "i32" },
    listen: { args: ["i32", "i32"], returns: "i32" },
    getsockname: { args: ["i32", "ptr", "ptr"], returns: "i32" },
    getpeername: { args: ["i32", "ptr", "ptr"], returns: "i32" },
    inet_ntop: { args: ["i32", "ptr", "ptr", "u32"], returns: "ptr" },
    shutdown: { args: ["i32", "i32"], returns: "i32" },
  }).symbols;
}

/** The system library; null where none is found, so that the sizes of the kernel and the runtime apply. */
const library =
  LIBRARIES.values()
    .map((name) => attempt(() => openLibrary(name)))
    .find((opened) => opened !== undefined) ?? null;

function setReceiveBuffer(descriptor: number, bytes: number): void {
  bufferBytes[0] = bytes;
  library?.setsockopt(descriptor, SOL_SOCKET, SO_RCVBUF, ptr(bufferBytes), bufferBytes.byteLength);
}

/** @param socket an open socket of `node:net` or `node:tls`, or a listening server, whose connections inherit the size */
export function keepReceiveBufferSmall(socket: object, bytes: number = BUFFER_BYTES): void {
  const handle: unknown = "_handle" in socket ? socket._handle : null;
  const descriptor: unknown = typeof handle === "object" && handle !== null && "fd" in handle ? handle.fd : null;
  if (typeof descriptor === "number" && descriptor >= 0) setReceiveBuffer(descriptor, bytes);
}

/**
 * Finds the port's listening socket, enlarges its backlog, and makes the receive buffers of its connections small.
 * @param from the lowest descriptor that was free before the port was opened: to examine all 32,768 took 15 ms of every start. The
 *   search goes round, up to `below`, in case another thread freed a lower one meanwhile
 * @returns the port's descriptor; null when it was not found
 */
export function enlargeBacklog(from: number, below: number): number | null {
  if (library === null) return null;
  for (let examined = 0; examined < below; examined++) {
    const descriptor = (from + examined) % below;
    accepts[0] = 0;
    library.getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, ptr(accepts), ptr(length));
    if (accepts[0] !== 1) continue;
    library.listen(descriptor, BACKLOG_MAX);
    setReceiveBuffer(descriptor, CALLER_BUFFER_BYTES);
    return descriptor;
  }
  return null;
}

/**
 * A socket filter (classic BPF, `linux/filter.h`) that drops segments with SYN, which begin a handshake: load the byte with the
 * flags (RFC 9293, section 3.1); if SYN is set keep nothing, else keep all.
 */
const NO_SYN = Uint8Array.of(
  ...[0x30, 0, 0, 0, 13, 0, 0, 0],
  ...[0x45, 0, 0, 1, 0x02, 0, 0, 0],
  ...[0x06, 0, 0, 0, 0, 0, 0, 0],
  ...[0x06, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
);
const INSTRUCTION_BYTES = 8;

/** Makes a listening socket ignore new handshakes; those that have begun go on. */
export function refuseHandshakes(descriptor: number): void {
  // A `struct sock_fprog`: the number of instructions, and their address.
  const program = new BigUint64Array([BigInt(NO_SYN.length / INSTRUCTION_BYTES), BigInt(ptr(NO_SYN))]);
  library?.setsockopt(descriptor, SOL_SOCKET, SO_ATTACH_FILTER, ptr(program), program.byteLength);
}

const IPPROTO_TCP = 6;
const TCP_INFO = 11;
const SHUT_RDWR = 2;
const [AF_INET, AF_INET6] = [2, 10];
/** A `struct sockaddr_in6`, which is larger than a `struct sockaddr_in`. */
const name = new DataView(new ArrayBuffer(28));
/**
 * The start of a `struct tcp_info`. At these offsets are the milliseconds since data was last sent and last received, in steps
 * of 4 ms, and the number of bytes that the peer has acknowledged (its lower half).
 */
const info = new Uint32Array(32);
const [SENT_AT, RECEIVED_AT, ACKNOWLEDGED_AT] = [44 / 4, 52 / 4, 120 / 4];
/** An address as text, with a zero byte at its end. */
const text = Buffer.alloc(46);

export interface OpenConnection {
  readonly descriptor: number;
  readonly network: string;
  readonly peer: string;
  /** Time since bytes were last sent, or since the connection was accepted; bytes from the peer don't change it (measured). */
  readonly unansweredMs: number;
  /** Whether nothing has been sent since bytes were last received. */
  readonly isUnanswered: boolean;
}

/** Identifies an open connection. The runtime spells addresses as the system does (measured). */
export const peerName = ({ address, port }: Omit<Bun.SocketAddress, "family">): string => `${address} ${port}`;

/**
 * The addresses that one client may have: a single IPv4 address (also on an IPv6 socket), or an IPv6 network.
 * @param half the first half of an IPv6 address, which is its network (RFC 4291, section 2.5.4)
 */
export function networkOf(address: string, half: bigint): string {
  const ofIpv4 = address.replace(/^::ffff:(?=.*\.)/, "");
  return ofIpv4.includes(":") ? `${half.toString(16)}/64` : ofIpv4;
}

/** The connections of this port among `count` descriptors. */
export function connectionsAt(port: number, from: number, count: number): OpenConnection[] {
  const found: OpenConnection[] = [];
  if (library === null) return found;
  for (let descriptor = from; descriptor < from + count; descriptor++) {
    length[0] = name.byteLength;
    if (library.getsockname(descriptor, ptr(name), ptr(length)) !== 0 || name.getUint16(2) !== port) continue;
    length[0] = name.byteLength;
    if (library.getpeername(descriptor, ptr(name), ptr(length)) !== 0) continue;
    // In IPv6 the address comes after the flow label.
    const [family, at] = length[0] === name.byteLength ? [AF_INET6, 8] : [AF_INET, 4];
    library.inet_ntop(family, ptr(name, at), ptr(text), text.byteLength);
    const shown = text.toString("latin1", 0, text.indexOf(0));
    const peer = peerName({ address: shown, port: name.getUint16(2) });
    length[0] = info.byteLength;
    library.getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, ptr(info), ptr(length));
    const unansweredMs = info[SENT_AT] ?? 0;
    const isUnanswered = info[ACKNOWLEDGED_AT] === 0 || (info[RECEIVED_AT] ?? 0) < unansweredMs;
    found.push({ descriptor, network: networkOf(shown, name.getBigUint64(at)), peer, unansweredMs, isUnanswered });
  }
  return found;
}

/** Ends a connection, which looks to the runtime as if the peer had closed it. */
export function endConnection({ descriptor }: OpenConnection): void {
  library?.shutdown(descriptor, SHUT_RDWR);
}
