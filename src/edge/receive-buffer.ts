// The kernel's buffer for what a connection brings. The runtime reads a socket until that buffer is nearly empty, paused
// or not, in pieces of half a megabyte (measured on Bun 1.4.5: 15 MB in one go from a fast sender). The kernel lets the
// buffer grow to megabytes for a connection that was fast once. With a small one no read brings more than it holds. The
// runtime has no option for it, so the system is asked itself.
import { dlopen, ptr } from "bun:ffi";

/** Linux counts twice as much, for its own book-keeping. At 100 ms to the upstream this makes 2.5 MB a second. */
const BUFFER_BYTES = 128 * 1024;
const SOL_SOCKET = 1;
const SO_RCVBUF = 8;

const LIBRARIES = ["libc.so.6", "libc.musl-x86_64.so.1", "libc.musl-aarch64.so.1"];

const value = new Int32Array([BUFFER_BYTES]);

type SetOption = (descriptor: number) => unknown;

let setOption: SetOption | null = null;

/** Where there is no such library, the kernel's own sizes hold. */
function findSetOption(): SetOption {
  for (const library of LIBRARIES) {
    try {
      const { symbols } = dlopen(library, {
        setsockopt: { args: ["i32", "i32", "i32", "ptr", "u32"], returns: "i32" },
      });
      return (descriptor) =>
        symbols.setsockopt(descriptor, SOL_SOCKET, SO_RCVBUF, ptr(value), value.byteLength);
    } catch {
      // The next one may be there.
    }
  }
  return () => undefined;
}

/** @param socket an open one of `node:net` or `node:tls` */
export function keepReceiveBufferSmall(socket: object): void {
  const handle: unknown = "_handle" in socket ? socket._handle : null;
  const descriptor: unknown =
    typeof handle === "object" && handle !== null && "fd" in handle ? handle.fd : null;
  if (typeof descriptor !== "number" || descriptor < 0) return;
  setOption ??= findSetOption();
  setOption(descriptor);
}
