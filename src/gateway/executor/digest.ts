// The SHA-256 of a response, taken while it is read: only its start is ever kept.
import { createHash, type Hash } from "node:crypto";

export function createBodyDigest() {
  const begin = (start: Uint8Array) => createHash("sha256").update(start);
  let begun: Hash | null = null;
  return {
    /** Takes what follows the start, piece by piece. */
    beyond(rest: Uint8Array, start: () => Uint8Array) {
      begun ??= begin(start());
      begun.update(rest);
    },
    /** The digest in lower hex, at the end. */
    of: (start: Uint8Array) => (begun ?? begin(start)).digest("hex"),
  };
}

export type BodyDigest = ReturnType<typeof createBodyDigest>;
