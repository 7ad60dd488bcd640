// SHA-256 of bodies, in lower hex. A body may be asked about by its idempotency key, its payment and its receipt, and
// has up to 32 MiB: it is hashed once, and only when one of them asks, in steps.
import { createHash } from "node:crypto";
import { bodyInSteps } from "../concurrency/run-steps.ts";
import type { Steps } from "../concurrency/steps.ts";

/** Of one step: half a millisecond where the processor has no instructions for it. */
const STEP_BYTES = 262_144;

const known = new WeakMap<Uint8Array, string>();

/** The bytes must not change afterwards. */
export function* sha256Of(bytes: Uint8Array): Steps<string> {
  const hashed = known.get(bytes);
  if (hashed !== undefined) return hashed;
  const hash = createHash("sha256");
  for (let at = 0; at < bytes.length; at += STEP_BYTES) {
    if (at > 0) yield;
    hash.update(bytes.subarray(at, at + STEP_BYTES));
  }
  const digest = hash.digest("hex");
  known.set(bytes, digest);
  return digest;
}

/** The SHA-256 of a body, in lower hex. */
export function hashOf(body: Uint8Array, tenant: string): Promise<string> {
  return bodyInSteps("hash of a body", body, sha256Of(body), tenant);
}
