// Socket options that the runtime does not offer, set by calls to the system.
//
// The kernel's receive buffer: the runtime reads a socket until that buffer is nearly empty, paused or not, in pieces of
// half a megabyte (measured on Bun 1.4.5: 15 MB in one go from a fast sender). The kernel lets the buffer grow to
// megabytes for a connection that was fast once. With a small buffer no read brings more than it holds.
//
// The backlog, connections that wait to be accepted: the runtime asks for 512. A client that arrives when it is full is
// not heard, and tries again after a whole second.
//
// Who is at the other end of a descriptor, and for how long nothing has passed: the runtime tells of no connection before
// its first request is whole.
//
// A filter on handshakes, for a process that leaves a port which others share.
//
// Needed up to Bun 1.4.5 at least: a version whose server tells of connections and takes a backlog, and whose sockets take
// a size of their receive buffer, makes this file unnecessary.
//
// One per thread, since the system library is opened once and never closed.
import { dlopen, ptr } from "bun:ffi";

/** Linux counts twice as much, for its own book-keeping. At 100 ms to the upstream this makes 2.5 MB a second. */
const BUFFER_BYTES = 128 * 1024;
/**
 * Of callers' connections. One read may be full of chunks of one byte: half a megabyte of them took 5 ms, on 1,500
 * connections 8 s. At 100 ms from the caller 39 KB under way make 0.4 MB a second; twice the size would make 0.8 (measured).
 */
const CALLER_BUFFER_BYTES = 32 * 1024;
/** Where bodies are small, and chunks cost more, since `node:http` tells of each. */
export const SMALL_BODIES_BUFFER_BYTES = 16 * 1024;
/** The kernel's own limit, `net.core.somaxconn`, is as much where nobody has changed it. */
const WAITING_MAX = 4096;

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

type Library = ReturnType<typeof openLibrary>;

let found: Library | null | undefined;

/** Null where there is none: then the sizes of the kernel and the runtime apply. */
function library(): Library | null {
  if (found !== undefined) return found;
  found = null;
  for (const name of LIBRARIES) {
    try {
      found = openLibrary(name);
      break;
    } catch {
      // The next one may be there.
    }
  }
  return found;
}

function setReceiveBuffer(descriptor: number, bytes: number): void {
  bufferBytes[0] = bytes;
  library()?.setsockopt(descriptor, SOL_SOCKET, SO_RCVBUF, ptr(bufferBytes), bufferBytes.byteLength);
}

/** @param socket an open one of `node:net` or `node:tls`, or a server that listens, whose connections inherit it */
export function keepReceiveBufferSmall(socket: object, bytes: number = BUFFER_BYTES): void {
  const handle: unknown = "_handle" in socket ? socket._handle : null;
  const descriptor: unknown = typeof handle === "object" && handle !== null && "fd" in handle ? handle.fd : null;
  if (typeof descriptor === "number" && descriptor >= 0) setReceiveBuffer(descriptor, bytes);
}

/**
 * Lets more connections wait at the port that this process listens on, and keeps their receive buffers small.
 *
 * @param from the lowest descriptor that was free before the port was opened. The port's is the first that listens from
 *   there on, unless another thread freed a lower one meanwhile. To look at all 32,768 took 15 ms of every start (measured)
 * @param below all descriptors are
 * @returns the port's descriptor
 */
export function letMoreWait(from: number, below: number): number | null {
  const system = library();
  if (system === null) return null;
  for (let looked = 0; looked < below; looked++) {
    const descriptor = (from + looked) % below;
    accepts[0] = 0;
    system.getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, ptr(accepts), ptr(length));
    if (accepts[0] !== 1) continue;
    system.listen(descriptor, WAITING_MAX);
    setReceiveBuffer(descriptor, CALLER_BUFFER_BYTES);
    return descriptor;
  }
  return null;
}

/**
 * A program for the kernel (classic BPF, `linux/filter.h`) that drops segments with SYN, the first of a handshake:
 * load the byte of the flags (RFC 9293, section 3.1); is SYN in it? then keep nothing; else keep all.
 */
