// The SHA-256 of a response, taken while it is read: only its start is ever kept.
import { createHash, type Hash } from "node:crypto";

export interface BodyDigest {
  /** Takes what follows the start, piece by piece. */
  readonly beyond: (rest: Uint8Array, start: () => Uint8Array) => void;
  /** The digest in lower hex, at the end. */
  of(start: Uint8Array): string;
}

export function bodyDigest(): BodyDigest {
  const begin = (start: Uint8Array) => createHash("sha256").update(start);
  let begun: Hash | null = null;
  return {
    beyond(rest, start) {
      begun ??= begin(start());
      begun.update(rest);
    },
    of: (start) => (begun ?? begin(start)).digest("hex"),
  };
}
