// The body of a call: one piece while it is small, parts otherwise. A large one is gathered, stored, handed to a worker
// and sent part by part, so that no piece of work takes all of it, and its parts move between threads without a copy.

import { createHash } from "node:crypto";
import { bodyInSteps, inSteps, type Steps } from "../kernel/turns.ts";

/**
 * Of a part, and the most that is in one piece. On SQLite to store one takes 3 ms of the event loop with its commit
 * (measured; 32 MiB at once 114), and 32 MiB take 71 ms of CPU, with half of this 83; to remove them, half the time.
 */
export const PART_BYTES = 512 * 1024;

export type CallBody = Uint8Array | LargeBody;

export class LargeBody {
  readonly byteLength: number;
  /** Views of the whole, once somebody has asked for that. */
  parts: readonly Uint8Array[];
  whole: Uint8Array | null = null;
  /** In lower hex. Hashed once, when idempotency key, payment or receipt asks for it first. */
  sha256: string | null = null;

  /**
   * @param parts at least two, in their order; in memory of their own. Those that are stored are of PART_BYTES each, but
   *   for the last of a body
   */
  constructor(parts: readonly Uint8Array[]) {
    this.parts = parts;
    this.byteLength = parts.reduce((sum, part) => sum + part.byteLength, 0);
  }

  /** Joins the parts, one in each step. Each is given back as soon as it is copied. */
  *joined(): Steps<Uint8Array> {
    if (this.whole !== null) return this.whole;
    const whole = new Uint8Array(this.byteLength);
    let at = 0;
    for (const part of this.parts) {
      if (at > 0) yield;
      whole.set(part, at);
      at += part.byteLength;
      freeMemory(part);
    }
    this.parts = bodyPartsOf(whole);
    this.whole = whole;
    return whole;
  }
}

/**
 * Gives back the memory of a piece that nobody needs any more, unless it is part of something larger. May be called again.
 * The garbage collector would be late, and memory that is new to the process costs more than a copy into it: with this, 16
 * calls with 10 MiB both ways hold half as much.
 */
export function freeMemory(piece: Uint8Array): void {
  const { buffer, byteLength } = piece;
  if (byteLength > 0 && buffer instanceof ArrayBuffer && buffer.byteLength === byteLength) buffer.transfer(0);
}

export function freeBody(body: CallBody): void {
  if (body instanceof Uint8Array) freeMemory(body);
  else if (body.whole !== null) freeMemory(body.whole);
  else for (const part of body.parts) freeMemory(part);
}

/** The parts of a body as they are stored; of one in a single piece, views of it. */
export function bodyPartsOf(body: CallBody): readonly Uint8Array[] {
  if (body instanceof LargeBody) return body.parts;
  if (body.byteLength <= PART_BYTES) return [body];
  const count = Math.ceil(body.byteLength / PART_BYTES);
  return Array.from({ length: count }, (_, n) => body.subarray(n * PART_BYTES, (n + 1) * PART_BYTES));
}

export function bodyOf(parts: readonly Uint8Array[]): CallBody {
  const [first] = parts;
  if (first === undefined) return new Uint8Array();
  return parts.length === 1 ? first : new LargeBody(parts);
}

/** No more than its first `bytes`, which are whole parts; it shares the memory of the body. */
export function startOf(body: CallBody, bytes: number): CallBody {
  if (body instanceof LargeBody) return bodyOf(body.parts.slice(0, bytes / PART_BYTES));
  return body.subarray(0, bytes);
}

/** All of a body in one piece, for what reads here and there in it. */
export async function wholeOf(body: CallBody, tenant: string): Promise<Uint8Array> {
  if (!(body instanceof LargeBody)) return body;
  return body.whole ?? inSteps(body.joined(), tenant);
}

/** Hashed in one step: half a millisecond on a processor without instructions for it. */
const STEP_BYTES = 262_144;

/** The SHA-256 of a body, in lower hex. Its bytes must not change afterwards. */
export function* sha256Of(body: CallBody): Steps<string> {
  if (body instanceof LargeBody && body.sha256 !== null) return body.sha256;
  const hash = createHash("sha256");
  let isBegun = false;
  for (const part of bodyPartsOf(body)) {
    for (let at = 0; at < part.length; at += STEP_BYTES) {
      if (isBegun) yield;
      isBegun = true;
      hash.update(part.subarray(at, at + STEP_BYTES));
    }
  }
  const digest = hash.digest("hex");
  if (body instanceof LargeBody) body.sha256 = digest;
  return digest;
}

export function hashOf(body: CallBody, tenant: string): Promise<string> {
  return bodyInSteps(body, sha256Of(body), tenant);
}