const NO_SYN = new Uint8Array(
  [
    [0x30, 0, 0, 0, 13, 0, 0, 0],
    [0x45, 0, 0, 1, 0x02, 0, 0, 0],
    [0x06, 0, 0, 0, 0, 0, 0, 0],
    [0x06, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
  ].flat(),
);
const INSTRUCTION_BYTES = 8;

/** Lets no new handshake begin with a socket that listens; those that have begun go on. */
export function refuseHandshakes(descriptor: number): void {
  // A `struct sock_fprog`: how many instructions, and where they are.
  const program = new BigUint64Array([BigInt(NO_SYN.length / INSTRUCTION_BYTES), BigInt(ptr(NO_SYN))]);
  library()?.setsockopt(descriptor, SOL_SOCKET, SO_ATTACH_FILTER, ptr(program), program.byteLength);
}

const IPPROTO_TCP = 6;
const TCP_INFO = 11;
const SHUT_RDWR = 2;
const [AF_INET, AF_INET6] = [2, 10];
/** A `struct sockaddr_in6`, the larger of the two. */
const name = new DataView(new ArrayBuffer(28));
/**
 * The start of a `struct tcp_info`: at these places stand so many milliseconds since data was last sent, and received, in
 * steps of 4, and how many bytes the peer has acknowledged (the lower half).
 */
const info = new Uint32Array(32);
const [SENT_AT, RECEIVED_AT, ACKNOWLEDGED_AT] = [44 / 4, 52 / 4, 120 / 4];
/** An address as text, and a zero after it. */
const text = Buffer.alloc(46);

/** A connection that came to the port. */
export interface OpenConnection {
  readonly descriptor: number;
  readonly network: string;
  readonly peer: string;
  /** Since bytes went, and before any went, since it came: what the peer sends does not change it (measured). */
  readonly unansweredMs: number;
  /** Whether no bytes have gone yet, or none since some came last. */
  readonly isUnanswered: boolean;
}

/** Tells a connection from all that are open. The runtime writes addresses as the system does (measured). */
export const peerName = ({ address, port }: Pick<Bun.SocketAddress, "address" | "port">): string =>
  `${address} ${port}`;

/**
 * What one caller may have all addresses of: an address of IPv4, also over a socket of IPv6, or a network of IPv6.
 *
 * @param half the first one of the address, which tells the network (RFC 4291, section 2.5.4)
 */
export function networkOf(address: string, half: bigint): string {
  const ofIpv4 = address.replace(/^::ffff:(?=.*\.)/, "");
  return ofIpv4.includes(":") ? `${half.toString(16)}/64` : ofIpv4;
}

/** The connections to this port among so many descriptors. */
export function connectionsAt(port: number, from: number, count: number): OpenConnection[] {
  const system = library();
  const found: OpenConnection[] = [];
  if (system === null) return found;
  for (let descriptor = from; descriptor < from + count; descriptor++) {
    length[0] = name.byteLength;
    if (system.getsockname(descriptor, ptr(name), ptr(length)) !== 0 || name.getUint16(2) !== port) continue;
    length[0] = name.byteLength;
    if (system.getpeername(descriptor, ptr(name), ptr(length)) !== 0) continue;
    // The address stands behind the flow in IPv6.
    const [family, at] = length[0] === name.byteLength ? [AF_INET6, 8] : [AF_INET, 4];
    system.inet_ntop(family, ptr(name, at), ptr(text), text.byteLength);
    const shown = text.toString("latin1", 0, text.indexOf(0));
    const peer = peerName({ address: shown, port: name.getUint16(2) });
    length[0] = info.byteLength;
    system.getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, ptr(info), ptr(length));
    const unansweredMs = info[SENT_AT] ?? 0;
    const isUnanswered = info[ACKNOWLEDGED_AT] === 0 || (info[RECEIVED_AT] ?? 0) < unansweredMs;
    found.push({ descriptor, network: networkOf(shown, name.getBigUint64(at)), peer, unansweredMs, isUnanswered });
  }
  return found;
}

/** Ends a connection; the runtime learns of it as if the peer had gone. */
export function endConnection({ descriptor }: OpenConnection): void {
  library()?.shutdown(descriptor, SHUT_RDWR);
}
