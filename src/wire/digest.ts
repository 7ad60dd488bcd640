// SHA-256 of bodies, in lower hex. Idempotency key, payment and receipt may each need the digest of a body of
// up to 32 MiB, so it is hashed once, only when one of them asks, and in steps.
// One per thread, since a digest is kept under the very bytes that it is of.
import { createHash } from "node:crypto";
import { bodyInSteps, type Steps } from "../concurrency/steps.ts";
import { type CallBody, partsOf } from "./body.ts";

/** Hashed in one step: half a millisecond on a processor without instructions for it. */
const STEP_BYTES = 262_144;

const known = new WeakMap<CallBody, string>();

/** The bytes must not change afterwards. */
export function* sha256Of(body: CallBody): Steps<string> {
  const hashed = known.get(body);
  if (hashed !== undefined) return hashed;
  const hash = createHash("sha256");
  let isBegun = false;
  for (const part of partsOf(body)) {
    for (let at = 0; at < part.length; at += STEP_BYTES) {
      if (isBegun) yield;
      isBegun = true;
      hash.update(part.subarray(at, at + STEP_BYTES));
    }
  }
  const digest = hash.digest("hex");
  known.set(body, digest);
  return digest;
}

/** The SHA-256 of a body, in lower hex. */
export function hashOf(body: CallBody, tenant: string): Promise<string> {
  return bodyInSteps(body, sha256Of(body), tenant);
}
