// SHA-256 of bodies, in lower hex. A body may be asked about by its idempotency key, its payment and its receipt, and
// has up to 32 MiB: it is hashed once, and only when one of them asks.
import { createHash } from "node:crypto";

const known = new WeakMap<Uint8Array, string>();

/** The bytes must not change afterwards. */
export function sha256Of(bytes: Uint8Array): string {
  const hashed = known.get(bytes);
  if (hashed !== undefined) return hashed;
  const digest = createHash("sha256").update(bytes).digest("hex");
  known.set(bytes, digest);
  return digest;
}
