// What the runtime has no option for, so the system is asked itself.
//
// The kernel's buffer for what a connection brings: the runtime reads a socket until that buffer is nearly empty, paused
// or not, in pieces of half a megabyte (measured on Bun 1.4.5: 15 MB in one go from a fast sender). The kernel lets the
// buffer grow to megabytes for a connection that was fast once. With a small one no read brings more than it holds.
//
// How many connections may wait until they are taken: the runtime asks for 512. A client that comes when so many wait
// is not heard, and asks again after a whole second.
import { dlopen, ptr } from "bun:ffi";

/** Linux counts twice as much, for its own book-keeping. At 100 ms to the upstream this makes 2.5 MB a second. */
const BUFFER_BYTES = 128 * 1024;
/** The kernel's own limit, `net.core.somaxconn`, is as much where nobody has changed it. */
const WAITING_MAX = 4096;

/** Of Linux; elsewhere there is none of the libraries. */
const SOL_SOCKET = 1;
const SO_RCVBUF = 8;
const SO_ACCEPTCONN = 30;
const LIBRARIES = ["libc.so.6", "libc.musl-x86_64.so.1", "libc.musl-aarch64.so.1"];

const bufferBytes = new Int32Array([BUFFER_BYTES]);
const accepts = new Int32Array(1);
const length = new Int32Array([accepts.byteLength]);

function openLibrary(name: string) {
  return dlopen(name, {
    setsockopt: { args: ["i32", "i32", "i32", "ptr", "u32"], returns: "i32" },
    getsockopt: { args: ["i32", "i32", "i32", "ptr", "ptr"], returns: "i32" },
    listen: { args: ["i32", "i32"], returns: "i32" },
  }).symbols;
}

type Library = ReturnType<typeof openLibrary>;

let found: Library | null | undefined;

/** Null where there is none: the sizes of the kernel and the runtime hold. */
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

/** @param socket an open one of `node:net` or `node:tls` */
export function keepReceiveBufferSmall(socket: object): void {
  const handle: unknown = "_handle" in socket ? socket._handle : null;
  const descriptor: unknown =
    typeof handle === "object" && handle !== null && "fd" in handle ? handle.fd : null;
  if (typeof descriptor !== "number" || descriptor < 0) return;
  library()?.setsockopt(descriptor, SOL_SOCKET, SO_RCVBUF, ptr(bufferBytes), bufferBytes.byteLength);
}

/**
 * Lets more connections wait at every port that this process listens on.
 *
 * @param below all descriptors are (one takes 0.2 microseconds to look at)
 */
export function letMoreWait(below: number): void {
  const system = library();
  if (system === null) return;
  for (let descriptor = 0; descriptor < below; descriptor++) {
    accepts[0] = 0;
    system.getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, ptr(accepts), ptr(length));
    if (accepts[0] === 1) system.listen(descriptor, WAITING_MAX);
  }
}
