// The SHA-256 of a response as its caller gets it, taken while it is read: only its start is ever kept, and of an
// MCP answer the start holds the id, which may not be the caller's.
import { createHash, type Hash } from "node:crypto";

export interface BodyDigest {
  /** Takes what follows the start, piece by piece. */
  readonly beyond: (rest: Uint8Array, start: () => Uint8Array) => void;
  /** The digest in lower hex, at the end. @param start as the caller gets it */
  of(start: Uint8Array): string;
}

/** @param given turns a start as it was read into the one that the caller gets */
export function bodyDigest(given = (start: Uint8Array) => start): BodyDigest {
  const begin = (start: Uint8Array) => createHash("sha256").update(start);
  let begun: Hash | null = null;
  return {
    beyond(rest, start) {
      begun ??= begin(given(start()));
      begun.update(rest);
    },
    of: (start) => (begun ?? begin(start)).digest("hex"),
  };
}
